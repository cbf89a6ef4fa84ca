"""``generation_settings`` of llama.cpp's server."""

from __future__ import annotations

from typing import Any

from bitnet.core.engine import GenerationOptions
from bitnet.core.engine.options import OptionArguments
from bitnet.core.text.tokenizer import Tokenizer
from bitnet.server.generation.logit_bias import NEVER
from bitnet.server.generation.samplers import ORDER
from bitnet.server.generation.sampling import sampling_options
from bitnet.server.models.service import Service
from bitnet.server.request.fields import Fields

DEFAULTS: OptionArguments = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""What llama.cpp samples with where a request says nothing."""
RANDOM_SEED = 0xFFFFFFFF
"""How llama.cpp's server writes that a seed is drawn for each request."""
NO_SLOT = -1
"""The slot of requests that name none."""


def named_slot(service: Service, fields: Fields) -> int | None:
    """The slot that keeps a request's tokens; None: it names none, or the server keeps none.

    Raises:
        RequestError: There is no such slot.
    """
    if service.shared.settings.slot_save_path is None:
        return None
    slot = fields.integer("id_slot", NO_SLOT, service.shared.places - 1)
    return None if slot == NO_SLOT else slot


def settings(options: GenerationOptions, tokenizer: Tokenizer, seed: int) -> dict[str, Any]:
    """The options of a generation, under the names of llama.cpp's server. Samplers that are not done here are off."""
    biases = dict(options.logit_bias or {})
    if options.ignore_eos:
        biases |= dict.fromkeys(tokenizer.eos_ids, NEVER)
    most = -1 if options.max_tokens is None else options.max_tokens
    return {
        "seed": seed,
        "temperature": options.temperature,
        "dynatemp_range": 0.0,
        "dynatemp_exponent": 1.0,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "top_n_sigma": -1.0,
        "xtc_probability": 0.0,
        "xtc_threshold": 0.1,
        "typical_p": 1.0,
        "repeat_last_n": -1,
        "repeat_penalty": options.repetition_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "dry_multiplier": 0.0,
        "mirostat": 0,
        "adaptive_target": -1.0,
        "adaptive_decay": 0.9,
        "stop": list(options.stop_strings),
        "max_tokens": most,
        "n_predict": most,
        "n_keep": 0,
        "n_discard": 0,
        "ignore_eos": options.ignore_eos,
        "logit_bias": [
            {"token": token, "bias": None if bias == NEVER else bias} for token, bias in sorted(biases.items())
        ],
        "min_keep": 0,
        "samplers": list(ORDER),
    }


def default_settings(service: Service) -> dict[str, Any]:
    """The settings of a request that says nothing; its seed is a random one, unless the model's preset sets it."""
    tokenizer, preset = service.model.tokenizer, service.preset.sampling
    options = GenerationOptions(**sampling_options(Fields({}), tokenizer, preset, max_tokens=None, defaults=DEFAULTS))
    return settings(options, tokenizer, RANDOM_SEED if options.seed is None else options.seed)
