"""Write a ternary model of any shape with random weights and a made-up vocabulary, for tests and measurements.

    uv run python tools/make_random_model.py --preset 2b4t /tmp/2b4t.gguf
    uv run python tools/make_random_model.py --layers 2 --hidden 256 --heads 4 --kv-heads 2 --ffn 512 /tmp/small.gguf

The ``2b4t`` preset has the shape, the tensors and the metadata keys of the official file of BitNet b1.58 2B4T;
``bonsai-8b`` has those of Ternary-Bonsai 8B: Qwen3's graph, Q2_0 weights, embedding and head. ``--group 64`` writes
such a file with llama.cpp's groups. ``bonsai-27b`` has the shape of Bonsai 2 27B (Qwen3.5's graph with folded Hadamard
transforms, PQ2_0), and ``bonsai-27b-small`` has every part of it. ``maple`` has the shape of Maple 20B-A1B, a mixture
of 256 experts of which each token takes 8 (TQ2_0, tables in Q4_K), and ``maple-small`` every part of it. ``--experts``
makes a smaller file of it. ``hunyuan-small`` is a small file of Hy-MT's graph (TQ2_0, F16 embedding).
``--encoding`` and ``--table`` name other formats, ``--plain`` leaves the transforms of Bonsai's out, and ``--folder``
writes a folder of Bonsai's, Hugging Face's or MLX's, instead of a file.
The same seed gives the same file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

import random_maple
import random_qwen35
from bitnet.core.gguf import GGMLType, MetadataValue, TensorSource, write_gguf
from bitnet.core.gguf.ternary import i2s_tail
from random_blocks import CHUNK, DIGITS, FOUR, random_blocks
from random_parts import chat_tokenizer, normal, vocabulary
from random_shapes import PRESETS, ExpertShape, HunYuanShape, HybridShape, Shape
from running import positive, run_tool

CHAT_TEMPLATE = (
    "{% for message in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ message['role'] | capitalize }}: {{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}Assistant: {% endif %}"
)


Q2_0 = {64: GGMLType.Q2_0, 128: GGMLType.Q2_0_G128}
_TYPES = (GGMLType.PQ2_0, GGMLType.Q1_0, GGMLType.TQ2_0, *Q2_0.values(), *DIGITS)
ENCODINGS = {dtype.name.lower(): dtype for dtype in _TYPES}
TABLES = {dtype.name.lower(): dtype for dtype in (GGMLType.F16, GGMLType.Q4_0, GGMLType.Q4_K)}


def make_model(
    path: str | Path, shape: Shape, *, seed: int = 0, progress: Callable[[int, int], None] | None = None
) -> None:
    """Write the model; its weights are made while they are written, so little of it is in memory at a time."""
    write_gguf(path, metadata(shape, seed), dict(tensors(shape, seed)), progress=progress)


def metadata(shape: Shape, seed: int = 0) -> dict[str, MetadataValue]:
    """The keys of the official file."""
    if isinstance(shape, HybridShape):
        return random_qwen35.metadata(shape, seed)
    if isinstance(shape, ExpertShape):
        return random_maple.metadata(shape)
    arch = shape.architecture
    return {
        "general.architecture": arch,
        "general.name": f"random-{shape.layers}x{shape.hidden}",
        **({"general.file_type": 40} if _blocks(shape) is None else {}),
        "general.quantization_version": 2,
        f"{arch}.vocab_size": shape.vocab,
        f"{arch}.context_length": shape.context,
        f"{arch}.embedding_length": shape.hidden,
        f"{arch}.block_count": shape.layers,
        f"{arch}.feed_forward_length": shape.ffn,
        f"{arch}.rope.dimension_count": shape.head_dim,
        f"{arch}.rope.freq_base": shape.rope_theta,
        f"{arch}.attention.head_count": shape.heads,
        f"{arch}.attention.head_count_kv": shape.kv_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        **({} if shape.hidden == shape.heads * shape.head_dim else {f"{arch}.attention.key_length": shape.head_dim}),
        **_tokenizer(shape),
    }


def _blocks(shape: Shape) -> GGMLType | None:
    """The format of ternary matrices; None: I2_S."""
    if isinstance(shape, HunYuanShape):
        return shape.encoding
    return None if shape.group is None else Q2_0[shape.group]


def _tokenizer(shape: Shape) -> dict[str, MetadataValue]:
    if isinstance(shape, HunYuanShape):
        return chat_tokenizer(shape.vocab, "hunyuan-dense")
    tokens, types, merges = vocabulary(shape.vocab)
    ids = {token: i for i, token in enumerate(tokens)}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.scores": np.zeros(len(tokens), np.float32),
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": ids["<|begin_of_text|>"],
        "tokenizer.ggml.eos_token_id": ids["<|end_of_text|>"],
        "tokenizer.ggml.padding_token_id": ids["<|end_of_text|>"],
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def tensors(shape: Shape, seed: int) -> Iterator[tuple[str, TensorSource]]:
    """Every tensor, each from a random stream of its own."""
    if isinstance(shape, HybridShape):
        yield from random_qwen35.tensors(shape, seed)
        return
    if isinstance(shape, ExpertShape):
        yield from random_maple.tensors(shape, seed)
        return
    streams = iter(np.random.SeedSequence(seed).spawn(11 * shape.layers + 3))
    blocks = _blocks(shape)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def ternary(n: int, k: int) -> TensorSource:
        rng = np.random.default_rng(next(streams))
        return _ternary(rng, n, k) if blocks is None else random_blocks(rng, n, k, blocks)

    def norm(n: int) -> TensorSource:
        return normal(np.random.default_rng(next(streams)), (n,), 1.0, 0.1, np.float32)

    def table(n: int, k: int) -> TensorSource:
        if shape.group is not None:
            return ternary(n, k)
        return normal(np.random.default_rng(next(streams)), (n, k), 0.0, k**-0.5, np.float16)

    yield "token_embd.weight", table(shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        block = f"blk.{layer}."
        yield block + "attn_norm.weight", norm(shape.hidden)
        yield block + "ffn_down.weight", ternary(shape.hidden, shape.ffn)
        if blocks is None:
            yield block + "ffn_sub_norm.weight", norm(shape.ffn)
        else:
            yield block + "attn_q_norm.weight", norm(shape.head_dim)
            yield block + "attn_k_norm.weight", norm(shape.head_dim)
        yield block + "ffn_gate.weight", ternary(shape.ffn, shape.hidden)
        yield block + "ffn_up.weight", ternary(shape.ffn, shape.hidden)
        yield block + "ffn_norm.weight", norm(shape.hidden)
        if blocks is None:
            yield block + "attn_sub_norm.weight", norm(queries)
        yield block + "attn_k.weight", ternary(keys, shape.hidden)
        yield block + "attn_output.weight", ternary(shape.hidden, queries)
        yield block + "attn_q.weight", ternary(queries, shape.hidden)
        yield block + "attn_v.weight", ternary(keys, shape.hidden)
    yield "output_norm.weight", norm(shape.hidden)
    if not shape.tied:
        yield "output.weight", table(shape.vocab, shape.hidden)


def _ternary(rng: np.random.Generator, n: int, k: int) -> TensorSource:
    """Codes drawn evenly, four at a time; the scale keeps the spread of what goes through."""

    def data() -> Iterator[npt.NDArray[np.uint8]]:
        for begin in range(0, n * k // 4, CHUNK):
            yield FOUR[rng.integers(0, 81, min(CHUNK, n * k // 4 - begin), dtype=np.uint8)]
        yield i2s_tail((1.5 / k) ** 0.5)

    return TensorSource((n, k), GGMLType.I2_S, data)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="file or folder to write")
    parser.add_argument("--preset", choices=PRESETS, default="small", help="shape to begin with (default: small)")
    for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "context", "experts", "window"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=positive, metavar="N")
    parser.add_argument("--rope-theta", type=float, metavar="X")
    parser.add_argument("--group", type=int, choices=Q2_0, help="columns of a scale (default: the preset's)")
    parser.add_argument("--untied", action="store_true", help="give the LM head a matrix of its own")
    parser.add_argument("--encoding", choices=ENCODINGS, help="format of a Bonsai 27B's, Maple's or HunYuan's matrices")
    parser.add_argument("--table", choices=TABLES, help="format of a Maple's embedding and head (default: q4_k)")
    parser.add_argument("--plain", action="store_true", help="leave a Bonsai 27B's transforms out")
    parser.add_argument("--folder", choices=("hf", "mlx"), help="write a Bonsai 27B as a folder of floats, or of MLX's")
    parser.add_argument("--seed", type=int, default=0)
    arguments = vars(parser.parse_args())
    path, preset, seed = arguments.pop("path"), arguments.pop("preset"), arguments.pop("seed")
    encoding, table, plain, folder = (arguments.pop(name) for name in ("encoding", "table", "plain", "folder"))
    if arguments.pop("untied"):
        arguments["tied"] = False
    given = {name: value for name, value in arguments.items() if value is not None}
    if encoding is not None:
        given["encoding"] = ENCODINGS[encoding]
    if table is not None:
        given["table"] = TABLES[table]
    if plain:
        given["block"] = None
    if unknown := given.keys() - {field.name for field in fields(PRESETS[preset])}:
        parser.error(f"the preset {preset} has no {', '.join(sorted(unknown))}")
    shape = replace(PRESETS[preset], **given)
    if folder is not None:
        if isinstance(shape, HybridShape):
            random_qwen35.write_folder(path, shape, seed, folder)
        else:
            parser.error(f"--folder is for the presets of Bonsai 27B, not {preset}")
        print(f"{path}: {sum(file.stat().st_size for file in path.iterdir()):,} bytes")
        return
    make_model(path, shape, seed=seed)
    print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    run_tool(main)
