"""Bombs in GGUF files: sizes that are derived from metadata, counts, and tensors of odd shapes."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bitnet.core.gguf import GGMLType, TensorSource
from bitnet.core.gguf.blocks import FORMATS
from bitnet.core.gguf.types import BLOCKS, tensor_bytes
from bombs.base import GGUF, LFS_POINTER, Shape
from bombs.family import Family

MB = 1 << 20


def families() -> Iterator[Family]:
    """Every family of this file."""
    yield Family("head of 131072 elements", _shape(heads=1, head_dim=131_072, hidden=32, context=4096), "key_length")
    yield Family("head of 8192 elements", _shape(heads=1, head_dim=8192, hidden=64, context=4096), "key_length")
    yield Family("many heads", _shape(heads=512, kv_heads=512, head_dim=256, hidden=32, context=4096), "head_count")
    yield Family("wide cache", _shape(heads=512, kv_heads=512, head_dim=4, hidden=32, layers=40, context=4096), None)
    yield Family("wide feed-forward", _shape(ffn=131_072, hidden=16, heads=1, head_dim=16), "feed_forward_length")
    yield Family("long context", _shape(context=2**31 - 1), None)
    yield Family("500 layers", _shape(layers=500, hidden=32, ffn=32, heads=1, head_dim=32), None)
    yield Family("more layers than tensors", _key("block_count", 2**31 - 1), "is missing")
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        yield Family(f"{key} of 2^31", _key(key, 2**31 - 2), key)
    yield Family("linear scaling of a head of 2^31", _scaled_head, "key_length")
    yield Family("embedding of 2^31 columns", _key("embedding_length", 2**31 - 4), "embedding_length")
    yield Family("2^30 heads", _key("attention.head_count", 2**30), "head_count")
    yield Family("feed-forward of 2^31", _key("feed_forward_length", 2**31 - 4), "feed_forward_length")
    yield Family("alignment of 2^62", _alignment, "past the end")
    yield Family("a million metadata keys", _many_keys, "metadata")
    yield Family("a million tensors", _many_tensors, "tensor")
    yield Family("tensors of the same place", _overlapping, "overlap")
    yield Family("arrays in arrays", _nested_arrays, "nested arrays")
    yield Family("a long array of bytes", _metadata("x.bytes", lambda: np.zeros(16 * MB, np.uint8)), None)
    yield Family(
        "a long array for a number", _metadata("bitnet-b1.58.block_count", lambda: np.ones(MB, np.int32)), None
    )
    yield Family(
        "limits of keys by an array",
        _metadata("bitnet-b1.58.attention.clamp_kqv", lambda: np.arange(MB)),
        "values that differ",
    )
    yield Family("a long string", _metadata("general.name", lambda: "x" * (8 * MB)), None)
    yield Family("a long key", _metadata("k" * 65_000, lambda: 1), None)
    yield Family("many empty strings", _metadata("x.strings", lambda: [""] * MB), None)
    yield Family("strings of odd lengths", _metadata("x.strings", lambda: ["\0", "x" * 300] * 25_000), None)
    yield Family(
        "a matrix of one column",
        _extra((32 * MB, 1), GGMLType.I2_S),
        "not part of",
    )
    yield Family("a matrix of one row", _extra((1, 32 * MB), GGMLType.TQ1_0), "not part of")
    yield Family("a float matrix of long rows", _extra((16, 131_072), GGMLType.F32), "not part of")
    yield Family("an embedding of narrow rows", _narrow_vocabulary, None)
    yield Family("a Git LFS pointer", _pointer, "Git LFS")
    yield Family("an embedding of 2^36 rows in a sparse file", _sparse_embedding(2**36), "rows; the limit")
    yield Family("an embedding of 2^20 rows in a sparse file", _sparse_embedding(2**20), "rows; the limit")
    for dtype in (GGMLType.TQ2_0, GGMLType.STQ1_0, GGMLType.PTQ1_0, GGMLType.PQ2_0):
        yield Family(
            f"{dtype.name}: scales that all differ",
            _many_scales(dtype),
            "different scales",
            lenient=("inspect", "encode"),
        )
    yield Family("a large TL1 matrix", _extra((4096, 4096), GGMLType.TL1), "not part of")
    yield Family("a large TL2 matrix", _extra((8640, 3200), GGMLType.TL2), "not part of")
    yield Family("a TL2 matrix of unknown tiles", _unknown_tiles, "no tile sizes")


def _shape(**sizes: int) -> Callable[[Path], Path]:
    return lambda folder: GGUF(Shape(**sizes)).write(folder)


def _key(key: str, value: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        model = GGUF()
        model.set(key, value)
        return model.write(folder)

    return make


def _metadata(key: str, value: Callable[[], Any]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        model = GGUF()
        model.metadata[key] = value()
        return model.write(folder)

    return make


def _scaled_head(folder: Path) -> Path:
    model = GGUF()
    for key in ("attention.key_length", "attention.value_length"):
        model.set(key, 2**31 - 2)
    model.set("rope.scaling.type", "linear")
    model.set("rope.scaling.factor", 2.0)
    return model.write(folder)


def _alignment(folder: Path) -> Path:
    path = GGUF(metadata={}).write(folder)
    data = path.read_bytes()
    entry = struct.pack("<Q", 17) + b"general.alignment" + struct.pack("<IQ", 10, 2**62)
    count = struct.unpack_from("<Q", data, 16)[0]
    path.write_bytes(data[:16] + struct.pack("<Q", count + 1) + entry + data[24:])
    return path


def _many_keys(folder: Path) -> Path:
    count = 1_000_000
    entries = np.zeros(count, np.dtype([("n", "<u8"), ("key", "S6"), ("type", "<u4"), ("value", "u1")]))
    entries["n"] = 6
    entries["key"] = np.char.zfill(np.base_repr(0), 6)
    digits = np.frombuffer(b"0123456789", np.uint8)
    numbers = np.arange(count)
    text = np.stack([digits[numbers // 10**p % 10] for p in range(5, -1, -1)], axis=1)
    entries["key"] = np.ascontiguousarray(text).view("S6")[:, 0]
    path = folder / "bomb.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, count) + entries.tobytes())
    return path


def _many_tensors(folder: Path) -> Path:
    count = 300_000
    entries = b"".join(struct.pack("<Q6sIQIQ", 6, b"%06d" % i, 1, 8, GGMLType.F32, 32 * i) for i in range(count))
    path = folder / "bomb.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, count, 0) + entries + bytes(32 * (count + 1)))
    return path


def _overlapping(folder: Path) -> Path:
    count = 60_000
    entries = b"".join(struct.pack("<Q6sIQIQ", 6, b"%06d" % i, 1, MB, GGMLType.F32, 0) for i in range(count))
    path = folder / "bomb.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, count, 0) + entries + bytes(4 * MB + 64))
    return path


def _nested_arrays(folder: Path) -> Path:
    inner = struct.pack("<IQ", 4, 0) * 500_000
    key = struct.pack("<Q1sIIQ", 1, b"x", 9, 9, 500_000)
    path = folder / "bomb.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + inner)
    return path


def _extra(shape: tuple[int, int], dtype: GGMLType) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        model = GGUF()
        model.tensors["extra.weight"] = TensorSource(shape, dtype, np.zeros(tensor_bytes(dtype, shape), np.uint8))
        return model.write(folder)

    return make


def _pointer(folder: Path) -> Path:
    path = folder / "bomb.gguf"
    path.write_bytes(LFS_POINTER)
    return path


def _sparse_embedding(rows: int) -> Callable[[Path], Path]:
    """A file of a few kilobytes on the disk, whose embedding is a hole of terabytes."""

    def make(folder: Path) -> Path:
        bomb = GGUF()
        name, row = "token_embd.weight", 2 * bomb.shape.hidden
        bomb.tensors[name] = bomb.tensors.pop(name)  # the last one
        path = bomb.write(folder)
        head = struct.pack(f"<Q{len(name)}sIQ", len(name), name.encode(), 2, bomb.shape.hidden)
        at = path.read_bytes().index(head) + len(head)
        with path.open("r+b") as file:
            file.seek(at)
            file.write(struct.pack("<Q", rows))
            file.truncate(path.stat().st_size + (rows - bomb.shape.vocab) * row)
        return path

    return make


def _narrow_vocabulary(folder: Path) -> Path:
    return GGUF(Shape(hidden=16, ffn=32, heads=1, head_dim=16, vocab=300_000)).write(folder)


def _many_scales(dtype: GGMLType) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        model = GGUF(Shape(hidden=256, ffn=4096, heads=8))
        size, nbytes = BLOCKS[dtype]
        blocks = np.zeros((4096 * 256 // size, nbytes), np.uint8)
        at = FORMATS[dtype].scale_at
        blocks[:, at : at + 2] = np.arange(1, len(blocks) + 1, dtype="<u2").view(np.uint8).reshape(-1, 2)
        model.tensors["blk.0.ffn_gate.weight"] = TensorSource((4096, 256), dtype, blocks)
        return model.write(folder)

    return make


def _unknown_tiles(folder: Path) -> Path:
    model = GGUF(Shape(hidden=256, ffn=8192, heads=8))
    data = np.zeros(tensor_bytes(GGMLType.TL2, (8192, 256)), np.uint8)
    model.tensors["blk.0.ffn_gate.weight"] = TensorSource((8192, 256), GGMLType.TL2, data)
    model.tensors["blk.0.ffn_gate.weight_scale"] = np.ones(1, np.float32)
    return model.write(folder)
