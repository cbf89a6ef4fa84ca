"""Reads ``config.json`` of a Hugging Face model folder, as far as 1.58-bit models need it."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from bitnet.core.errors import ModelFileError, brief
from bitnet.core.gguf import MetadataValue
from bitnet.core.hal.operands import MAX_K
from bitnet.core.model.architectures import (
    ACTIVATIONS,
    BY_GGUF_NAME,
    CLASSES_BY_TYPE,
    HF_CLASSES,
    Architecture,
    why_refused,
)
from bitnet.core.model.config import MAX_TIMES_WIDER, ModelConfig, shape_faults
from bitnet.core.model.hf_delta_net import flattened, layer_keys, read_layers
from bitnet.core.model.hf_experts import expert_keys, read_folder_experts, read_folder_windows
from bitnet.core.model.rope import longrope_attention, yarn_attention
from bitnet.core.model.safetensors import read_json
from bitnet.core.text.vocabulary import MAX_TOKENS

_KEYS_OF_SHAPE = {
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
}
FLOAT_GROUP = 128
"""Columns that share a scale in folders of floats: PrismML's unpacked models."""
_SMALLEST, _GREATEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def _kind(scaling: Mapping[str, Any]) -> Any:
    """The kind of a scaling of rotary frequencies."""
    return scaling.get("rope_type") or scaling.get("type") or "default"


class HFConfig:
    """The configuration of a folder.

    Args:
        folder: The model folder.

    Attributes:
        values: All of ``config.json``, with the class's defaults for missing keys.
        default_ids: Ids of begin and end tokens, used if nothing in the folder names them.
        model: The model's shape, without the scaling of its rotary frequencies, as nothing may be allocated by numbers
            that no tensor has confirmed.
        divides: Whether ``weight_scale`` divides the codes (transformers' BitLinear) or multiplies them
            (AutoBitLinear).
        online: Whether float weights are master weights that are quantised at every use.
        group: Columns of a float weight that share a scale, or ``row``; None: all weights of a matrix do.

    Raises:
        ModelFileError: The model is not supported, or the file is invalid.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "config.json"
        self.values = read_json(self.path)
        names = self.values.get("architectures")
        name = names[0] if isinstance(names, list) and names else None
        if name is None:  # MLX's packs with transforms name their class only here
            name = CLASSES_BY_TYPE.get(str(self.values.get("model_type")))
        if not isinstance(name, str) or name not in HF_CLASSES:
            raise self.error(
                "architectures",
                f"{brief(name)} is not supported{why_refused(str(name))}; supported are {', '.join(HF_CLASSES)}.",
            )
        architecture = HF_CLASSES[name].architecture
        family = BY_GGUF_NAME[architecture]
        defaults = dict(HF_CLASSES[name].defaults)
        self.default_ids = {key: defaults.pop(key) for key in ("bos_token_id", "eos_token_id")}
        meaning = (
            *self.default_ids,
            "num_key_value_heads",
            "head_dim",
        )  # null means something for these, so it is not replaced by the default
        if family.recurrent:
            self.values = flattened(self.values, self.error)
        given = {key: value for key, value in self.values.items() if value is not None or key in meaning}
        self.values = defaults | given
        self.group: int | Literal["row"] | None = None
        quantization = self._quantization(family)
        self.divides = quantization.get("linear_class", "bitlinear") == "bitlinear"
        self.online = quantization.get("quantization_mode", "offline") == "online"
        heads, hidden = self.integer("num_attention_heads"), self.integer("hidden_size")
        head_dim = self.integer("head_dim", hidden // heads)
        kv_heads = self.integer("num_key_value_heads", heads)
        if heads % kv_heads:
            raise self.error("num_key_value_heads", f"{kv_heads} does not divide the {heads} heads.")
        ffn_key = "moe_intermediate_size" if family.experts else "intermediate_size"
        ffn = self.integer(ffn_key)
        for wrong, message in shape_faults(hidden=hidden, heads=heads, head_dim=head_dim, ffn=ffn):
            raise self.error({**_KEYS_OF_SHAPE, "ffn": ffn_key}[wrong], message)
        vocab = self.integer("vocab_size")
        if vocab > MAX_TOKENS:
            raise self.error("vocab_size", f"is {vocab}; the limit is {MAX_TOKENS}.")
        if self.values.get("clip_qkv") is not None:
            raise self.error("clip_qkv", "is not supported: bitnet does not clamp q, k and v.")
        for key in ("sparse_config",) if family.experts else ("use_sliding_window", "sparse_config"):
            if self.values.get(key):
                raise self.error(key, "is not supported: in bitnet every token attends to all earlier ones.")
        kinds = self.values.get("layer_types") or []
        if not family.partly_rotated and (
            not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)
        ):
            raise self.error("layer_types", f"is {brief(kinds)}; only full_attention is supported.")
        self._rope = scaling = self._scaling()
        theta = self._number(scaling if scaling.get("rope_theta") is not None else self.values, "rope_theta")
        if family.ntk_alpha and scaling.get("alpha") is not None and _kind(scaling) == "dynamic":
            theta *= self._number(scaling, "alpha") ** (head_dim / (head_dim - 2))
            if not _SMALLEST <= theta <= _GREATEST:
                raise self.error("alpha", f"makes the rotary base {theta:g}, which float32 cannot hold.")
        partial = scaling if "partial_rotary_factor" in scaling else self.values
        share = self._number(partial, "partial_rotary_factor", 1.0)
        rotary_dim = int(head_dim * share)
        if share != 1 and not (family.partly_rotated and share < 1 and rotary_dim >= 2 and rotary_dim % 2 == 0):
            raise self.error("partial_rotary_factor", f"is {share:g}; only 1 is supported.")
        layers = self.integer("num_hidden_layers")
        activation = self.values["hidden_act"]
        if not isinstance(activation, str) or activation not in ACTIVATIONS:
            raise self.error(
                "hidden_act", f"{brief(activation)} is not supported; supported are {', '.join(ACTIVATIONS)}."
            )
        self.model = ModelConfig(
            architecture=architecture,
            name=os.fsencode(folder.resolve().name).decode(errors="replace"),
            vocab_size=vocab,
            hidden_size=hidden,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ffn_size=ffn,
            context_length=self.integer("max_position_embeddings"),
            rms_eps=self._number(self.values, "rms_norm_eps") if family.eps is None else family.eps,
            rope_theta=theta,
            rope_style=family.rope_style,
            rope_freq_factors=None,
            activation=ACTIVATIONS[activation],
            sub_norms=family.sub_norms,
            tied_embeddings=self.values["tie_word_embeddings"] is True,
            head_norms=family.head_norms,
            qkv_biases=family.qkv_biases,
            layer_norms=family.layer_norms,
            rotary_dim=rotary_dim if share != 1 else None,
            output_gate=family.output_gate,
            delta_net=read_layers(self, layers, MAX_TIMES_WIDER * hidden) if family.recurrent else None,
            windows=read_folder_windows(self, layers) if family.experts else None,
            experts=read_folder_experts(self, layers, ffn, min(MAX_TIMES_WIDER * hidden, MAX_K))
            if family.experts
            else None,
            **(self._scales() if family.stream_scales else {}),
        )

    def error(self, key: str, message: str) -> ModelFileError:
        return ModelFileError(message, path=self.path, field=key)

    def metadata(self) -> dict[str, MetadataValue]:
        """The model's GGUF keys, without those of the tokenizer."""
        model = self.model
        values: dict[str, MetadataValue] = {
            "vocab_size": model.vocab_size,
            "context_length": model.context_length,
            "embedding_length": model.hidden_size,
            "block_count": model.layers,
            "feed_forward_length": model.ffn_size,
            "rope.dimension_count": model.rotated,
            "rope.freq_base": model.rope_theta,
            "attention.head_count": model.heads,
            "attention.head_count_kv": model.kv_heads,
            f"attention.layer_norm_{'' if model.layer_norms else 'rms_'}epsilon": model.rms_eps,
            "hidden_activation": model.activation,
        }
        if model.family.stream_scales:
            values |= {
                "embedding_scale": model.embedding_scale,
                "residual_scale": model.residual_scale,
                "logit_scale": 1 / model.logit_scale,  # the divisor, as in llama.cpp
            }
        if model.experts is not None and model.windows is not None:
            del values["feed_forward_length"]
            values |= expert_keys(model.experts, model.windows, model.ffn_size)
        if model.delta_net is not None:
            values |= layer_keys(model.delta_net)
            sections = self._rope.get("mrope_section")  # of images' positions; for text they are all the same
            if isinstance(sections, list) and all(type(n) is int and 0 <= n < 2**15 for n in sections[:4]):
                values["rope.dimension_sections"] = np.array([*sections, 0, 0, 0, 0][:4], np.int32)
        if model.head_dim * model.heads != model.hidden_size:
            values |= {"attention.key_length": model.head_dim, "attention.value_length": model.head_dim}
        general: dict[str, MetadataValue] = {
            "general.architecture": model.architecture,
            "general.name": model.name,
            "general.quantization_version": 2,
        }
        return general | {f"{model.architecture}.{key}": value for key, value in values.items()}

    def _scales(self) -> dict[str, Any]:
        """MiniCPM's scales of embeddings, sub-layer results and logits."""
        depth, base = self._number(self.values, "scale_depth"), self._number(self.values, "dim_model_base")
        return {
            "embedding_scale": self._number(self.values, "scale_emb"),
            "residual_scale": depth / math.sqrt(self.integer("num_hidden_layers")),
            "logit_scale": base / self.integer("hidden_size"),
        }

    def _scaling(self) -> dict[str, Any]:
        """The parameters of rotary embeddings. transformers 5 may list them by the types of layers."""
        key = "rope_scaling" if self._mapping("rope_scaling") else "rope_parameters"
        found = self._mapping(key)
        kinds = [value for value in found.values() if isinstance(value, dict)]
        if not kinds:
            return found
        if len(kinds) < len(found) or any(kind != kinds[0] for kind in kinds):
            raise self.error(key, f"differs between layers ({', '.join(map(brief, found))}), which is not supported.")
        return kinds[0]

    def _mapping(self, key: str) -> dict[str, Any]:
        value = self.values.get(key) or {}
        if not isinstance(value, dict):
            raise self.error(key, f"is {brief(value)}, not an object.")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
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
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not _SMALLEST <= value <= _GREATEST:
            raise self.error(key, f"is {brief(value)}, not a positive number that float32 can hold.")
        return float(value)

    @property
    def is_mlx(self) -> bool:
        """Whether MLX wrote the folder: then the configuration has a group size but no quantisation method."""
        found = self._mapping("quantization") or self._mapping("quantization_config")
        return "group_size" in found and "quant_method" not in found

    def _quantization(self, family: Architecture) -> Mapping[str, Any]:
        found = self._mapping("quantization_config")
        if self.is_mlx:
            found = self._mapping("quantization") or found
            bits = found.get("bits")
            known = (2, 4, 8) if family.experts else (1, 2)  # of tables; the codes of other matrices have 2 bits
            if isinstance(bits, bool) or bits not in known or found.get("mode", "affine") != "affine":
                raise self.error(
                    "quantization",
                    f"is {brief(found)}; weights need {' or '.join(map(str, known))} bits and affine mode.",
                )
            return {"linear_class": "autobitlinear", "quantization_mode": "offline"}
        if not found:
            if family.floats == "not ternary":
                raise self.error("quantization_config", "is missing: this is not a 1.58-bit model.")
            self.group = FLOAT_GROUP if family.floats == "groups" else "row" if family.floats == "rows" else None
            mode = "online" if family.floats == "master" else "offline"
            return {"linear_class": "autobitlinear", "quantization_mode": mode}
        if found.get("quant_method") != "bitnet":
            raise self.error(
                "quantization_config", f"{brief(found.get('quant_method'))} is not supported; only bitnet is supported."
            )
        if found.get("use_rms_norm"):
            raise self.error("quantization_config", "use_rms_norm is not supported.")
        kept = found.get("modules_to_not_convert") or []
        if not isinstance(kept, list) or set(map(str, kept)) - {"lm_head"}:
            raise self.error(
                "quantization_config", f"modules_to_not_convert is {brief(kept)}; only lm_head is supported."
            )
        return found

    def rope(self) -> tuple[dict[str, MetadataValue], dict[str, npt.NDArray[np.float32]]]:
        """The GGUF keys (without the architecture prefix) and tensors that describe the scaling of rotary frequencies.

        Raises:
            ModelFileError: The kind of scaling is not supported.
        """
        scaling = self._rope
        kind = _kind(scaling)
        if kind in (
            "default",
            "dynamic",
        ):  # these are the same up to the model's own context, which bitnet never exceeds
            return {}, {}
        if kind == "linear":
            factor = np.full(self.model.rotated // 2, self._number(scaling, "factor"), np.float32)
            return {}, {"rope_freqs.weight": factor}
        if kind == "llama3":
            return {}, {"rope_freqs.weight": self._llama3()}
        if kind == "yarn":
            return self._yarn(), {}
        if kind in ("longrope", "su"):
            return self._longrope()
        names = "linear, dynamic, llama3, yarn and longrope"
        raise self.error("rope_scaling", f"{brief(kind)} is not supported; supported are {names}.")

    def _original_context(self) -> float:
        apart = self.values.get("original_max_position_embeddings") is not None
        context = self.model.context_length
        return self._number(self.values if apart else self._rope, "original_max_position_embeddings", context)

    def _llama3(self) -> npt.NDArray[np.float32]:
        """Divisors of the frequencies: ``factor`` for long wavelengths, 1 for short ones, and a ramp in between."""
        scaling, rotated = self._rope, self.model.rotated
        factor = self._number(scaling, "factor")
        low, high = self._number(scaling, "low_freq_factor"), self._number(scaling, "high_freq_factor")
        if high <= low:
            raise self.error("rope_scaling", f"high_freq_factor {high} is not above low_freq_factor {low}.")
        waves = self.model.rope_theta ** (np.arange(0, rotated, 2) / rotated)
        turns = self._original_context() / (2 * math.pi) / waves  # turns of each pair within the original context
        smooth = np.clip((turns - low) / (high - low), 0, 1)
        return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)

    def _yarn(self) -> dict[str, MetadataValue]:
        scaling, original = self._rope, self._original_context()
        if scaling.get("truncate") is False:
            raise self.error("rope_scaling", "truncate false is not supported: a GGUF file has no key for it.")
        if original != int(original):
            raise self.error("rope_scaling", f"original_max_position_embeddings is {original}; it must be an integer.")
        factor = self._number(scaling, "factor", self.model.context_length / original)
        attention, scale, whole = (scaling.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
        rule = yarn_attention(factor)
        if attention is not None:
            attention = self._number(scaling, "attention_factor")
        elif scale and whole:
            scale, whole = self._number(scaling, "mscale"), self._number(scaling, "mscale_all_dim")
            attention = (1 + scale * (rule - 1)) / (1 + whole * (rule - 1))
        keys: dict[str, MetadataValue] = {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": factor,
            "rope.scaling.original_context_length": int(original),
        }
        if attention is not None:
            keys["rope.scaling.attn_factor"] = attention / rule  # the key multiplies YaRN's own rule
        for key in ("beta_fast", "beta_slow"):
            if scaling.get(key):
                keys[f"rope.scaling.yarn_{key}"] = self._number(scaling, key)
        return keys

    def _longrope(self) -> tuple[dict[str, MetadataValue], dict[str, npt.NDArray[np.float32]]]:
        scaling, original, pairs = self._rope, self._original_context(), self.model.rotated // 2
        if not 2 <= original == int(original):
            what = f"original_max_position_embeddings is {original}; it must be an integer ≥ 2."
            raise self.error("rope_scaling", what)
        tensors = {}
        for name in ("short", "long"):
            values = scaling.get(f"{name}_factor")
            if not isinstance(values, list) or len(values) != pairs:
                raise self.error("rope_scaling", f"{name}_factor is not a list of {pairs} numbers, one for each pair.")
            numbers = [self._number({f"{name}_factor": value}, f"{name}_factor") for value in values]
            tensors[f"rope_factors_{name}.weight"] = np.array(numbers, np.float32)
        factor = self._number(scaling, "factor", self.model.context_length / original)
        attention = self._number(scaling, "attention_factor", longrope_attention(factor, original))
        return {
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": int(original),
            "rope.scaling.attn_factor": attention,
        }, tensors
