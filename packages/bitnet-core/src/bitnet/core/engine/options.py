"""The options of a generation."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, TypedDict

import numpy as np

from bitnet.core.errors import InvalidInputError, brief
from bitnet.core.hal import SamplingParams
from bitnet.core.hal.step import EXTREME

MAX_REQUESTED_LOGPROBS = 1000

_INTEGERS = ("min_tokens", "top_k")
_INTEGERS_OR_NONE = ("max_tokens", "seed", "logprobs", "prompt_logprobs", "reasoning_budget")
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """How to generate. Each default turns its feature off; by default, sampling is greedy.

    Numbers are converted to Python's own types and collections are copied, so the engine's thread reads valid values.
    None in place of a collection means an empty one.

    Attributes:
        max_tokens: Maximum tokens to generate; None: until the context is full; 0, together with ``prompt_logprobs``:
            none.
        min_tokens: No end-of-sequence or stop token is chosen until this many tokens have been generated. A stop string
            ends the answer before that, too.
        temperature: Divides the logits; 0: greedy.
        top_k: Sample from the k most likely tokens only (0: off).
        top_p: Sample from the smallest set of most likely tokens whose probabilities add up to ``top_p`` (1: off).
        min_p: Sample from tokens at least ``min_p`` times as likely as the likeliest (0: off).
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt and output (Keskar et
            al. 2019; 1: off).
        presence_penalty: Subtracted from the logit of each token in the output (0: off).
        frequency_penalty: Subtracted once for each time a token is in the output (0: off).
        logit_bias: Added to the logits of these token ids; ``-inf`` forbids one.
        seed: The same seed, prompt and options give the same tokens. None: a random seed, reported in the completion.
        stop: Strings that end the generation; they are not part of its text.
        stop_tokens: Token ids that end the generation, besides the model's own.
        ignore_eos: Continue after the model's end-of-sequence tokens (for benchmarks).
        logprobs: Return log-probabilities of each token and of this many likeliest ones, from the model's unchanged
            logits. On CPUs, with 32,768 tokens or more, a token's may all be off by the same number, 1/64 at most;
            with ``deterministic=True`` they are exact.
        prompt_logprobs: Return the same for each token of the prompt but the first. The whole prompt is then computed,
            even if a part is in the KV cache.
        reasoning_budget: Maximum tokens of the thought before an answer, which is then ended by its end mark; 0: no
            thought; None: no limit. It counts in conversations only (:meth:`~bitnet.core.Model.chat`), and for models
            that think.
        prediction: A text that the answer may resemble, such as the file that it changes, or its token ids. Where the
            answer follows it, several tokens are computed in one step. It changes no token, and does nothing where
            prompt look-up is off, or where each token is chosen on the host.

    Raises:
        InvalidInputError: A value is out of its range.
    """

    max_tokens: int | None = 512
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_tokens: Collection[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    reasoning_budget: int | None = None
    prediction: str | Sequence[int] = ()

    def __post_init__(self) -> None:
        for name in _INTEGERS + _INTEGERS_OR_NONE:
            if (value := getattr(self, name)) is not None or name in _INTEGERS:
                object.__setattr__(self, name, integer(name, value))
        for name in _NUMBERS:
            object.__setattr__(self, name, _number(name, getattr(self, name)))
        if not isinstance(self.stop, str):
            object.__setattr__(self, "stop", _several("stop", self.stop, "a string or strings"))
        stop_tokens = _several("stop_tokens", self.stop_tokens, "token ids")
        object.__setattr__(self, "stop_tokens", tuple(integer("stop_tokens", token) for token in stop_tokens))
        if not isinstance(self.prediction, str):
            prediction = _several("prediction", self.prediction, "a text or token ids")
            object.__setattr__(self, "prediction", tuple(integer("prediction", token) for token in prediction))
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise InvalidInputError(f"logit_bias is {brief(self.logit_bias)}; it must map token ids to numbers.")
            bias = {integer("logit_bias", token): _number("logit_bias", b) for token, b in self.logit_bias.items()}
            object.__setattr__(self, "logit_bias", bias)
        for text in self.stop_strings:
            if not isinstance(text, str) or not text:
                raise InvalidInputError(f"stop holds {brief(text)}; it must be a string or strings, none empty.")
        biases = (self.logit_bias or {}).values()
        least = 1 if self.prompt_logprobs is None else 0
        for name, good, wanted in (
            ("max_tokens", self.max_tokens is None or self.max_tokens >= least, f"an integer ≥ {least}, or None"),
            ("min_tokens", self.min_tokens >= 0, "an integer ≥ 0"),
            (
                "reasoning_budget",
                self.reasoning_budget is None or self.reasoning_budget >= 0,
                "an integer ≥ 0, or None",
            ),
            ("repetition_penalty", 1 / EXTREME <= self.repetition_penalty <= EXTREME, "in 1e-30 … 1e30 (1: off)"),
            ("presence_penalty", abs(self.presence_penalty) <= EXTREME, "in -1e30 … 1e30 (0: off)"),
            ("frequency_penalty", abs(self.frequency_penalty) <= EXTREME, "in -1e30 … 1e30 (0: off)"),
            ("logit_bias", all(abs(b) <= EXTREME or b == -float("inf") for b in biases), "-inf, or in -1e30 … 1e30"),
            ("seed", self.seed is None or 0 <= self.seed < 2**64, "an unsigned 64-bit integer, or None"),
            *(
                (name, count is None or 0 <= count <= MAX_REQUESTED_LOGPROBS, f"in 0 … {MAX_REQUESTED_LOGPROBS}")
                for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs))
            ),
        ):
            if not good:
                raise InvalidInputError(f"{name} is {getattr(self, name)!r}; it must be {wanted}.")
        SamplingParams(self.temperature, self.top_k, self.top_p, self.min_p, self.seed or 0)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def predicted_tokens(self) -> Sequence[int]:
        """The tokens of the prediction, which :class:`~bitnet.core.Model` makes of a text.

        Raises:
            InvalidInputError: It is still a text.
        """
        if isinstance(self.prediction, str) and self.prediction:
            raise InvalidInputError("prediction is a text; an engine takes token ids.")
        return () if isinstance(self.prediction, str) else self.prediction

    @property
    def changes_logits(self) -> bool:
        """Whether tokens are chosen from modified logits."""
        neutral = self.repetition_penalty == 1 and self.presence_penalty == self.frequency_penalty == 0
        return not neutral or bool(self.logit_bias)


class OptionArguments(TypedDict, total=False):
    """The fields of :class:`GenerationOptions` as keyword arguments."""

    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    seed: int | None
    stop: str | Sequence[str]
    stop_tokens: Collection[int]
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    reasoning_budget: int | None
    prediction: str | Sequence[int]


def _several(name: str, values: Any, wanted: str) -> tuple[Any, ...]:
    """A copy of a collection argument, as a tuple."""
    try:
        return () if values is None else tuple(values)
    except TypeError:
        raise InvalidInputError(f"{name} is {brief(values)}; it must be {wanted}.") from None


def integer(name: str, value: Any) -> int:
    """An integer argument as Python's own type. Raises InvalidInputError for anything else."""
    if type(value) is not int and not isinstance(value, Integral):  # the second is slow
        raise InvalidInputError(f"{name} holds {brief(value)}, which is not an integer.")
    return int(value)


def truth(name: str, value: Any) -> bool:
    """A yes or no as Python's own type. Raises InvalidInputError for anything else."""
    if not isinstance(value, bool | np.bool_):
        raise InvalidInputError(f"{name} is {brief(value)}; it must be True or False.")
    return bool(value)


def _number(name: str, value: Any) -> float:
    if type(value) not in (float, int) and not isinstance(value, Real):
        raise InvalidInputError(f"{name} holds {brief(value)}, which is not a number.")
    try:
        return float(value)
    except OverflowError:
        raise InvalidInputError(f"{name} holds {brief(value)}, which is too large.") from None
