"""Split models: written by the ``gguf`` package, read as one; parts that are missing, mixed up or damaged."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from bitnet.core import load_model
from bitnet.core.errors import ModelFileError
from bitnet.core.gguf import GGUFFile, TensorSource, unpack_ternary, write_gguf
from bitnet.core.gguf.split import model_bytes, part_name, part_paths, whole_name
from bitnet.core.hal import TernaryWeight
from bitnet.core.model.convert import convert_model
from bitnet.core.model.default import default_model_path
from bitnet.core.model.file import open_model


def split(source: Path, target: Path, tensors: int) -> list[Path]:
    """A copy of a model in parts of so many tensors each, as the ``gguf`` package writes them."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture, split_max_tensors=tensors)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=sub)
    ours = GGUFFile(source)
    for tensor in reader.tensors:
        data = np.array(ours.data(ours.tensors[tensor.name]))
        shape = [*tensor.shape[:0:-1], len(data) // int(np.prod(tensor.shape[1:]))]
        writer.add_tensor(tensor.name, data.reshape(shape), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(target.parent.glob("*-of-*.gguf"))


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in this package with weights in F16, a type that the ``gguf`` package knows."""
    path = tmp_path_factory.mktemp("whole") / "demo.gguf"
    model = open_model(default_model_path())
    tensors: dict[str, Any] = {}
    for name, tensor in model.gguf.tensors.items():
        weight = model.weights.get(name.removesuffix(".weight"))
        tensors[name] = TensorSource(tensor.shape, tensor.type, model.gguf.data(tensor))
        if isinstance(weight, TernaryWeight):
            data = weight.load()
            tensors[name] = (unpack_ternary(data.codes, tensor.shape[1]) * data.scale).astype(np.float16)
    write_gguf(path, model.gguf.typed_metadata(), tensors)
    return path


@pytest.fixture(scope="session")
def made(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Its parts."""
    made = split(whole, tmp_path_factory.mktemp("parts") / "demo.gguf", 40)
    assert len(made) > 2
    return made


@pytest.fixture
def parts(made: list[Path], tmp_path: Path) -> list[Path]:
    """A copy of the parts, which may be damaged."""
    return [Path(shutil.copy(part, tmp_path)) for part in made]


def test_it_is_the_same_model(whole: Path, parts: list[Path]) -> None:
    one, several = GGUFFile(whole), GGUFFile(parts[0])
    assert list(several.tensors) == list(one.tensors)
    for name, tensor in one.tensors.items():
        assert several.data(several.tensors[name]).tobytes() == one.data(tensor).tobytes()
    assert several.size == sum(part.stat().st_size for part in parts)
    joined = hashlib.sha256(b"".join(part.read_bytes() for part in parts)).hexdigest()
    assert several.sha256() == joined
    with load_model(parts[0], device="cpu") as split_model, load_model(whole, device="cpu") as model:
        asked = "What is 17 + 25?"
        tokens = [one.generate(asked, max_tokens=24).tokens for one in (split_model, model)]
        assert tokens[0] == tokens[1]
        assert split_model.config.name == model.config.name


def test_a_model_takes_the_bytes_of_all_its_parts(whole: Path, parts: list[Path]) -> None:
    assert part_paths(parts[0]) == parts
    assert model_bytes(parts[0]) == GGUFFile(parts[0]).size > parts[0].stat().st_size
    assert (part_paths(parts[1]), model_bytes(parts[1])) == ([], 0)
    assert (part_paths(whole), model_bytes(whole)) == ([whole], whole.stat().st_size)
    assert model_bytes(whole.with_name("none.gguf")) == 0


def test_it_is_converted_to_one_file(whole: Path, parts: list[Path], tmp_path: Path) -> None:
    convert_model(parts[0], tmp_path / "one.gguf")
    convert_model(whole, tmp_path / "again.gguf")
    one = GGUFFile(tmp_path / "one.gguf")
    assert [key for key in one.metadata if key.startswith("split.")] == []
    again = GGUFFile(tmp_path / "again.gguf")
    assert {name: one.data(t).tobytes() for name, t in one.tensors.items()} == {
        name: again.data(t).tobytes() for name, t in again.tensors.items()
    }


def damage(parts: list[Path], how: str) -> Path:
    """Damage the parts; returns the file to open."""
    second = parts[1]
    if how == "removed":
        second.unlink()
    elif how == "cut short":
        os.truncate(second, second.stat().st_size - 100)
    elif how == "empty":
        os.truncate(second, 0)
    elif how == "another part":
        shutil.copy(parts[2], second)
    elif how == "the first part again":
        shutil.copy(parts[0], second)
    elif how == "a pointer":
        second.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    elif how == "a folder":
        second.unlink()
        second.mkdir()
    elif how == "renamed":
        return parts[0].rename(parts[0].with_name("demo.gguf"))
    elif how == "of another count":
        return parts[0].rename(parts[0].with_name("demo-00001-of-00009.gguf"))
    elif how == "the second named":
        return second
    return parts[0]


DAMAGES = {
    "removed": ("demo-00002-of-0000#.gguf is not beside it", "Put all parts into one folder"),
    "cut short": ("past the end of the file", "demo-00002-of-0000#.gguf"),
    "empty": ("is empty", "demo-00002-of-0000#.gguf"),
    "another part": ("says part 3 of #; by its name it is 2 of #", "demo-00002-of-0000#.gguf"),
    "the first part again": ("says part 1 of #; by its name it is 2 of #", "demo-00002-of-0000#.gguf"),
    "a pointer": ("is a Git LFS pointer", "git lfs pull"),
    "a folder": ("is a folder", "demo-00002-of-0000#.gguf"),
    "renamed": ("the file's name must end in -00001-of-0000#.gguf", "demo.gguf"),
    "of another count": ("the file's name must end in -00001-of-0000#.gguf", "demo-00001-of-00009.gguf"),
    "the second named": ("this is part 2 of #", "Name the first one, demo-00001-of-0000#.gguf"),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_parts_that_do_not_fit(parts: list[Path], how: str) -> None:
    with pytest.raises(ModelFileError) as raised:
        GGUFFile(damage(parts, how))
    for said in DAMAGES[how]:
        assert said.replace("#", str(len(parts))) in str(raised.value)


def crafted(folder: Path, change: Callable[[int, gguf.GGUFWriter], None]) -> Path:
    for number in range(2):
        path = folder / f"x-0000{number + 1}-of-00002.gguf"
        writer = gguf.GGUFWriter(path, "bitnet")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        writer.add_tensor(f"t{number}", np.zeros(8, np.float32))
        change(number, writer)
        for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
            step()
        writer.close()
    return folder / "x-00001-of-00002.gguf"


def test_counts_and_names_of_tensors(tmp_path: Path) -> None:
    assert list(GGUFFile(crafted(tmp_path, lambda number, writer: None)).tensors) == ["t0", "t1"]
    path = crafted(tmp_path, lambda number, writer: writer.add_tensor("twice", np.zeros(8, np.float32)))
    with pytest.raises(ModelFileError, match=r"x-00002-of-00002\.gguf.*'twice'.*is in an earlier part, too"):
        GGUFFile(path)
    path = crafted(tmp_path, lambda number, writer: writer.add_int32("split.tensors.count", 3))
    with pytest.raises(ModelFileError, match="is 3, but the parts have 2 tensors"):
        GGUFFile(path)


@pytest.mark.parametrize("count", [-1, 100_000, 2**31 - 1, 1.5, "2", [2]])
def test_a_count_that_is_none(tmp_path: Path, count: Any) -> None:
    path = tmp_path / "x-00001-of-00002.gguf"
    writer = gguf.GGUFWriter(path, "bitnet")
    writer.add_key_value("split.count", *_typed(count))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    with pytest.raises(ModelFileError, match="must be a number of files"):
        GGUFFile(path)


def _typed(value: Any) -> tuple[Any, ...]:
    kinds = gguf.GGUFValueType
    if isinstance(value, list):
        return value, kinds.ARRAY, kinds.INT32
    return value, {int: kinds.INT32, float: kinds.FLOAT32, str: kinds.STRING}[type(value)]


def test_names() -> None:
    part = part_name("sub/m-i2_s-00002-of-00012.gguf")
    assert part is not None
    assert (part.begin, part.number, part.parts, part.at(11)) == ("sub/m-i2_s", 2, 12, "sub/m-i2_s-00011-of-00012.gguf")
    for name in (
        "m.gguf",
        "m-0001-of-0002.gguf",
        "m-00000-of-00002.gguf",
        "m-00003-of-00002.gguf",
        "m-00001-of-00002.x",
    ):
        assert part_name(name) is None
    assert whole_name("m-00001-of-00002") == "m"
    assert whole_name("m") == "m"
