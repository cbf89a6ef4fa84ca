"""Random GGUF files of Maple's graph, a mixture of ternary experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from bitnet.core.gguf import GGMLType, MetadataValue, TensorSource
from bitnet.core.gguf.types import BLOCKS
from random_blocks import CHUNK, random_blocks
from random_parts import chat_tokenizer, normal
from random_shapes import ExpertShape


class Part(NamedTuple):
    """A weight: its name, what it is, and its shape."""

    gguf: str
    kind: Literal["ternary", "norm", "table", "router"]
    shape: tuple[int, ...]


def parts(shape: ExpertShape) -> Iterator[Part]:
    """Every weight in the order of the forward pass."""
    hidden, queries, keys = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    up, down = (shape.experts, shape.ffn, hidden), (shape.experts, hidden, shape.ffn)
    layers: list[tuple[str, Literal["ternary", "norm", "table", "router"], tuple[int, ...]]] = [
        ("attn_norm", "norm", (hidden,)),
        ("attn_q", "ternary", (queries, hidden)),
        ("attn_k", "ternary", (keys, hidden)),
        ("attn_v", "ternary", (keys, hidden)),
        ("attn_q_norm", "norm", (shape.head_dim,)),
        ("attn_k_norm", "norm", (shape.head_dim,)),
        ("attn_output", "ternary", (hidden, queries)),
        ("ffn_norm", "norm", (hidden,)),
        ("ffn_gate_inp", "router", (shape.experts, hidden)),
        ("ffn_gate_exps", "ternary", up),
        ("ffn_up_exps", "ternary", up),
        ("ffn_down_exps", "ternary", down),
    ]
    yield Part("token_embd", "table", (shape.vocab, hidden))
    for layer in range(shape.layers):
        for gguf, kind, size in layers:
            yield Part(f"blk.{layer}.{gguf}", kind, size)
    yield Part("output_norm", "norm", (hidden,))
    yield Part("output", "table", (shape.vocab, hidden))


def metadata(shape: ExpertShape) -> dict[str, MetadataValue]:
    """The keys of a GGUF file."""
    keys: dict[str, MetadataValue] = {
        "vocab_size": shape.vocab,
        "context_length": shape.context,
        "embedding_length": shape.hidden,
        "block_count": shape.layers,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": shape.window,
        "attention.sliding_window_pattern": np.array([shape.slides(i) for i in range(shape.layers)]),
        "expert_count": shape.experts,
        "expert_used_count": shape.used,
        "expert_feed_forward_length": shape.ffn,
        "rope.dimension_count": shape.rotary,
        "rope.freq_base": shape.rope_theta,
    }
    if shape.clamp is not None:
        keys["swiglu_clamp_exp"] = np.full(shape.layers, shape.clamp, np.float32)
    return {
        "general.architecture": "maple",
        "general.name": f"random-{shape.layers}x{shape.hidden}x{shape.experts}",
        "general.quantization_version": 2,
        **{f"maple.{key}": value for key, value in keys.items()},
        **chat_tokenizer(shape.vocab, "qwen2"),
    }


def tensors(shape: ExpertShape, seed: int) -> Iterator[tuple[str, TensorSource]]:
    """Every tensor of a GGUF file, each from a random stream of its own."""
    every = list(parts(shape))
    for part, stream in zip(every, np.random.SeedSequence(seed).spawn(len(every)), strict=True):
        yield f"{part.gguf}.weight", _tensor(part, np.random.default_rng(stream), shape)


def _tensor(part: Part, rng: np.random.Generator, shape: ExpertShape) -> TensorSource:
    if part.kind == "ternary":
        n, k = int(np.prod(part.shape[:-1])), part.shape[-1]
        return random_blocks(rng, n, k, shape.encoding, shape=part.shape, rows=True)
    if part.kind == "table":
        return _table(rng, part.shape, shape.table)
    if part.kind == "router":
        return normal(rng, part.shape, 0.0, 2 * part.shape[1] ** -0.5, np.float32)
    return normal(rng, part.shape, 1.0, 0.1, np.float32)


def _table(rng: np.random.Generator, shape: tuple[int, ...], dtype: GGMLType) -> TensorSource:
    """An embedding or head, its values of the spread of a row's inverse length."""
    spread = shape[1] ** -0.5
    if dtype is GGMLType.F16:
        return normal(rng, shape, 0.0, spread, np.float16)
    elements, size = BLOCKS[dtype]
    # A block's first bytes: the scale of values -8 … 7, or those of 0 … 63 times 0 … 15 and of what is subtracted.
    first = [spread / 4.6] if dtype is GGMLType.Q4_0 else [spread / 180, spread / 24]

    def data() -> Iterator[npt.NDArray[np.uint8]]:
        blocks = shape[0] * shape[1] // elements
        for begin in range(0, blocks, CHUNK // size):
            made = rng.integers(0, 256, (min(CHUNK // size, blocks - begin), size), np.uint8)
            made[:, : 2 * len(first)] = np.array(first, "<f2").view(np.uint8)
            yield made

    return TensorSource(shape, dtype, data)
