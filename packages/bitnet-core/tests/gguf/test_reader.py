"""The reader against the ``gguf`` package's writer, and on every kind of broken or hostile file."""

from __future__ import annotations

import os
import random
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from bitnet.core.errors import ModelFileError
from bitnet.core.gguf import GGMLType, GGUFFile, cursor

U8, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 6, 7, 8, 9, 10


def test_reads_what_the_gguf_package_writes(tmp_path: Path) -> None:
    rng = np.random.default_rng()
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "bitnet")
    writer.add_uint8("a.u8", 255)
    writer.add_int8("a.i8", -128)
    writer.add_uint16("a.u16", 65535)
    writer.add_int16("a.i16", -32768)
    writer.add_uint32("a.u32", 2**32 - 1)
    writer.add_int32("a.i32", -(2**31))
    writer.add_uint64("a.u64", 2**64 - 1)
    writer.add_int64("a.i64", -(2**63))
    writer.add_float32("a.f32", 0.1)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "ternär 🙂")
    words = [chr(rng.integers(0x20, 0xD000)) * rng.integers(0, 9) for _ in range(1000)]
    writer.add_array("a.words", words)
    writer.add_array("a.ints", [1, -2, 3])
    matrix = rng.normal(size=(7, 5)).astype(np.float32)
    half = rng.normal(size=(3, 2, 4)).astype(np.float16)
    writer.add_tensor("matrix", matrix)
    writer.add_tensor("half", half)
    blocks = gguf.quants.quantize(rng.normal(size=(4, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blocks", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = GGUFFile(path)
    assert file.version == 3
    assert file.size == path.stat().st_size
    got: dict[str, Any] = {key: value for key, value in file.metadata.items() if key.startswith("a.")}
    assert got.pop("a.ints").tolist() == [1, -2, 3]
    assert got == {
        "a.u8": 255,
        "a.i8": -128,
        "a.u16": 65535,
        "a.i16": -32768,
        "a.u32": 2**32 - 1,
        "a.i32": -(2**31),
        "a.u64": 2**64 - 1,
        "a.i64": -(2**63),
        "a.f32": float(np.float32(0.1)),
        "a.f64": 0.1,
        "a.bool": True,
        "a.text": "ternär 🙂",
        "a.words": words,
    }
    shapes = {name: (t.type, t.shape) for name, t in file.tensors.items()}
    assert shapes == {
        "matrix": (GGMLType.F32, (7, 5)),
        "half": (GGMLType.F16, (3, 2, 4)),
        "blocks": (GGMLType.Q8_0, (4, 64)),
    }
    for name, array in (("matrix", matrix), ("half", half), ("blocks", blocks)):
        assert file.data(file.tensors[name]).tobytes() == array.tobytes()


def test_version_2_and_nested_arrays(build: Any, tmp_path: Path) -> None:
    build.version = 2
    inner = struct.pack("<IQ2I", U32, 2, 7, 8)
    build.add("nested", ARRAY, struct.pack("<IQ", ARRAY, 2) + inner + struct.pack("<IQ", STRING, 0))
    file = GGUFFile(build.write(tmp_path / "a"))
    assert file.version == 2
    nested: Any = file.metadata["nested"]
    first, second = nested
    assert first.tolist() == [7, 8]
    assert second == []


def test_data_are_mapped_and_outlive_the_file(build: Any, tmp_path: Path) -> None:
    build.tensor("t", (1024, 64))
    build.data = np.arange(65536, dtype="<f4").tobytes()
    file = GGUFFile(build.write(tmp_path / "a"))
    tensor = file.tensors["t"]
    data = file.data(tensor)
    assert not data.flags.writeable
    assert data.base is not None
    file.release(tensor)
    del file
    np.testing.assert_array_equal(data.view("<f4"), np.arange(65536))


def check(path: Path, field: str, offset: int | None, message: str) -> ModelFileError:
    with pytest.raises(ModelFileError) as caught:
        GGUFFile(path)
    error = caught.value
    assert error.path == path
    assert error.field == field
    assert error.offset == offset
    assert message in str(error)
    assert str(path) in str(error)
    assert offset is None or f"at byte {offset}" in str(error)
    return error


@pytest.mark.parametrize(
    ("content", "field", "offset", "message"),
    [
        (b"", "magic", 0, "is empty"),
        (b"GG", "magic", 0, "only 2 are left"),
        (b"GGML" + bytes(28), "magic", 0, "not a GGUF file"),
        (b"GGUF\0\0\0\3" + bytes(20), "version", 4, "big-endian"),
        (b"GGUF\1\0\0\0" + bytes(20), "version", 4, "version 1"),
        (b"GGUF\4\0\0\0" + bytes(20), "version", 4, "4 is not supported"),
        (b"GGUF\0\0\0\0" + bytes(20), "version", 4, "0 is not supported"),
        (b"GGUF\3\0\0\0\0\0", "tensor count", 8, "only 2 are left"),
    ],
)
def test_headers(tmp_path: Path, content: bytes, field: str, offset: int, message: str) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    check(path, field, offset, message)


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(ModelFileError, match=str(path)):
            GGUFFile(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this platform")
def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelFileError, match="not a regular file"):
        GGUFFile(tmp_path / "pipe")


HUGE = 2**62


def test_huge_counts(build: Any, tmp_path: Path) -> None:
    tracemalloc.start()
    build.add("key", U32, struct.pack("<I", 1)).tensor("t", (32,))
    build.data = bytes(128)
    build.counts = (HUGE, 1)
    check(build.write(tmp_path / "a"), "tensor count", 8, "is impossible")
    build.counts = (1, HUGE)
    check(build.write(tmp_path / "b"), "metadata count", 16, "is impossible")
    build.counts = (1, 3)
    with pytest.raises(ModelFileError):
        GGUFFile(build.write(tmp_path / "c"))
    assert tracemalloc.get_traced_memory()[1] < 5e6
    tracemalloc.stop()


@pytest.mark.parametrize("kind", [U8, U32, STRING, ARRAY, U64])
@pytest.mark.parametrize("count", [HUGE, 2**64 - 1, 1000])
def test_huge_arrays(build: Any, tmp_path: Path, kind: int, count: int) -> None:
    build.add("key", ARRAY, struct.pack("<IQ", kind, count) + bytes(64))
    tracemalloc.start()
    check(build.write(tmp_path / "a"), "metadata 'key' array length", 24 + 8 + 3 + 4 + 4, "is impossible")
    assert tracemalloc.get_traced_memory()[1] < 5e6
    tracemalloc.stop()


def test_huge_strings(build: Any, tmp_path: Path) -> None:
    build.add("key", STRING, struct.pack("<Q", 2**63) + b"abc")
    check(build.write(tmp_path / "a"), "metadata 'key' length", 39, "is impossible")


def test_huge_string_in_an_array(build: Any, tmp_path: Path) -> None:
    words = build.string("ok") + struct.pack("<Q", 2**64 - 1) + bytes(100)
    build.add("key", ARRAY, struct.pack("<IQ", STRING, 5) + words)
    check(build.write(tmp_path / "a"), "metadata 'key'[1] length", 39 + 12 + 10, "is impossible")


def test_text_that_is_not_utf8(build: Any, tmp_path: Path) -> None:
    build.add("key", STRING, build.string(b"ab\xff"))
    check(build.write(tmp_path / "a"), "metadata 'key'", 39 + 8 + 2, "not valid UTF-8")


def test_array_text_that_is_not_utf8(build: Any, tmp_path: Path) -> None:
    build.add("key", ARRAY, struct.pack("<IQ", STRING, 2) + build.string("ok") + build.string(b"\xc3("))
    check(build.write(tmp_path / "a"), "metadata 'key'[1]", 39 + 12 + 10 + 8, "not valid UTF-8")


@pytest.mark.parametrize("piece", [0, 7, 8, 9, 64, 1000, 1 << 18])
def test_arrays_of_strings(build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """Strings of any length, with NULs, and such that look like lengths, whatever is read at a time."""
    monkeypatch.setattr(cursor, "PIECE", piece)
    monkeypatch.setattr(cursor, "MAX_ODD", 3)
    letters = "abc\0\u0120\u65e5\U0001f600"
    odd = ["", "\0", "\1" + "\0" * 7 + "a", "\0" * 8, "x" * 255, "x" * 256, "\u0120" * 128, "y" * 70_000]
    arrays = []
    for often in (0.0, 0.01, 0.5, 1.0):
        strings = [
            random.choice(odd) if random.random() < often else "".join(random.choices(letters[:3] + letters[4:], k=n))
            for n in (random.randrange(20) for _ in range(random.randrange(1, 300)))
        ]
        arrays.append(strings)
    arrays.append(["".join(random.choices(letters, k=random.randrange(1, 9))) for _ in range(300)])
    for i, strings in enumerate(arrays):
        value = struct.pack("<IQ", STRING, len(strings)) + b"".join(map(build.string, strings))
        build.add(f"strings{i}", ARRAY, value).add(f"after{i}", U32, struct.pack("<I", i))
    metadata = GGUFFile(build.write(tmp_path / "a")).metadata
    for i, strings in enumerate(arrays):
        assert metadata[f"strings{i}"] == strings
        assert metadata[f"after{i}"] == i


def test_keys(build: Any, tmp_path: Path) -> None:
    check(build.add(b"\xff", U8, b"\0").write(tmp_path / "a"), "metadata key 0", 32, "not valid UTF-8")
    build.metadata = []
    check(build.add("", U8, bytes(9)).write(tmp_path / "b"), "metadata key 0", 24, "0 bytes")
    build.metadata = []
    check(build.add("k" * 65536, U8, b"\0").write(tmp_path / "c"), "metadata key 0", 24, "65536 bytes")


def test_a_key_that_occurs_twice(build: Any, tmp_path: Path) -> None:
    build.add("key", U8, b"\1").add("key", U8, b"\1")
    check(build.write(tmp_path / "a"), "metadata 'key'", 24 + 16, "occurs twice")


def test_unknown_value_types(build: Any, tmp_path: Path) -> None:
    check(
        build.add("key", 13, bytes(8)).write(tmp_path / "a"),
        "metadata 'key' type",
        35,
        "13 is not a metadata value type",
    )
    build.metadata = []
    build.add("key", ARRAY, struct.pack("<IQ", 99, 0))
    check(build.write(tmp_path / "b"), "metadata 'key' element type", 39, "99 is not a metadata value type")


def test_a_bool_that_is_neither(build: Any, tmp_path: Path) -> None:
    check(build.add("key", BOOL, b"\2").write(tmp_path / "a"), "metadata 'key'", 39, "neither true")


def test_arrays_nested_without_end(build: Any, tmp_path: Path) -> None:
    # Each array says it holds one array: as deep as the file is long, or as a cycle would read.
    build.add("key", ARRAY, struct.pack("<IQ", ARRAY, 1) * 100_000)
    with pytest.raises(ModelFileError, match="nested more than 4 deep") as caught:
        GGUFFile(build.write(tmp_path / "a"))
    assert caught.value.offset == 39 + 4 * 12


@pytest.mark.parametrize("alignment", [struct.pack("<I", n) for n in (0, 3, 4, 24, 2**32 - 1)])
def test_bad_alignment(build: Any, tmp_path: Path, alignment: bytes) -> None:
    build.add("general.alignment", U32, alignment)
    check(build.write(tmp_path / "a"), "metadata 'general.alignment'", 53, "power of two")


def test_alignment_of_another_type(build: Any, tmp_path: Path) -> None:
    build.add("general.alignment", STRING, build.string("32"))
    check(build.write(tmp_path / "a"), "metadata 'general.alignment'", 53, "power of two")


def test_larger_alignment(build: Any, tmp_path: Path) -> None:
    build.add("general.alignment", U32, struct.pack("<I", 4096)).tensor("t", (4,))
    head = build.bytes()
    values = np.arange(4, dtype="<f4")
    (tmp_path / "a").write_bytes(head + bytes(4096 - len(head)) + values.tobytes())
    file = GGUFFile(tmp_path / "a")
    assert file.tensors["t"].offset == 4096
    np.testing.assert_array_equal(file.data(file.tensors["t"]).view("<f4"), values)


TENSOR = 24  # where the first tensor's entry begins without metadata


def test_tensor_names(build: Any, tmp_path: Path) -> None:
    build.tensor("", (8,))
    build.data = bytes(64)
    check(build.write(tmp_path / "a"), "tensor 0 name", TENSOR, "0 bytes")
    build.tensors = []
    build.tensor("t", (8,)).tensor("t", (8,), offset=32)
    check(build.write(tmp_path / "b"), "tensor 't'", TENSOR + 9 + 4 + 8 + 4 + 8, "occurs twice")


def test_too_many_dimensions(build: Any, tmp_path: Path) -> None:
    build.tensor("t", (1, 1, 1, 1, 1))
    build.data = bytes(64)
    check(build.write(tmp_path / "a"), "tensor 't' dimensions", TENSOR + 9, "has 5")


@pytest.mark.parametrize("dims", [(0,), (4, 0), (2**63, 4), (2**32, 2**31), (2**64 - 1, 2**64 - 1)])
def test_impossible_shapes(build: Any, tmp_path: Path, dims: tuple[int, ...]) -> None:
    build.tensor("t", dims)
    check(build.write(tmp_path / "a"), "tensor 't' shape", TENSOR + 9 + 4, "no elements or too many")


def test_rows_that_are_no_whole_blocks(build: Any, tmp_path: Path) -> None:
    build.tensor("t", (33, 4), GGMLType.Q8_0)
    build.data = bytes(4096)
    check(build.write(tmp_path / "a"), "tensor 't' shape", TENSOR + 9 + 4, "multiple of 32")


@pytest.mark.parametrize("number", [4, 37, 2**32 - 1])
def test_unknown_tensor_types(build: Any, tmp_path: Path, number: int) -> None:
    build.tensor("t", (8,), number)
    check(build.write(tmp_path / "a"), "tensor 't' type", TENSOR + 9 + 4 + 8, f"{number} is not a tensor type")


OFFSET = TENSOR + 9 + 4 + 8 + 4


@pytest.mark.parametrize("offset", [64, 2**40, 2**64 - 32])
def test_offsets_past_the_end(build: Any, tmp_path: Path, offset: int) -> None:
    build.tensor("t", (8,), offset=offset)
    build.data = bytes(64)
    check(build.write(tmp_path / "a"), "tensor 't' offset", OFFSET, "past the end of the file")


def test_data_that_end_past_the_file(build: Any, tmp_path: Path) -> None:
    build.tensor("t", (2**40,))
    build.data = bytes(64)
    check(build.write(tmp_path / "a"), "tensor 't' offset", OFFSET, "past the end of the file")


def test_unaligned_offsets(build: Any, tmp_path: Path) -> None:
    build.tensor("t", (8,), offset=8)
    build.data = bytes(64)
    check(build.write(tmp_path / "a"), "tensor 't' offset", OFFSET, "alignment 32")


def test_overlapping_tensors(build: Any, tmp_path: Path) -> None:
    build.tensor("a", (8,), offset=32).tensor("b", (16,), offset=0)
    build.data = bytes(64)
    check(build.write(tmp_path / "a"), "tensor 'a' offset", OFFSET, "overlaps that of tensor 'b'")


def test_truncated_anywhere(build: Any, tmp_path: Path) -> None:
    """Every proper prefix of a file is refused, each with an offset inside of it."""
    build.add("a", STRING, build.string("text")).add("b", ARRAY, struct.pack("<IQ", STRING, 1) + build.string("x"))
    build.add("c", ARRAY, struct.pack("<IQ3f", F32, 3, 1, 2, 3)).tensor("t", (8, 2), 1).tensor("u", (4,), 0, 32)
    build.data = bytes(48)
    whole = build.bytes()
    (tmp_path / "whole").write_bytes(whole)
    assert GGUFFile(tmp_path / "whole").tensors["u"].nbytes == 16
    for size in range(len(whole)):
        (tmp_path / "part").write_bytes(whole[:size])
        with pytest.raises(ModelFileError) as caught:
            GGUFFile(tmp_path / "part")
        assert caught.value.field is not None
        assert caught.value.offset is not None
        assert caught.value.offset <= size


@pytest.mark.parametrize(("kind", "count", "element"), [(8, 40_000, bytes(8)), (9, 100_000, bytes(12))])
def test_arrays_that_would_take_for_ever(tmp_path: Path, kind: int, count: int, element: bytes) -> None:
    """Empty strings, of which one was found at a time, and arrays in an array, which take 40 times the file's size."""
    head = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, kind, count)
    (tmp_path / "x.gguf").write_bytes(head + element * count)
    began = time.process_time()
    if kind == 8:
        assert GGUFFile(tmp_path / "x.gguf").metadata["k"] == [""] * count
    else:
        with pytest.raises(ModelFileError, match="100000 nested arrays"):
            GGUFFile(tmp_path / "x.gguf")
    assert time.process_time() - began < 5
