"""The shape of a model, read from the metadata and tensors of its GGUF file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bitnet.core.errors import brief
from bitnet.core.gguf import GGUFFile
from bitnet.core.gguf.quants import DECODERS
from bitnet.core.gguf.split import whole_name
from bitnet.core.hal.operands import MAX_K
from bitnet.core.model.architectures import (
    ACTIVATIONS,
    BY_GGUF_NAME,
    Activation,
    Architecture,
    RopeStyle,
    why_refused,
)
from bitnet.core.model.delta_net import MAX_LAYERS, DeltaNet, read_delta_net
from bitnet.core.model.experts import MAX_WINDOWED, Experts, Windows, read_experts, read_windows
from bitnet.core.model.hadamard import Hadamard, read_hadamard
from bitnet.core.model.keys import Keys
from bitnet.core.model.rope import BETA_FAST, BETA_SLOW, LongRope, Yarn, longrope_attention, yarn_attention
from bitnet.core.text.vocabulary import MAX_TOKENS

MAX_HEAD_DIM = 1024
"""Maximum head dimension; models have 64 to 256."""
MAX_TIMES_WIDER = 64
"""Maximum width of all heads together, and of the feed-forward layer, as a multiple of the residual stream's width;
models have at most 8. It bounds a step's activations relative to the size of the file's weights."""

MAX_SCALED = 1 << 16
"""Maximum factor by which a scale of embeddings, residuals or logits may differ from 1; models have at most 50."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a model, from which its program is built.

    Attributes:
        ffn_size: Width of the feed-forward layer, or of each expert.
        context_length: Positions the model was trained for.
        rope_theta: Base of the rotary frequencies.
        rope_freq_factors: ``f32[head_dim / 2]`` that divide the rotary frequencies, or None.
        rope_scaling: Further scaling of the rotary frequencies (YaRN or LongRoPE), or None.
        rope_attention_factor: Factor that multiplies the rotary cosines and sines.
        sub_norms: Whether there is an RMSNorm before the attention's and the feed-forward's output projections.
        tied_embeddings: Whether the LM head is the embedding table.
        head_norms: Whether each head of q and k has an RMSNorm, before the rotary embedding or, in families with
            ``norms_last``, after it.
        qkv_biases: Whether q, k and v have biases.
        layer_norms: Whether the norms of the residual stream are LayerNorms without weights.
        embedding_scale: Factor that multiplies token embeddings.
        residual_scale: Factor that multiplies each sub-layer's result before it is added.
        logit_scale: Factor that multiplies the logits.
        rotary_dim: Elements of a head, from its first, that are rotated; None: all.
        output_gate: Whether the attention's result is multiplied by the sigmoid of a gate. ``attn_q`` then has the rows
            of each head of q followed by the rows of its gate, ``2 * head_dim`` in all.
        delta_net: The layers that are recurrent; None: all attend.
        hadamard: Transforms that are folded into the weights, or None.
        experts: The mixtures of experts, or None.
        windows: The layers that attend to a window of positions; None: all attend in full.
        input_norms: Whether each product of a layer has an RMSNorm of its own before it. Those of the layer then come
            first where both are.
    """

    architecture: str
    name: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_size: int
    context_length: int
    rms_eps: float
    rope_theta: float
    rope_style: RopeStyle
    rope_freq_factors: npt.NDArray[np.float32] | None
    activation: Activation
    sub_norms: bool
    tied_embeddings: bool
    head_norms: bool = False
    qkv_biases: bool = False
    layer_norms: bool = False
    rope_scaling: Yarn | LongRope | None = None
    rope_attention_factor: float = 1.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    rotary_dim: int | None = None
    output_gate: bool = False
    delta_net: DeltaNet | None = None
    hadamard: Hadamard | None = None
    experts: Experts | None = None
    windows: Windows | None = None
    input_norms: bool = False

    @property
    def family(self) -> Architecture:
        """The record of the architecture."""
        return BY_GGUF_NAME[self.architecture]

    @property
    def stream_unit(self) -> float:
        """What the residual stream is divided by in programs, so that sub-layers add their results unscaled (ADR 0045),
        or embeddings need no scale (ADR 0125)."""
        return self.embedding_scale if self.family.sandwiched else self.residual_scale

    @property
    def stream_eps(self) -> float:
        """The epsilon of norms of the residual stream as programs store it."""
        return self.rms_eps / self.stream_unit**2

    @property
    def rotated(self) -> int:
        """Elements of a head that are rotated."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    def window(self, layer: int) -> int | None:
        """Positions that a token of a layer attends to; None: all."""
        return self.windows.size if self.windows is not None and self.windows.slides[layer] else None

    @property
    def attended(self) -> tuple[int | None, ...]:
        """For each layer that attends, the positions that a token attends to; None: all."""
        return tuple(self.window(layer) for layer in range(self.layers) if not self.recurrent(layer))

    def recurrent(self, layer: int) -> bool:
        """Whether a layer is recurrent; otherwise it attends."""
        return self.delta_net is not None and self.delta_net.recurrent[layer]

    @property
    def attention_layers(self) -> int:
        """Layers that attend, each of which has a part of the KV cache."""
        return self.layers - (sum(self.delta_net.recurrent) if self.delta_net is not None else 0)


_KEYS_OF_SHAPE = {
    "hidden": "embedding_length",
    "heads": "attention.head_count",
    "head_dim": "attention.key_length",
    "ffn": "feed_forward_length",
}


def read_config(file: GGUFFile) -> ModelConfig:
    """Read the configuration of a model file.

    Raises:
        ModelFileError: The architecture is not supported, or a key is missing, of another type or out of range.
    """
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in BY_GGUF_NAME:
        why = why_refused(architecture) if isinstance(architecture, str) else ""
        raise file.error(
            f"{brief(architecture)} is not supported{why}; supported are {', '.join(BY_GGUF_NAME)}.",
            key="general.architecture",
        )
    family = BY_GGUF_NAME[architecture]
    keys = Keys(file, architecture)
    heads = keys.integer("attention.head_count")
    kv_heads = keys.integer("attention.head_count_kv", heads)
    hidden = keys.integer("embedding_length")
    ffn_key = "expert_feed_forward_length" if family.experts else "feed_forward_length"
    ffn = keys.integer(ffn_key)
    if heads % kv_heads:
        raise keys.error("attention.head_count_kv", f"{kv_heads} does not divide the {heads} heads.")
    if hidden % heads and keys.get("attention.key_length") is None:
        raise keys.error("embedding_length", f"{hidden} is not a multiple of the {heads} heads.")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    for wrong, message in shape_faults(hidden=hidden, heads=heads, head_dim=head_dim, ffn=ffn):
        raise keys.error({**_KEYS_OF_SHAPE, "ffn": ffn_key}[wrong], message)
    rotary_key = _rotary_key(keys)
    rotary_dim = keys.integer(rotary_key, head_dim)
    partial = family.partly_rotated and rotary_dim < head_dim and rotary_dim % 2 == 0
    for key, size in (
        ("attention.value_length", keys.integer("attention.value_length", head_dim)),
        (rotary_key, head_dim if partial else rotary_dim),
    ):
        if size != head_dim:
            raise keys.error(key, f"is {brief(keys.get(key))}; only the head's {head_dim} elements are supported.")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise file.error("is missing or not a matrix.", tensor="token_embd.weight")
    if embedding.shape[0] > MAX_TOKENS:
        raise file.error(f"has {embedding.shape[0]} rows; the limit is {MAX_TOKENS}.", tensor="token_embd.weight")
    if keys.get("attention.clamp_kqv"):
        raise keys.error("attention.clamp_kqv", "is not supported: bitnet does not clamp q, k and v.")
    name = file.metadata.get("general.name")
    context, theta = keys.integer("context_length"), keys.positive("rope.freq_base", 10_000.0)
    scaling, attention = _rope_scaling(keys, rotary_dim, context, theta)
    layers = _layers(keys, family)
    net = read_delta_net(keys, layers, MAX_TIMES_WIDER * hidden) if family.recurrent else None
    widths = {hidden, heads * head_dim, ffn} | ({net.value_width} if net is not None else set())
    experts = read_experts(keys, layers, ffn, min(MAX_TIMES_WIDER * hidden, MAX_K)) if family.experts else None
    scales: Mapping[str, Any] = _scales(keys) if family.stream_scales else {}
    if family.sandwiched:
        _check_gemma(keys, head_dim)
        scales = {"embedding_scale": math.sqrt(hidden)}
    return ModelConfig(
        architecture=architecture,
        name=name if isinstance(name, str) and name else whole_name(file.path.stem),
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=ffn,
        context_length=context,
        rms_eps=keys.positive(f"attention.layer_norm_{'' if family.layer_norms else 'rms_'}epsilon"),
        rope_theta=theta,
        rope_style=family.rope_style,
        rope_freq_factors=_freq_factors(keys, rotary_dim),
        activation=_activation(keys, family),
        sub_norms="blk.0.attn_sub_norm.weight" in file.tensors,
        tied_embeddings="output.weight" not in file.tensors,
        head_norms=family.partly_rotated or family.norms_last or "blk.0.attn_q_norm.weight" in file.tensors,
        qkv_biases=family.qkv_biases,
        layer_norms=family.layer_norms,
        rope_scaling=scaling,
        rope_attention_factor=attention,
        rotary_dim=rotary_dim if partial else None,
        output_gate=family.output_gate,
        delta_net=net,
        hadamard=read_hadamard(file, widths),
        experts=experts,
        windows=read_windows(keys, layers) if family.experts else None,
        input_norms=family.input_norms and "blk.0.attn_q_norm_in.weight" in file.tensors,
        **scales,
    )


def _rotary_key(keys: Keys) -> str:
    """The key of the elements of a head that are rotated. Some converters write those of layers that attend to a window
    apart, and 0 for the others, which have no positions."""
    apart = "rope.dimension_count_swa"
    return "rope.dimension_count" if keys.get(apart) is None else apart


def shape_faults(*, hidden: int, heads: int, head_dim: int, ffn: int) -> Iterator[tuple[str, str]]:
    """Yield invalid sizes and the reasons. Everything derived from a size is thus bounded before it is allocated."""
    if head_dim % 2:
        yield "head_dim", f"heads of {head_dim} elements cannot be rotated in pairs."
    if head_dim > MAX_HEAD_DIM:
        yield "head_dim", f"heads of {head_dim} elements are not supported; the limit is {MAX_HEAD_DIM}."
    if hidden > MAX_K:
        yield "hidden", f"{hidden} is not supported; the limit is {MAX_K}."
    for name, width in (("heads", heads * head_dim), ("ffn", ffn)):
        if width > min(MAX_TIMES_WIDER * hidden, MAX_K):
            yield name, f"makes a width of {width}; the limit is {min(MAX_TIMES_WIDER * hidden, MAX_K)} for {hidden}."


def _layers(keys: Keys, family: Architecture) -> int:
    """Layers without those after the last, which predict further tokens (:mod:`bitnet.core.model.draft`)."""
    layers = keys.integer("block_count")
    most = MAX_LAYERS if family.recurrent else MAX_WINDOWED
    if family.partly_rotated and layers > most:
        raise keys.error("block_count", f"is {layers}; the limit is {most}.")
    if keys.get("nextn_predict_layers") in (None, 0):
        return layers
    further = keys.integer("nextn_predict_layers")
    if further >= layers:
        raise keys.error("nextn_predict_layers", f"is {further} of {layers} layers.")
    return layers - further


def _activation(keys: Keys, family: Architecture) -> Activation:
    """The activation named in the file; if missing, the one that its family is known to use."""
    value = keys.choice("hidden_activation", ACTIVATIONS)
    return family.activation(keys.file.metadata) if value is None else ACTIVATIONS[value]


def _scales(keys: Keys) -> dict[str, float]:
    """MiniCPM's scales. The file's ``logit_scale`` divides the logits.

    llama.cpp replaces missing keys with the scales of MiniCPM 2B, but uses that model's factor of the logits as the
    divisor.
    """
    hint = "Convert the model again with a newer converter."
    found = {}
    for name in ("embedding_scale", "residual_scale", "logit_scale"):
        if keys.get(name) is None:
            raise keys.file.error("is missing.", key=f"{keys.prefix}.{name}", hint=hint)
        found[name] = keys.positive(name)
        if not 1 / MAX_SCALED <= found[name] <= MAX_SCALED:
            raise keys.error(name, f"is {found[name]:g}; it must be in 1/{MAX_SCALED} … {MAX_SCALED}.")
    return found | {"logit_scale": 1 / found["logit_scale"]}


def _check_gemma(keys: Keys, head_dim: int) -> None:
    """Refuse what Gemma models may have and bitnet does not compute."""
    for key, what in (
        ("attention.sliding_window", "rotary embeddings with another base in layers that attend to a window"),
        ("attn_logit_softcapping", "limited scores of attention"),
        ("final_logit_softcapping", "limited logits"),
    ):
        if keys.get(key):
            raise keys.error(key, f"is {brief(keys.get(key))}: bitnet does not compute {what}.")
    key = "attention.query_pre_attn_scalar"
    if keys.get(key) not in (None, head_dim):
        raise keys.error(key, f"is {brief(keys.get(key))}; only the head's {head_dim} elements are supported.")


def _freq_factors(keys: Keys, head_dim: int) -> npt.NDArray[np.float32] | None:
    """Llama 3.1's factors from their tensor, times the factor of a linear scaling, which is the same for all pairs.

    A factor without a scaling type means linear scaling, as in llama.cpp.
    """
    factors = np.ones(head_dim // 2, np.float32)
    if keys.get("rope.scaling.type") in (None, "linear"):
        with np.errstate(over="ignore"):  # refused below
            factors *= np.float32(_scaling_factor(keys))
        if not 0 < factors[0] < np.inf:
            raise keys.error("rope.scaling.factor", f"is {_scaling_factor(keys):g}, which float32 does not hold.")
    if "rope_freqs.weight" in keys.file.tensors:
        factors *= _pair_factors(keys.file, "rope_freqs.weight", head_dim)
    return None if (factors == 1).all() else factors


def _scaling_factor(keys: Keys) -> float:
    """The divisor of positions. The second key is an old name of the first; if both exist, the first counts."""
    return keys.positive("rope.scaling.factor", keys.positive("rope.scale_linear", 1.0))


def _pair_factors(file: GGUFFile, name: str, head_dim: int) -> npt.NDArray[np.float32]:
    """A tensor with one factor per rotated pair."""
    tensor = file.tensors.get(name)
    if tensor is None:
        raise file.error("is missing.", tensor=name)
    if tensor.shape != (head_dim // 2,) or tensor.type.name != "F32":
        raise file.error(f"is {tensor.type.name} {tensor.shape}; it must be F32 {(head_dim // 2,)}.", tensor=name)
    factors: npt.NDArray[np.float32] = DECODERS[tensor.type](file.data(tensor)).reshape(-1)
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise file.error("has factors that are not positive numbers.", tensor=name)
    return factors


def _rope_scaling(keys: Keys, head_dim: int, context: int, theta: float) -> tuple[Yarn | LongRope | None, float]:
    """The scaling of the rotary frequencies, and the factor of cosines and sines.

    The keys have the same meaning as in llama.cpp. ``attn_factor`` multiplies the factor of YaRN's rule, but replaces
    that of LongRoPE's rule, which applies if the key is missing.
    """
    kind = keys.choice("rope.scaling.type", ("none", "linear", "yarn", "longrope"))
    given = "rope.scaling.attn_factor"
    attention = keys.positive(given, 1.0)
    original = keys.integer("rope.scaling.original_context_length", context)
    if kind == "yarn":
        return _yarn(keys, head_dim, original, theta, attention)
    if kind != "longrope":
        return None, attention
    if _scaling_factor(keys) != 1:
        raise keys.error("rope.scaling.factor", "only 1 is supported together with LongRoPE's factors.")
    short, long = (
        tuple(map(float, _pair_factors(keys.file, f"rope_factors_{name}.weight", head_dim)))
        for name in ("short", "long")
    )
    if original < 2:
        raise keys.error("rope.scaling.original_context_length", f"is {original:g}; it must be at least 2.")
    if keys.get(given) is None:
        attention = longrope_attention(context / original, original)
    return LongRope(short, long, original), attention


def _yarn(keys: Keys, head_dim: int, original: int, theta: float, attention: float) -> tuple[Yarn, float]:
    scaling = "rope.scaling."
    factor = keys.positive(scaling + "factor")
    yarn = Yarn(
        factor,
        original,
        keys.positive(scaling + "yarn_beta_fast", BETA_FAST),
        keys.positive(scaling + "yarn_beta_slow", BETA_SLOW),
    )
    # llama.cpp overrides the last of these keys, and the models' own code gives it another meaning.
    for key, only in (("ext_factor", 1), ("log_multiplier", 0), ("attn_factor", yarn_attention(factor))):
        value = keys.get(f"{scaling}yarn_{key}")
        if value is not None and not (type(value) in (int, float) and math.isclose(value, only, rel_tol=1e-6)):
            raise keys.error(f"{scaling}yarn_{key}", f"is {brief(value)}; only {only:g} is supported.")
    try:
        yarn.ramp(theta, head_dim)
    except ValueError as error:
        raise keys.error(scaling + "type", f"'yarn' has {error}.") from None
    return yarn, attention * yarn_attention(factor)
