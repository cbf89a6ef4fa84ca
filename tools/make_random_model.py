"""Write a ternary model of any shape with random weights and a made-up vocabulary, for tests and measurements.

    uv run python tools/make_random_model.py --preset 2b4t /tmp/2b4t.gguf
    uv run python tools/make_random_model.py --layers 2 --hidden 256 --heads 4 --kv-heads 2 --ffn 512 /tmp/small.gguf

The ``2b4t`` preset has the shape, the tensors and the metadata keys of the official file of BitNet b1.58 2B4T;
``bonsai-8b`` has those of Ternary-Bonsai 8B: Qwen3's graph, Q2_0 weights, embedding and head. ``--group 64`` writes
such a file with llama.cpp's groups. The same seed gives the same file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bitnet.core.gguf import GGMLType, MetadataValue, TensorSource, write_gguf
from bitnet.core.gguf.ternary import i2s_tail
from bitnet.core.text.tokenizer import byte_characters
from bitnet.core.text.vocabulary import TokenType
from running import positive, run_tool

CHUNK = 1 << 22
LETTERS = "\u0120etaoinshrdlcumwfgypbvk,"
"""Characters of the longer tokens: a space, as byte-level vocabularies write it, and common letters."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ message['role'] | capitalize }}: {{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}Assistant: {% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """A model's shape; ``head_dim`` times ``heads`` is its attention's width.

    ``group`` makes it Qwen3's, with a scale for each group of 64 or 128 columns, embedding and head among them.
    """

    layers: int = 2
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    ffn: int = 512
    vocab: int = 512
    context: int = 512
    rope_theta: float = 500_000.0
    tied: bool = True
    group: int | None = None

    @property
    def architecture(self) -> str:
        """As ``general.architecture`` names it."""
        return "bitnet-b1.58" if self.group is None else "qwen3"


PRESETS = {
    "small": Shape(),
    "2b4t": Shape(layers=30, hidden=2560, heads=20, kv_heads=5, head_dim=128, ffn=6912, vocab=128_256, context=4096),
    "bonsai-8b": Shape(
        layers=36,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        ffn=12_288,
        vocab=151_936,
        context=65_536,
        rope_theta=1_000_000.0,
        tied=False,
        group=128,
    ),
}
Q2_0 = {64: GGMLType.Q2_0, 128: GGMLType.Q2_0_G128}


def make_model(
    path: str | Path, shape: Shape, *, seed: int = 0, progress: Callable[[int, int], None] | None = None
) -> None:
    """Write the model; its weights are made while they are written, so little of it is in memory at a time."""
    write_gguf(path, metadata(shape), dict(tensors(shape, seed)), progress=progress)


def metadata(shape: Shape) -> dict[str, MetadataValue]:
    """The keys of the official file."""
    arch = shape.architecture
    tokens, types, merges = vocabulary(shape.vocab)
    ids = {token: i for i, token in enumerate(tokens)}
    return {
        "general.architecture": arch,
        "general.name": f"random-{shape.layers}x{shape.hidden}",
        **({"general.file_type": 40} if shape.group is None else {}),
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


def vocabulary(size: int) -> tuple[list[str], list[int], list[str]]:
    """Tokens, their types and merges: all bytes, then strings of two, three and four letters, then special tokens.

    Every way to cut a string into two others is a merge, up to twice as many merges as tokens, as in Llama 3's.
    """
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    special += [f"<|reserved_{i}|>" for i in range((256 if size > 10_000 else 8) - len(special))]
    tokens = list(byte_characters().values())
    if size < len(tokens) + len(special):
        raise SystemExit(f"the vocabulary needs at least {len(tokens) + len(special)} tokens")
    merges = []
    for length in (2, 3, 4):
        room = size - len(special) - len(tokens)
        made = [letters for _, letters in zip(range(room), product(LETTERS, repeat=length), strict=False)]
        tokens += ["".join(letters) for letters in made]
        for letters in made:
            merges += [f"{''.join(letters[:cut])} {''.join(letters[cut:])}" for cut in range(1, length)]
    if len(tokens) + len(special) < size:
        raise SystemExit(f"the vocabulary can have at most {len(tokens) + len(special)} tokens")
    types = [TokenType.NORMAL] * len(tokens) + [TokenType.CONTROL] * len(special)
    return tokens + special, [int(kind) for kind in types], merges


def tensors(shape: Shape, seed: int) -> Iterator[tuple[str, TensorSource]]:
    """Every tensor, each from a random stream of its own."""
    streams = iter(np.random.SeedSequence(seed).spawn(11 * shape.layers + 3))
    group = shape.group
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def ternary(n: int, k: int) -> TensorSource:
        rng = np.random.default_rng(next(streams))
        return _ternary(rng, n, k) if group is None else _ternary_in_groups(rng, n, k, group)

    def norm(n: int) -> TensorSource:
        return _normal(np.random.default_rng(next(streams)), (n,), 1.0, 0.1, np.float32)

    def table(n: int, k: int) -> TensorSource:
        if group is not None:
            return ternary(n, k)
        return _normal(np.random.default_rng(next(streams)), (n, k), 0.0, k**-0.5, np.float16)

    yield "token_embd.weight", table(shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        block = f"blk.{layer}."
        yield block + "attn_norm.weight", norm(shape.hidden)
        yield block + "ffn_down.weight", ternary(shape.hidden, shape.ffn)
        if group is None:
            yield block + "ffn_sub_norm.weight", norm(shape.ffn)
        else:
            yield block + "attn_q_norm.weight", norm(shape.head_dim)
            yield block + "attn_k_norm.weight", norm(shape.head_dim)
        yield block + "ffn_gate.weight", ternary(shape.ffn, shape.hidden)
        yield block + "ffn_up.weight", ternary(shape.ffn, shape.hidden)
        yield block + "ffn_norm.weight", norm(shape.hidden)
        if group is None:
            yield block + "attn_sub_norm.weight", norm(queries)
        yield block + "attn_k.weight", ternary(keys, shape.hidden)
        yield block + "attn_output.weight", ternary(shape.hidden, queries)
        yield block + "attn_q.weight", ternary(queries, shape.hidden)
        yield block + "attn_v.weight", ternary(keys, shape.hidden)
    yield "output_norm.weight", norm(shape.hidden)
    if not shape.tied:
        yield "output.weight", table(shape.vocab, shape.hidden)


_digits = np.arange(81)
FOUR = (_digits // 27 << 6 | _digits // 9 % 3 << 4 | _digits // 3 % 3 << 2 | _digits % 3).astype(np.uint8)
"""Bytes of four codes of 0, 1 or 2."""


def _ternary(rng: np.random.Generator, n: int, k: int) -> TensorSource:
    """Codes drawn evenly, four at a time; the scale keeps the spread of what goes through."""

    def data() -> Iterator[npt.NDArray[np.uint8]]:
        for begin in range(0, n * k // 4, CHUNK):
            yield FOUR[rng.integers(0, 81, min(CHUNK, n * k // 4 - begin), dtype=np.uint8)]
        yield i2s_tail((1.5 / k) ** 0.5)

    return TensorSource((n, k), GGMLType.I2_S, data)


def _ternary_in_groups(rng: np.random.Generator, n: int, k: int, group: int) -> TensorSource:
    """As ``_ternary``, in blocks of a scale and ``group`` codes; scales differ by half to either side."""
    block = np.dtype([("scale", np.float16), ("codes", np.uint8, group // 4)])

    def data() -> Iterator[npt.NDArray[np.uint8]]:
        for begin in range(0, n * k // group, CHUNK // group):
            blocks = np.empty(min(CHUNK // group, n * k // group - begin), block)
            blocks["scale"] = (1.5 / k) ** 0.5 * rng.uniform(0.5, 1.5, len(blocks))
            blocks["codes"] = FOUR[rng.integers(0, 81, blocks["codes"].shape, dtype=np.uint8)]
            yield blocks.view(np.uint8)

    return TensorSource((n, k), Q2_0[group], data)


def _normal(
    rng: np.random.Generator, shape: tuple[int, ...], mean: float, deviation: float, dtype: type[np.floating]
) -> TensorSource:
    def data() -> Iterator[npt.NDArray[np.floating]]:
        count = int(np.prod(shape))
        for begin in range(0, count, CHUNK):
            values = rng.standard_normal(min(CHUNK, count - begin), np.float32)
            yield (values * np.float32(deviation) + np.float32(mean)).astype(dtype)

    return TensorSource(shape, GGMLType.F32 if dtype is np.float32 else GGMLType.F16, data)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="file to write")
    parser.add_argument("--preset", choices=PRESETS, default="small", help="shape to begin with (default: small)")
    for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "context"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=positive, metavar="N")
    parser.add_argument("--rope-theta", type=float, metavar="X")
    parser.add_argument("--group", type=int, choices=Q2_0, help="columns of a scale (default: the preset's)")
    parser.add_argument("--untied", action="store_true", help="give the LM head a matrix of its own")
    parser.add_argument("--seed", type=int, default=0)
    arguments = vars(parser.parse_args())
    path, preset, seed = arguments.pop("path"), arguments.pop("preset"), arguments.pop("seed")
    if arguments.pop("untied"):
        arguments["tied"] = False
    shape = replace(PRESETS[preset], **{name: value for name, value in arguments.items() if value is not None})
    make_model(path, shape, seed=seed)
    print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    run_tool(main)
