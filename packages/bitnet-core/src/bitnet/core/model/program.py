"""Builds the program that a device compiles from a model's shape and weights.

One builder serves BitNet b1.58 2B4T (sub-norms, squared ReLU), the 1bitLLM models (sub-norms, SiLU), Llama-shaped
1.58-bit models (no sub-norms, SiLU), MiniCPM's (the same, with scales folded into weights: ADR 0045), Qwen3's
(no sub-norms, but norms of q's and k's heads), Qwen2's (the same, with biases of q, k and v instead) and OLMo's (the
same, with LayerNorms instead: ADR 0048). They differ in which norms have a weight, in the activation, and in one plain
operation. Qwen3.5's have recurrent layers besides those that attend, and perhaps transforms before products (ADR 0006).
Maple's have mixtures of experts, layers that attend to a window and layers without positions (ADR 0007). Models for
embeddings have a norm of each product's input, and Gemma 3's also norms of sub-layers' results (ADR 0125).

Long, because all architectures share the layers that it builds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from bitnet.core.errors import InvalidInputError
from bitnet.core.hal import (
    AddBias,
    Attention,
    CausalConv,
    CenterRows,
    DeltaGates,
    DeltaRule,
    DenseMatmul,
    DenseWeight,
    Embed,
    ExpertMatmul,
    GatedQuant,
    GluNormQuant,
    KVDtype,
    KVSpec,
    Limits,
    NormQuant,
    NormRows,
    NormTokens,
    Op,
    Program,
    RopeAppend,
    Route,
    Sample,
    StateSpec,
    TensorSpec,
    TernaryData,
    TernaryMatmul,
    TernaryWeight,
    Transform,
    Weight,
)
from bitnet.core.hal.program import Dim
from bitnet.core.model.cache import cache_layout
from bitnet.core.model.rope import rope_tables

if TYPE_CHECKING:
    from bitnet.core.model.config import ModelConfig
    from bitnet.core.model.experts import Experts


UNIT_NORM = "unit_norm"
"""The weight, all ones, of a norm that has none in the file."""
L2_EPS = 1e-6
"""Added inside the root of the L2 norms of a recurrent layer's heads of q and k."""
BLOCK_SIZE = 32
"""Positions in a KV block: long enough for an attention kernel to stream, short enough to share prefixes well."""


def build_program(
    config: ModelConfig,
    weights: Mapping[str, Weight],
    *,
    limits: Limits,
    num_blocks: int,
    kv_dtype: KVDtype = "f16",
    block_size: int = BLOCK_SIZE,
    deterministic: bool = False,
    state_entries: int = 1,
    head: bool = True,
    hidden: bool = False,
) -> Program:
    """The program of a model; it ends in ``Sample``, so that a step returns a token for each of its rows.

    All layers share the same activation tensors: ``x`` is the residual stream (``centered`` is ``x`` minus its rows'
    means, for LayerNorms), ``q8`` and ``h8`` are the quantised inputs of the attention's and the MLP's products,
    ``logits`` is ``f32[R, vocab]``, ``next`` is ``i32[R]``.

    Args:
        weights: By canonical name (``blk.0.attn_q``); a tied head is the same object as ``token_embd``.
        limits: ``max_blocks * block_size`` is the maximum sequence length and the number of rows of the rotary tables.
            With ``tables`` 1, blocks behind windows are kept; otherwise it is that of the
            :func:`~bitnet.core.model.cache.cache_layout`.
        num_blocks: Blocks of the KV cache, over all sequences.
        deterministic: See :class:`~bitnet.core.hal.Program`.
        state_entries: Entries of the states of recurrent layers.
        head: If false, the program ends in the last norm instead, whose result is ``last``, ``f32[R, hidden]``.
        hidden: Whether the tensor ``hidden``, ``f32[R, hidden]``, holds the rows of the last norm, without a transform,
            after each pass. A draft layer continues them (:mod:`bitnet.core.model.draft`).
    """
    cos, sin = rope_tables(config, limits.max_blocks * block_size)
    used = dict(weights)
    used["rope_cos"] = DenseWeight(cos.shape, "f32", lambda: cos)
    used["rope_sin"] = DenseWeight(sin.shape, "f32", lambda: sin)
    if config.windows is not None and not all(config.windows.slides):
        shape = len(cos), 1
        used["still_cos"] = DenseWeight(shape, "f32", lambda: np.ones(shape, np.float32))
        used["still_sin"] = DenseWeight(shape, "f32", lambda: np.zeros(shape, np.float32))
    output = "token_embd" if weights.get("output") is weights.get("token_embd") else "output"
    if output == "token_embd" or not head:
        used.pop("output", None)

    folded = config.hadamard
    for width, signs in folded.signs.items() if folded is not None else ():
        used[_signs(width)] = DenseWeight((width,), "f32", lambda signs=signs: signs)  # type: ignore[misc]

    ops: list[Op] = [
        Embed("token_embd", "x", _transform(config, config.hidden_size, folded is not None and folded.embedding))
    ]
    layout, attention = cache_layout(config, limits.tables), 0
    if len(layout.windows) != limits.tables:
        raise InvalidInputError(f"{limits.tables} block tables do not fit {config.name}: {len(layout.windows)} do.")
    for layer in range(config.layers):
        if config.recurrent(layer):
            ops += _recurrent_ops(config, layer)
            continue
        if config.output_gate:
            used |= split_queries(config, f"blk.{layer}.attn_q", used)
        if config.qkv_biases:
            used |= stacked_biases(layer, used)
        ops += attention_ops(config, layer, *layout.places[attention])
        attention += 1
    stream, center = _stream(config)
    norm = UNIT_NORM if config.layer_norms else "output_norm"
    transform = _transform(config, config.hidden_size, head and folded is not None and folded.head)
    ops += [
        *center,
        *([NormRows(stream, norm, config.stream_eps, "hidden")] if hidden else []),
        NormRows(stream, norm, config.stream_eps, "last", transform),
    ]
    if head:
        ops += [DenseMatmul("last", output, "logits"), Sample("logits", "next")]

    width = config.hidden_size
    if config.layer_norms:
        used[UNIT_NORM] = DenseWeight((width,), "f32", lambda: np.ones(width, np.float32))
    tensors = (
        *(TensorSpec(op.out, "f32", ("M", width)) for op in center),
        *attention_tensors(config),
        *_recurrent_tensors(config),
        *(head_tensors(config) if head else [TensorSpec("last", "f32", ("R", width))]),
        *([TensorSpec("hidden", "f32", ("R", width))] if hidden else []),
    )
    return Program(
        ops=ops,
        tensors={spec.name: spec for spec in tensors},
        weights=used,
        limits=limits,
        kv=KVSpec(layout.layers, config.kv_heads, config.head_dim, num_blocks, block_size, kv_dtype),
        name=config.name or config.architecture,
        deterministic=deterministic,
        states=state_specs(config, state_entries),
    )


def attention_tensors(config: ModelConfig) -> list[TensorSpec]:
    """Tensors of layers that attend: the residual stream, and those of the attention and the MLP."""
    hidden, heads_width = config.hidden_size, config.heads * config.head_dim
    return [
        TensorSpec("x", "f32", ("M", hidden)),
        TensorSpec("q8", "i8", ("M", hidden)),
        TensorSpec("q8_scale", "f32", ("M",)),
        TensorSpec("qkv", "f32", ("M", (config.heads + 2 * config.kv_heads) * config.head_dim)),
        TensorSpec("attn", "f32", ("M", heads_width)),
        TensorSpec("attn_q8", "i8", ("M", heads_width)),
        TensorSpec("attn_q8_scale", "f32", ("M",)),
        *([TensorSpec("gate", "f32", ("M", heads_width))] if config.output_gate else []),
        *([TensorSpec("normed", "f32", ("M", hidden))] if config.input_norms else []),
        *([TensorSpec("branch", "f32", ("M", hidden))] if config.family.sandwiched else []),
        *_feed_forward_tensors(config),
    ]


def head_tensors(config: ModelConfig) -> list[TensorSpec]:
    """Tensors of the last norm, the head and the sampling."""
    return [
        TensorSpec("last", "f32", ("R", config.hidden_size)),
        TensorSpec("logits", "f32", ("R", config.vocab_size)),
        TensorSpec("next", "i32", ("R",)),
    ]


def _feed_forward_tensors(config: ModelConfig) -> list[TensorSpec]:
    """Tensors of feed-forward layers; with experts, those that a token chooses stand side by side in its row."""
    top = 1 if config.experts is None else config.experts.used
    rows: tuple[Dim, ...] = ("M",) if top == 1 else ("M", top)
    tensors = [
        TensorSpec("gate_up", "f32", ("M", 2 * config.ffn_size * top)),
        TensorSpec("h8", "i8", ("M", config.ffn_size * top)),
        TensorSpec("h8_scale", "f32", rows),
    ]
    if config.experts is not None:
        tensors += [TensorSpec("experts", "i32", ("M", top)), TensorSpec("shares", "f32", ("M", top))]
    return tensors


def state_specs(config: ModelConfig, entries: int) -> dict[str, StateSpec]:
    """The states of a model's recurrent layers."""
    net, states = config.delta_net, {}
    for layer in range(config.layers if net is not None else 0):
        if net is not None and net.recurrent[layer]:
            states[f"blk.{layer}.conv"] = StateSpec((net.taps - 1, net.conv_width), entries)
            states[f"blk.{layer}.delta"] = StateSpec((net.v_heads, net.k_dim, net.v_dim), entries)
    return states


def _signs(width: int) -> str:
    """The name of the signs of rows of this width."""
    return f"hadamard_signs.{width}"


def _transform(config: ModelConfig, width: int, wanted: bool = True) -> Transform | None:
    """The transform of rows of this width, if the model has transforms and one is wanted."""
    folded = config.hadamard
    if folded is None or not wanted:
        return None
    return Transform(folded.block, _signs(width) if width in folded.signs else None)


def split_queries(config: ModelConfig, name: str, weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """``attn_q`` in two: the rows of queries, and those of their gates, which follow each head's in the file."""
    both = weights[name]
    assert isinstance(both, TernaryWeight)
    rows = np.arange(both.shape[0]).reshape(config.heads, 2, config.head_dim)
    return {name: _rows_of(both, rows[:, 0].ravel()), f"{name}.gate": _rows_of(both, rows[:, 1].ravel())}


def _rows_of(weight: TernaryWeight, rows: npt.NDArray[np.int64]) -> TernaryWeight:
    """Some rows of a ternary matrix."""

    def load() -> TernaryData:
        codes, scale = weight.load()
        return TernaryData(codes[rows], scale if weight.group is None else scale[rows])

    return replace(weight, shape=(len(rows), weight.shape[1]), load=load, rows=None)


def stacked_biases(layer: int, weights: dict[str, Weight]) -> dict[str, Weight]:
    """The biases of q, k and v of a layer as one weight; they are removed from ``weights``."""
    parts = [weights.pop(f"blk.{layer}.attn_{part}.bias") for part in "qkv"]
    return {f"blk.{layer}.attn_qkv.bias": _stacked([bias for bias in parts if isinstance(bias, DenseWeight)])}


def _stacked(vectors: Sequence[DenseWeight]) -> DenseWeight:
    """Concatenate vectors in the order in which the corresponding products are stacked."""
    size = sum(vector.shape[0] for vector in vectors)
    return DenseWeight((size,), "f32", lambda: np.concatenate([vector.load() for vector in vectors]))


def _stream(config: ModelConfig) -> tuple[str, list[CenterRows]]:
    """The tensor that norms of the residual stream read, and the ops that compute it: LayerNorm is RMSNorm of centred
    rows."""
    return ("centered", [CenterRows("x", "centered")]) if config.layer_norms else ("x", [])


def _recurrent_tensors(config: ModelConfig) -> list[TensorSpec]:
    """Tensors that only recurrent layers use: the input and result of the convolution, gates, and those of the rule."""
    net = config.delta_net
    if net is None:
        return []
    return [
        TensorSpec("mixed", "f32", ("M", net.conv_width)),
        TensorSpec("convolved", "f32", ("M", net.conv_width)),
        TensorSpec("z", "f32", ("M", net.value_width)),
        TensorSpec("decays", "f32", ("M", 2 * net.v_heads)),
        TensorSpec("delta", "f32", ("M", net.value_width)),
        TensorSpec("delta_q8", "i8", ("M", net.value_width)),
        TensorSpec("delta_q8_scale", "f32", ("M",)),
    ]


def _recurrent_ops(config: ModelConfig, layer: int) -> list[Op]:
    """A recurrent layer (Gated DeltaNet) and its MLP, each adding to the residual stream ``x``."""

    def weight(name: str) -> str:
        return f"blk.{layer}.{name}"

    net, folded, norm = config.delta_net, config.hadamard, weight("attn_norm")
    assert net is not None
    untile = net.k_heads if folded is not None and folded.v_grouped else 0
    results = "delta_q8", "delta_q8_scale", _transform(config, net.value_width), untile
    alpha, beta, bias, rate = (weight(name) for name in ("ssm_alpha", "ssm_beta", "ssm_dt.bias", "ssm_a"))
    return [
        NormQuant("x", norm, config.stream_eps, "q8", "q8_scale", _transform(config, config.hidden_size)),
        TernaryMatmul("q8", "q8_scale", (weight("attn_qkv"),), "mixed"),
        TernaryMatmul("q8", "q8_scale", (weight("attn_gate"),), "z"),
        DeltaGates("x", norm, config.stream_eps, alpha, beta, bias, rate, "decays"),
        CausalConv("mixed", weight("ssm_conv1d"), weight("conv"), "convolved"),
        DeltaRule("convolved", "decays", weight("delta"), "delta", net.k_heads, L2_EPS, tiled=True),
        GatedQuant("delta", "z", "silu", weight("ssm_norm"), config.rms_eps, *results),
        TernaryMatmul("delta_q8", "delta_q8_scale", (weight("ssm_out"),), "x", add=True),
        *_feed_forward_ops(config, layer),
    ]


def attention_ops(config: ModelConfig, layer: int, table: int, cache: int) -> list[Op]:
    """Attention and MLP of one layer, each adding to the residual stream ``x``. ``cache`` is its layer of the cache,
    whose blocks the block table ``table`` finds."""

    def weight(name: str) -> str:
        return f"blk.{layer}.{name}"

    heads, kv_heads, head_dim, eps = config.heads, config.kv_heads, config.head_dim, config.rms_eps
    attn_sub_norm = _last_norm(config, weight("attn_sub_norm"), weight("attn_output"))
    q_norm, k_norm = (weight("attn_q_norm"), weight("attn_k_norm")) if config.head_norms else (None, None)
    stream, center = _stream(config)
    attn_norm = UNIT_NORM if config.layer_norms else weight("attn_norm")
    before, after = (_transform(config, width) for width in (config.hidden_size, heads * head_dim))
    window = config.window(layer)
    tables = ("rope_cos", "rope_sin") if config.windows is None or window else ("still_cos", "still_sin")
    shape, last = (heads, kv_heads, head_dim), config.family.norms_last
    return [
        *center,
        *_products(
            config,
            NormQuant(stream, attn_norm, config.stream_eps, "q8", "q8_scale", before),
            {weight(f"attn_{part}"): n * head_dim for part, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))},
            "qkv",
        ),
        *([TernaryMatmul("q8", "q8_scale", (weight("attn_q.gate"),), "gate")] if config.output_gate else []),
        *([AddBias("qkv", weight("attn_qkv.bias"))] if config.qkv_biases else []),
        RopeAppend("qkv", cache, *shape, *tables, config.rope_style, q_norm, k_norm, eps, table, last),
        Attention("qkv", "attn", cache, heads, kv_heads, head_dim, window, table),
        GatedQuant("attn", "gate", "sigmoid", None, eps, "attn_q8", "attn_q8_scale", after)
        if config.output_gate
        else NormQuant("attn", attn_sub_norm, eps, "attn_q8", "attn_q8_scale", after),
        *_branch(config, "attn_q8", "attn_q8_scale", weight("attn_output"), weight("post_attention_norm")),
        *_feed_forward_ops(config, layer),
    ]


def _products(config: ModelConfig, norm: NormQuant, widths: Mapping[str, int], out: str) -> list[Op]:
    """A norm and the products that read its result, whose rows are given by weight; they stand side by side in
    ``out``."""
    if not config.input_norms:
        return [norm, TernaryMatmul(norm.out, norm.scale, tuple(widths), out)]
    assert norm.weight is not None
    ops: list[Op] = [NormTokens(norm.x, norm.weight, norm.eps, "normed")]
    column = 0
    for weight, width in widths.items():
        ops += [
            NormQuant("normed", f"{weight}_norm_in", config.rms_eps, norm.out, norm.scale),
            TernaryMatmul(norm.out, norm.scale, (weight,), out, column=column),
        ]
        column += width
    return ops


def _last_norm(config: ModelConfig, sub_norm: str, product: str) -> str | None:
    """The norm of the input of a sub-layer's last product."""
    return f"{product}_norm_in" if config.input_norms else sub_norm if config.sub_norms else None


def _branch(config: ModelConfig, x: str, scale: str, weight: str, norm: str) -> list[Op]:
    """A sub-layer's last product, added to the residual stream, where the model has such a ``norm`` after it."""
    if not config.family.sandwiched:
        return [TernaryMatmul(x, scale, (weight,), "x", add=True)]
    return [TernaryMatmul(x, scale, (weight,), "branch"), NormTokens("branch", norm, config.rms_eps, "x", add=True)]


def _feed_forward_ops(config: ModelConfig, layer: int) -> list[Op]:
    def weight(name: str) -> str:
        return f"blk.{layer}.{name}"

    if config.experts is not None:
        return _expert_ops(config, config.experts, layer)
    ffn_sub_norm = _last_norm(config, weight("ffn_sub_norm"), weight("ffn_down"))
    ffn_norm = UNIT_NORM if config.layer_norms else weight(config.family.ffn_norm)
    stream, center = _stream(config)
    before, after = (_transform(config, width) for width in (config.hidden_size, config.ffn_size))
    return [
        *center,
        *_products(
            config,
            NormQuant(stream, ffn_norm, config.stream_eps, "q8", "q8_scale", before),
            {weight("ffn_gate"): config.ffn_size, weight("ffn_up"): config.ffn_size},
            "gate_up",
        ),
        GluNormQuant("gate_up", ffn_sub_norm, config.rms_eps, config.activation, "h8", "h8_scale", after),
        *_branch(config, "h8", "h8_scale", weight("ffn_down"), weight("post_ffw_norm")),
    ]


def _expert_ops(config: ModelConfig, experts: Experts, layer: int) -> list[Op]:
    """A mixture of experts, which adds to the residual stream ``x``."""

    def weight(name: str) -> str:
        return f"blk.{layer}.{name}"

    norm, eps, count = weight(config.family.ffn_norm), config.stream_eps, experts.count
    glu = GluNormQuant(
        "gate_up",
        None,
        config.rms_eps,
        config.activation,
        "h8",
        "h8_scale",
        clamp=experts.clamps[layer] or None,
        parts=experts.used,
    )
    gate_up = weight("ffn_gate_exps"), weight("ffn_up_exps")
    return [
        Route("x", norm, eps, weight("ffn_gate_inp"), "experts", "shares"),
        NormQuant("x", norm, eps, "q8", "q8_scale"),
        ExpertMatmul("q8", "q8_scale", "experts", count, gate_up, "gate_up"),
        glu,
        ExpertMatmul("h8", "h8_scale", "experts", count, (weight("ffn_down_exps"),), "x", "shares"),
    ]
