"""The writer's files, read with the ``gguf`` package; failures leave nothing half-written."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from bitnet.core.errors import BitNetError, InvalidInputError
from bitnet.core.gguf import GGMLType, GGUFFile, TensorSource, i2s_bytes, write_gguf


def test_the_gguf_package_reads_it(tmp_path: Path) -> None:
    rng = np.random.default_rng()
    path = tmp_path / "a.gguf"
    metadata: dict[str, Any] = {
        "general.architecture": "bitnet",
        "int": 5,
        "negative": -5,
        "large": 2**40,
        "small": -(2**40),
        "float": 0.1,
        "double": np.float64(0.1),
        "byte": np.uint8(3),
        "yes": True,
        "text": "ternär 🙂",
        "words": ["", "a", "🙂"],
        "ints": [1, -2, 3],
        "wide": [2**40],
        "floats": np.arange(5, dtype=np.float32),
        "flags": [True, False],
    }
    matrix = rng.normal(size=(7, 5)).astype(np.float32)
    half = rng.normal(size=(3, 9)).astype(np.float16)

    def pieces() -> Iterator[np.ndarray]:
        blocks = gguf.quants.quantize(matrix[:1].repeat(256, 1)[:, :512], gguf.GGMLQuantizationType.Q8_0)
        yield blocks[:, :34]
        yield blocks[:, 34:]

    reported: list[tuple[int, int]] = []
    tensors: dict[str, Any] = {"matrix": matrix, "half": half, "blocks": TensorSource((1, 512), GGMLType.Q8_0, pieces)}
    write_gguf(path, metadata, tensors, progress=lambda done, total: reported.append((done, total)))
    reader = gguf.GGUFReader(path)
    for key, value in metadata.items():
        contents = reader.fields[key].contents()
        assert contents == pytest.approx(value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value)
    types = {key: [t.name for t in reader.fields[key].types] for key in metadata}
    assert types["int"] == ["UINT32"]
    assert types["negative"] == ["INT32"]
    assert types["large"] == ["UINT64"]
    assert types["small"] == ["INT64"]
    assert types["float"] == ["FLOAT32"]
    assert types["double"] == ["FLOAT64"]
    assert types["byte"] == ["UINT8"]
    assert types["ints"] == ["ARRAY", "INT32"]
    assert types["wide"] == ["ARRAY", "INT64"]
    got = {t.name: t for t in reader.tensors}
    np.testing.assert_array_equal(got["matrix"].data, matrix)
    np.testing.assert_array_equal(got["half"].data, half)
    assert got["blocks"].tensor_type.name == "Q8_0"
    assert got["blocks"].data.tobytes() == b"".join(piece.tobytes() for piece in pieces())
    total = matrix.nbytes + half.nbytes + 16 * 34
    assert reported[-1] == (total, total)


def test_round_trip_with_our_reader(tmp_path: Path) -> None:
    weights = np.random.default_rng().integers(-1, 2, (6, 128), dtype=np.int8)
    metadata: dict[str, Any] = {"general.alignment": 64, "nested": [[1, 2], ["x"]], "none": []}
    source = TensorSource(weights.shape, GGMLType.I2_S, i2s_bytes(weights, 0.5))
    write_gguf(tmp_path / "a", metadata, {"odd": np.ones(3, np.float32), "w": source})
    file = GGUFFile(tmp_path / "a")
    nested: Any = file.metadata["nested"]
    assert nested[0].tolist() == [1, 2]
    assert nested[1] == ["x"]
    assert file.metadata["none"] == []
    assert file.tensors["w"].offset % 64 == 0
    np.testing.assert_array_equal(file.data(file.tensors["w"]), i2s_bytes(weights, 0.5))


@pytest.mark.parametrize(
    "value", [None, 2**64, [1, "a"], {"a": 1}, np.ones((2, 2)), 1j, [object()], 1e300, [1.0, -1e39]]
)
def test_values_without_a_gguf_form(tmp_path: Path, value: object) -> None:
    with pytest.raises(InvalidInputError, match="'key'"):
        write_gguf(tmp_path / "a", {"key": value}, {})  # type: ignore[dict-item]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "tensor",
    [
        np.ones(3),
        np.ones((1, 1, 1, 1, 1), np.float32),
        np.ones((0, 3), np.float32),
        TensorSource((3,), GGMLType.Q8_0, np.ones(3, np.uint8)),
        TensorSource((4,), GGMLType.F32, np.ones(3, np.float32)),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, tensor: np.ndarray | TensorSource) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"before")
    with pytest.raises(InvalidInputError, match="'t'"):
        write_gguf(path, {}, {"t": tensor})
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("alignment", [0, 4, 24, 2**31, "32", 32.0])
def test_alignments_that_cannot_be(tmp_path: Path, alignment: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"general\.alignment"):
        write_gguf(tmp_path / "a", {"general.alignment": alignment}, {})
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_of_a_write_that_fails(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"before")

    def broken() -> Iterator[bytes]:
        yield bytes(64)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError):
        write_gguf(path, {}, {"t": TensorSource((32,), GGMLType.F32, broken)})
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BitNetError, match="cannot be written"):
        write_gguf(tmp_path / "absent" / "a", {}, {})


def test_a_file_that_its_disk_has_no_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes before the first byte is made, and an old file stays."""
    path = tmp_path / "m.gguf"
    path.write_bytes(b"old")
    asked = []

    def data() -> Iterator[bytes]:
        asked.append(1)
        yield b""

    source = TensorSource((1 << 20, 1 << 12), GGMLType.F16, data)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=8 << 30))
    with pytest.raises(BitNetError, match=r"m\.gguf needs 8\.59 GB; 8\.59 GB are free on its disk"):
        write_gguf(path, {}, {"t": source})
    assert (asked, path.read_bytes(), sorted(tmp_path.iterdir())) == ([], b"old", [path])
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=(8 << 30) + 100))
    with pytest.raises(InvalidInputError, match="gave 0 bytes"):
        write_gguf(path, {}, {"t": source})
