"""``config.json`` of a Hugging Face model folder, as far as models of 1.58 bits need it."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bitnet.core.errors import ModelFileError, brief
from bitnet.core.gguf import MetadataValue
from bitnet.core.model.config import ACTIVATIONS, ARCHITECTURES, ModelConfig
from bitnet.core.model.safetensors import read_json

HF_ARCHITECTURES = {"BitNetForCausalLM": "bitnet-b1.58", "BitnetForCausalLM": "bitnet", "LlamaForCausalLM": "llama"}
"""GGUF architectures of Hugging Face's: BitNet in transformers, 1bitLLM's models, and Llama-shaped ones."""
FILE_TYPE_I2S = 40
"""``general.file_type`` of I2_S files, as the official one has it."""
_SMALLEST, _GREATEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


class HFConfig:
    """The configuration of a folder.

    Args:
        folder: The model folder.

    Attributes:
        values: All of ``config.json``.
        model: The model's shape.
        divides: Whether ``weight_scale`` divides the codes (transformers' BitLinear) or multiplies (AutoBitLinear).
        online: Whether float weights are masters that are quantised at every use.

    Raises:
        ModelFileError: The model is of another kind, or the file is not what it should be.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "config.json"
        self.values = read_json(self.path)
        names = self.values.get("architectures")
        name = names[0] if isinstance(names, list) and names else None
        if not isinstance(name, str) or name not in HF_ARCHITECTURES:
            raise self.error("architectures", f"{brief(name)} is not supported; {', '.join(HF_ARCHITECTURES)} are.")
        architecture = HF_ARCHITECTURES[name]
        quantization = self._quantization(architecture)
        self.divides = quantization.get("linear_class", "bitlinear") == "bitlinear"
        self.online = quantization.get("quantization_mode", "offline") == "online"
        heads, hidden = self._integer("num_attention_heads"), self._integer("hidden_size")
        head_dim = self._integer("head_dim", hidden // heads)
        kv_heads = self._integer("num_key_value_heads", heads)
        if heads % kv_heads:
            raise self.error("num_key_value_heads", f"{kv_heads} does not divide the {heads} heads.")
        if head_dim % 2:
            raise self.error("head_dim", f"heads of {head_dim} elements cannot be rotated in pairs.")
        scaling = self._mapping("rope_scaling") | self._mapping("rope_parameters")
        theta = self._number(scaling if "rope_theta" in scaling else self.values, "rope_theta", 10_000.0)
        partial = scaling if "partial_rotary_factor" in scaling else self.values
        if self._number(partial, "partial_rotary_factor", 1.0) != 1:
            raise self.error("partial_rotary_factor", "other than 1 is not supported.")
        activation = self.values.get("hidden_act", "silu" if architecture == "llama" else "relu2")
        if not isinstance(activation, str) or activation not in ACTIVATIONS:
            raise self.error("hidden_act", f"{brief(activation)} is not supported; {', '.join(ACTIVATIONS)} are.")
        self.model = ModelConfig(
            architecture=architecture,
            name=os.fsencode(folder.resolve().name).decode(errors="replace"),
            vocab_size=self._integer("vocab_size"),
            hidden_size=hidden,
            layers=self._integer("num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ffn_size=self._integer("intermediate_size"),
            context_length=self._integer("max_position_embeddings"),
            rms_eps=self._number(self.values, "rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_style=ARCHITECTURES[architecture],
            rope_freq_factors=self._frequency_factors(scaling, head_dim, theta),
            activation=ACTIVATIONS[activation],
            sub_norms=architecture != "llama",
            tied_embeddings=self.values.get("tie_word_embeddings") is True,
        )

    def error(self, key: str, message: str) -> ModelFileError:
        return ModelFileError(message, path=self.path, field=key)

    def metadata(self) -> dict[str, MetadataValue]:
        """The GGUF keys of the model, without the tokenizer's."""
        model = self.model
        values: dict[str, MetadataValue] = {
            "vocab_size": model.vocab_size,
            "context_length": model.context_length,
            "embedding_length": model.hidden_size,
            "block_count": model.layers,
            "feed_forward_length": model.ffn_size,
            "rope.dimension_count": model.head_dim,
            "rope.freq_base": model.rope_theta,
            "attention.head_count": model.heads,
            "attention.head_count_kv": model.kv_heads,
            "attention.layer_norm_rms_epsilon": model.rms_eps,
            "hidden_activation": model.activation,
        }
        if model.head_dim * model.heads != model.hidden_size:
            values |= {"attention.key_length": model.head_dim, "attention.value_length": model.head_dim}
        general: dict[str, MetadataValue] = {
            "general.architecture": model.architecture,
            "general.name": model.name,
            "general.file_type": FILE_TYPE_I2S,
            "general.quantization_version": 2,
        }
        return general | {f"{model.architecture}.{key}": value for key, value in values.items()}

    def _mapping(self, key: str) -> dict[str, Any]:
        value = self.values.get(key) or {}
        if not isinstance(value, dict):
            raise self.error(key, f"is {brief(value)}, not an object.")
        return value

    def _integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        if value is None:
            value = default
        if type(value) is not int or not 0 < value < 2**31:
            raise self.error(key, f"is {brief(value)}, not a positive integer.")
        return value

    def _number(self, values: Mapping[str, Any], key: str, default: float | None = None) -> float:
        value = values.get(key)
        if value is None:
            value = default
        if not isinstance(value, (int, float)) or not _SMALLEST <= value <= _GREATEST:
            raise self.error(key, f"is {brief(value)}, not a positive number that float32 can hold.")
        return float(value)

    def _quantization(self, architecture: str) -> Mapping[str, Any]:
        found = self._mapping("quantization_config")
        if not found:
            if architecture == "llama":
                raise self.error("quantization_config", "is missing: this is no 1.58-bit model.")
            return {"linear_class": "autobitlinear", "quantization_mode": "online"}
        if found.get("quant_method") != "bitnet":
            raise self.error(
                "quantization_config", f"{brief(found.get('quant_method'))} is not supported; only bitnet is."
            )
        if found.get("use_rms_norm"):
            raise self.error("quantization_config", "use_rms_norm is not supported.")
        kept = found.get("modules_to_not_convert") or []
        if not isinstance(kept, list) or set(map(str, kept)) - {"lm_head"}:
            raise self.error(
                "quantization_config", f"modules_to_not_convert is {brief(kept)}; only lm_head may be there."
            )
        return found

    def _frequency_factors(
        self, scaling: Mapping[str, Any], head_dim: int, theta: float
    ) -> npt.NDArray[np.float32] | None:
        """What divides the rotary frequencies: one number (``linear``), or more for long waves (``llama3``)."""
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind == "default":
            return None
        if kind not in ("linear", "llama3"):
            raise self.error("rope_scaling", f"{brief(kind)} is not supported; linear and llama3 are.")
        factor = self._number(scaling, "factor")
        if kind == "linear":
            return np.full(head_dim // 2, factor, np.float32)
        low, high = self._number(scaling, "low_freq_factor"), self._number(scaling, "high_freq_factor")
        if high <= low:
            raise self.error("rope_scaling", f"high_freq_factor {high} is not above low_freq_factor {low}.")
        context = self._number(scaling, "original_max_position_embeddings")
        turns = context / (2 * math.pi) * theta ** -(np.arange(0, head_dim, 2) / head_dim)  # in the original context
        smooth = np.clip((turns - low) / (high - low), 0, 1)
        return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
