"""Write a BitNet model of any shape with random ternary weights and a made-up vocabulary, for tests and measurements.

    uv run python tools/make_random_model.py --preset 2b4t /tmp/2b4t.gguf
    uv run python tools/make_random_model.py --layers 2 --hidden 256 --heads 4 --kv-heads 2 --ffn 512 /tmp/small.gguf

The ``2b4t`` preset has the shape, the tensors and the metadata keys of the official file of BitNet b1.58 2B4T. The same
seed gives the same file.
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
    """A model's shape; ``head_dim`` times ``heads`` is its attention's width."""

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


PRESETS = {
    "small": Shape(),
    "2b4t": Shape(layers=30, hidden=2560, heads=20, kv_heads=5, head_dim=128, ffn=6912, vocab=128_256, context=4096),
}


def make_model(
    path: str | Path, shape: Shape, *, seed: int = 0, progress: Callable[[int, int], None] | None = None
) -> None:
    """Write the model; its weights are made while they are written, so little of it is in memory at a time."""
    write_gguf(path, metadata(shape), dict(tensors(shape, seed)), progress=progress)


def metadata(shape: Shape) -> dict[str, MetadataValue]:
    """The keys of the official file."""
    arch = "bitnet-b1.58"
    tokens, types, merges = vocabulary(shape.vocab)
    ids = {token: i for i, token in enumerate(tokens)}
    return {
        "general.architecture": arch,
        "general.name": f"random-{shape.layers}x{shape.hidden}",
        "general.file_type": 40,
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
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def ternary(n: int, k: int) -> TensorSource:
        return _ternary(np.random.default_rng(next(streams)), n, k)

    def norm(n: int) -> TensorSource:
        return _normal(np.random.default_rng(next(streams)), (n,), 1.0, 0.1, np.float32)

    def dense(n: int, k: int) -> TensorSource:
        return _normal(np.random.default_rng(next(streams)), (n, k), 0.0, k**-0.5, np.float16)

    yield "token_embd.weight", dense(shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        block = f"blk.{layer}."
        yield block + "attn_norm.weight", norm(shape.hidden)
        yield block + "ffn_down.weight", ternary(shape.hidden, shape.ffn)
        yield block + "ffn_sub_norm.weight", norm(shape.ffn)
        yield block + "ffn_gate.weight", ternary(shape.ffn, shape.hidden)
        yield block + "ffn_up.weight", ternary(shape.ffn, shape.hidden)
        yield block + "ffn_norm.weight", norm(shape.hidden)
        yield block + "attn_sub_norm.weight", norm(queries)
        yield block + "attn_k.weight", ternary(keys, shape.hidden)
        yield block + "attn_output.weight", ternary(shape.hidden, queries)
        yield block + "attn_q.weight", ternary(queries, shape.hidden)
        yield block + "attn_v.weight", ternary(keys, shape.hidden)
    yield "output_norm.weight", norm(shape.hidden)
    if not shape.tied:
        yield "output.weight", dense(shape.vocab, shape.hidden)


def _ternary(rng: np.random.Generator, n: int, k: int) -> TensorSource:
    """Codes drawn evenly, four at a time; the scale keeps the spread of what goes through."""
    digits = np.arange(81)
    table = (digits // 27 << 6 | digits // 9 % 3 << 4 | digits // 3 % 3 << 2 | digits % 3).astype(np.uint8)

    def data() -> Iterator[npt.NDArray[np.uint8]]:
        for begin in range(0, n * k // 4, CHUNK):
            yield table[rng.integers(0, 81, min(CHUNK, n * k // 4 - begin), dtype=np.uint8)]
        yield i2s_tail((1.5 / k) ** 0.5)

    return TensorSource((n, k), GGMLType.I2_S, data)


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
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N")
    parser.add_argument("--rope-theta", type=float, metavar="X")
    parser.add_argument("--untied", action="store_true", help="give the LM head a matrix of its own")
    parser.add_argument("--seed", type=int, default=0)
    arguments = vars(parser.parse_args())
    path, preset, seed = arguments.pop("path"), arguments.pop("preset"), arguments.pop("seed")
    given = {name: value for name, value in arguments.items() if name != "untied" and value is not None}
    shape = replace(PRESETS[preset], tied=not arguments["untied"], **given)
    make_model(path, shape, seed=seed)
    print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
