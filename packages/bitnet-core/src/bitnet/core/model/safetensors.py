"""Reads safetensors checkpoints of one or more files, memory-mapped, with bounds on untrusted sizes.

The ``safetensors`` package does not support bfloat16 with numpy, and the format is simple: eight bytes with the length
of a JSON header, the header, the data (https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from bitnet.core.errors import ModelFileError, brief
from bitnet.core.support.garbage import no_collection
from bitnet.core.support.mapped import MappedFile

MAX_HEADER = 8 << 20
"""Maximum bytes of a header. The specification allows 100 MB, which would take seconds and gigabytes to parse. A tensor
needs about 120 bytes, and the models that bitnet runs have hundreds of tensors."""
MAX_JSON = 64 << 20
"""Maximum bytes of a JSON file; the largest are tokenizers of 33 MB."""
SIZES = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1, "I8": 1, "U32": 4}
"""Bytes per element of each type that occurs in ternary models."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a checkpoint: its type as safetensors names it, shape, and place in its file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: MappedFile
    offset: int
    nbytes: int

    def bytes(self) -> npt.NDArray[np.uint8]:
        """``uint8[nbytes]``, mapped."""
        return self.file.bytes(self.offset, self.nbytes)

    def release(self) -> None:
        """Release the mapped pages."""
        self.file.release(self.offset, self.nbytes)

    def error(self, message: str) -> ModelFileError:
        """Make an error about this tensor."""
        return ModelFileError(message, path=self.file.path, field=f"tensor {brief(self.name)}", offset=self.offset)


def read_json(path: Path, most: int = MAX_HEADER) -> dict[str, Any]:
    """The JSON object in a file of at most ``most`` bytes.

    Raises:
        ModelFileError: The file cannot be read or holds something else.
    """
    return _json_object(read_bytes(path, most), path, None)


def optional_json(path: Path) -> dict[str, Any]:
    """As :func:`read_json`; empty if there is no such file."""
    return read_json(path) if path.is_file() else {}


def read_bytes(path: Path, most: int) -> bytes:
    """The contents of a regular file of at most ``most`` bytes.

    Raises:
        ModelFileError: It is larger, not a regular file, or cannot be read.
    """
    file = MappedFile(path)
    if file.size > most:
        raise ModelFileError(f"has {file.size} bytes; the limit is {most}.", path=path)
    return file.map.read()  # after this call, Ctrl-C is handled; it would be lost while the file is being closed


def open_checkpoint(folder: Path) -> Mapping[str, Stored]:
    """Every tensor of the checkpoint in a folder.

    Raises:
        ModelFileError: There is none, or one of its files is broken.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(n, str) and Path(n).name == n for n in names.values()):
            raise ModelFileError("must map tensors to files in this folder.", path=index, field="weight_map")
        paths = [folder / name for name in sorted(set(names.values()))]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelFileError("holds no *.safetensors files.", path=folder)
    tensors: dict[str, Stored] = {}
    for path in paths:
        for name, tensor in _read_header(path).items():
            if name in tensors:
                raise tensor.error("occurs in two files.")
            tensors[name] = tensor
    return tensors


def _read_header(path: Path) -> dict[str, Stored]:
    file = MappedFile(path)
    length = int.from_bytes(file.map[:8], "little")
    start = 8 + length
    if file.size < 8 or length > MAX_HEADER or start > file.size:
        most = min(MAX_HEADER, max(file.size - 8, 0))
        raise ModelFileError(
            f"is {length} bytes; the limit is {most} in this file.", path=path, field="header length", offset=0
        )
    header = _json_object(file.map[8:start], path, 8)
    header.pop("__metadata__", None)
    return {name: _entry(name, entry, file, start) for name, entry in header.items()}


def _entry(name: str, entry: Any, file: MappedFile, start: int) -> Stored:
    def wrong(message: str) -> ModelFileError:
        return ModelFileError(message, path=file.path, field=f"tensor {brief(name)}", offset=8)

    if not isinstance(entry, dict):
        raise wrong("is not an object.")
    dtype, shape, place = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in SIZES:
        raise wrong(f"has the type {brief(dtype)}; supported are {', '.join(SIZES)}.")
    if not _naturals(shape) or len(shape) > 4:
        raise wrong(f"has the shape {brief(shape)}.")
    if not _naturals(place) or len(place) != 2 or not place[0] <= place[1] <= file.size - start:
        raise wrong(f"is at {brief(place)}, outside the file's data.")
    begin, end = place
    if prod(shape) * SIZES[dtype] != end - begin:
        raise wrong(f"has {end - begin} bytes; {dtype} {shape} needs {prod(shape) * SIZES[dtype]}.")
    return Stored(name, dtype, tuple(shape), file, start + begin, end - begin)


def _naturals(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _json_object(raw: bytes, path: Path, offset: int | None) -> dict[str, Any]:
    try:
        with no_collection():
            value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"is not valid JSON: {error}.", path=path, field="JSON", offset=offset) from error
    if not isinstance(value, dict):
        raise ModelFileError("is not a JSON object.", path=path, field="JSON", offset=offset)
    return value
