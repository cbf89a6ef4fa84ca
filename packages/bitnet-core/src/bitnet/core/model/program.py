"""Builds the program that a device compiles from a model's shape and weights.

One builder serves BitNet b1.58 2B4T (sub-norms, squared ReLU), the 1bitLLM models (sub-norms, SiLU), Llama-shaped
1.58-bit models (no sub-norms, SiLU), MiniCPM's (the same, with scales folded into weights: ADR 0045), Qwen3's
(no sub-norms, but norms of q's and k's heads), Qwen2's (the same, with biases of q, k and v instead) and OLMo's (the
same, with LayerNorms instead: ADR 0048). They differ in which norms have a weight, in the activation, and in one plain
operation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from bitnet.core.errors import InvalidInputError
from bitnet.core.hal import (
    AddBias,
    Attention,
    CenterRows,
    DenseMatmul,
    DenseWeight,
    Embed,
    GluNormQuant,
    KVDtype,
    KVSpec,
    Limits,
    NormQuant,
    NormRows,
    Op,
    Program,
    RopeAppend,
    Sample,
    TensorSpec,
    TernaryMatmul,
    Weight,
)
from bitnet.core.model.rope import rope_tables

if TYPE_CHECKING:
    from bitnet.core.model.config import ModelConfig


UNIT_NORM = "unit_norm"
"""The weight, all ones, of a norm that has none in the file."""
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
) -> Program:
    """The program of a model; it ends in ``Sample``, so that a step returns a token for each of its rows.

    All layers share the same activation tensors: ``x`` is the residual stream (``centered`` is ``x`` minus its rows'
    means, for LayerNorms), ``q8`` and ``h8`` are the quantised inputs of the attention's and the MLP's products,
    ``logits`` is ``f32[R, vocab]``, ``next`` is ``i32[R]``.

    Args:
        weights: By canonical name (``blk.0.attn_q``); a tied head is the same object as ``token_embd``.
        limits: ``max_blocks * block_size`` is the maximum sequence length and the number of rows of the rotary tables.
        num_blocks: Blocks of the KV cache, over all sequences.
        deterministic: See :class:`~bitnet.core.hal.Program`.

    Raises:
        InvalidInputError: The model has recurrent layers or folded transforms.
    """
    if config.delta_net is not None or config.hadamard is not None:
        what = "recurrent layers (Gated DeltaNet)" if config.delta_net is not None else "folded Hadamard transforms"
        raise InvalidInputError(f"{config.name} has {what}, which bitnet reads and converts but does not run yet.")
    cos, sin = rope_tables(config, limits.max_blocks * block_size)
    used = dict(weights)
    used["rope_cos"] = DenseWeight(cos.shape, "f32", lambda: cos)
    used["rope_sin"] = DenseWeight(sin.shape, "f32", lambda: sin)
    head = "token_embd" if weights.get("output") is weights.get("token_embd") else "output"
    if head == "token_embd":
        used.pop("output", None)

    ops: list[Op] = [Embed("token_embd", "x")]
    for layer in range(config.layers):
        if config.qkv_biases:
            parts = [used.pop(f"blk.{layer}.attn_{part}.bias") for part in "qkv"]
            used[f"blk.{layer}.attn_qkv.bias"] = _stacked([bias for bias in parts if isinstance(bias, DenseWeight)])
        ops += _layer_ops(config, layer)
    stream, center = _stream(config)
    ops += [
        *center,
        NormRows(stream, UNIT_NORM if config.layer_norms else "output_norm", config.stream_eps, "last"),
        DenseMatmul("last", head, "logits"),
        Sample("logits", "next"),
    ]

    hidden, heads_width = config.hidden_size, config.heads * config.head_dim
    if config.layer_norms:
        used[UNIT_NORM] = DenseWeight((hidden,), "f32", lambda: np.ones(hidden, np.float32))
    tensors = (
        *(TensorSpec(op.out, "f32", ("M", hidden)) for op in center),
        TensorSpec("x", "f32", ("M", hidden)),
        TensorSpec("q8", "i8", ("M", hidden)),
        TensorSpec("q8_scale", "f32", ("M",)),
        TensorSpec("qkv", "f32", ("M", (config.heads + 2 * config.kv_heads) * config.head_dim)),
        TensorSpec("attn", "f32", ("M", heads_width)),
        TensorSpec("attn_q8", "i8", ("M", heads_width)),
        TensorSpec("attn_q8_scale", "f32", ("M",)),
        TensorSpec("gate_up", "f32", ("M", 2 * config.ffn_size)),
        TensorSpec("h8", "i8", ("M", config.ffn_size)),
        TensorSpec("h8_scale", "f32", ("M",)),
        TensorSpec("last", "f32", ("R", hidden)),
        TensorSpec("logits", "f32", ("R", config.vocab_size)),
        TensorSpec("next", "i32", ("R",)),
    )
    return Program(
        ops=ops,
        tensors={spec.name: spec for spec in tensors},
        weights=used,
        limits=limits,
        kv=KVSpec(config.layers, config.kv_heads, config.head_dim, num_blocks, block_size, kv_dtype),
        name=config.name or config.architecture,
        deterministic=deterministic,
    )


def _stacked(vectors: Sequence[DenseWeight]) -> DenseWeight:
    """Concatenate vectors in the order in which the corresponding products are stacked."""
    size = sum(vector.shape[0] for vector in vectors)
    return DenseWeight((size,), "f32", lambda: np.concatenate([vector.load() for vector in vectors]))


def _stream(config: ModelConfig) -> tuple[str, list[CenterRows]]:
    """The tensor that norms of the residual stream read, and the ops that compute it: LayerNorm is RMSNorm of centred
    rows."""
    return ("centered", [CenterRows("x", "centered")]) if config.layer_norms else ("x", [])


def _layer_ops(config: ModelConfig, layer: int) -> list[Op]:
    """Attention and MLP of one layer, each adding to the residual stream ``x``."""

    def weight(name: str) -> str:
        return f"blk.{layer}.{name}"

    heads, kv_heads, head_dim, eps = config.heads, config.kv_heads, config.head_dim, config.rms_eps
    attn_sub_norm = weight("attn_sub_norm") if config.sub_norms else None
    ffn_sub_norm = weight("ffn_sub_norm") if config.sub_norms else None
    q_norm, k_norm = (weight("attn_q_norm"), weight("attn_k_norm")) if config.head_norms else (None, None)
    stream, center = _stream(config)
    attn_norm, ffn_norm = (UNIT_NORM,) * 2 if config.layer_norms else (weight("attn_norm"), weight("ffn_norm"))
    return [
        *center,
        NormQuant(stream, attn_norm, config.stream_eps, "q8", "q8_scale"),
        TernaryMatmul("q8", "q8_scale", (weight("attn_q"), weight("attn_k"), weight("attn_v")), "qkv"),
        *([AddBias("qkv", weight("attn_qkv.bias"))] if config.qkv_biases else []),
        RopeAppend(
            "qkv", layer, heads, kv_heads, head_dim, "rope_cos", "rope_sin", config.rope_style, q_norm, k_norm, eps
        ),
        Attention("qkv", "attn", layer, heads, kv_heads, head_dim),
        NormQuant("attn", attn_sub_norm, eps, "attn_q8", "attn_q8_scale"),
        TernaryMatmul("attn_q8", "attn_q8_scale", (weight("attn_output"),), "x", add=True),
        *center,
        NormQuant(stream, ffn_norm, config.stream_eps, "q8", "q8_scale"),
        TernaryMatmul("q8", "q8_scale", (weight("ffn_gate"), weight("ffn_up")), "gate_up"),
        GluNormQuant("gate_up", ffn_sub_norm, eps, config.activation, "h8", "h8_scale"),
        TernaryMatmul("h8", "h8_scale", (weight("ffn_down"),), "x", add=True),
    ]
