"""Converts sampling fields of OpenAI's API, vLLM and llama.cpp's server to the engine's options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bitnet.core.engine import GenerationOptions
from bitnet.core.engine.options import OptionArguments
from bitnet.core.errors import InvalidInputError
from bitnet.server.generation.logit_bias import logit_bias
from bitnet.server.generation.samplers import left_out
from bitnet.server.request.errors import RequestError
from bitnet.server.request.fields import Fields

if TYPE_CHECKING:
    from bitnet.core.text.tokenizer import Tokenizer

MAX_STOPS = 16
MAX_CHOICES = 128
MAX_SEED = 2**63 - 1

OPENAI_DEFAULTS: OptionArguments = {"temperature": 1.0}


def sampling_options(
    fields: Fields,
    tokenizer: Tokenizer,
    preset: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    defaults: OptionArguments = OPENAI_DEFAULTS,
) -> OptionArguments:
    """The checked options of a request.

    Args:
        preset: Options that the model's preset sets; what the request sets counts more.
        defaults: Options of sampling that hold where neither says anything.

    Raises:
        RequestError: A field is out of its range.
    """
    top_k = fields.integer("top_k", -1)
    found: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": fields.number("temperature", 0, 100),
        "top_k": None if top_k is None else max(0, top_k),  # -1 turns it off in vLLM
        "top_p": fields.number("top_p", 0, 1),
        "min_p": fields.number("min_p", 0, 1),
        "min_tokens": fields.integer("min_tokens", 0),
        "presence_penalty": fields.number("presence_penalty", -2, 2),
        "frequency_penalty": fields.number("frequency_penalty", -2, 2),
        "repetition_penalty": fields.number(
            "repeat_penalty" if "repeat_penalty" in fields else "repetition_penalty", 1e-3, 1e3
        ),
        "logit_bias": logit_bias(fields, tokenizer),
        "seed": _seed(fields),
        "stop": fields.strings("stop", MAX_STOPS) or None,
        "stop_tokens": fields.tokens("stop_token_ids"),
        "ignore_eos": fields.flag("ignore_eos") or None,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
    }
    given = {name: value for name, value in found.items() if value is not None}
    return checked({"max_tokens": None, **defaults, **preset, **given, **left_out(fields)})


def token_limit(fields: Fields, *names: str, default: int | None = None, least: int = 1) -> int | None:
    """The maximum number of tokens, from the first of several fields that is given; -1 means no limit, as to llama.cpp.

    Returns:
        None: no limit.

    Raises:
        RequestError: It is neither -1 nor at least ``least``.
    """
    name = next((name for name in names if name in fields), None)
    if name is None:
        return default
    most = fields.integer(name, -1)
    if most == -1:
        return None
    return fields.integer(name, least)


def checked(options: dict[str, Any]) -> OptionArguments:
    """Validate options for the engine.

    Raises:
        RequestError: An option is out of range; the error names the field if the engine's error does.
    """
    if options.get("top_p") == 0:  # the lower bound in OpenAI's API: only the likeliest token
        options = {**options, "top_p": 1.0, "top_k": 1}
    try:
        GenerationOptions(**options)
    except InvalidInputError as error:
        name = error.message.split(" ", 1)[0]
        raise RequestError(400, error.message, field=name if name in options else None) from None
    return options  # type: ignore[return-value]


def _seed(fields: Fields) -> int | None:
    """A seed; -1 means a random one, as in llama.cpp."""
    seed = fields.integer("seed", -MAX_SEED, MAX_SEED)
    if seed is None or seed == -1:
        return None
    return seed if seed >= 0 else seed + 2**63
