"""A bounded reader of one GGUF file, version 2 or 3, mapped or read in slices.

The file is not trusted: every count is checked against the bytes left before anything is allocated, and every violation
is a :class:`~bitnet.core.errors.ModelFileError` with the file, the field and its offset.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from bitnet.core.errors import ModelFileError, brief
from bitnet.core.gguf.cursor import Cursor
from bitnet.core.gguf.types import (
    ALIGNMENT,
    MAGIC,
    MAX_DIMS,
    GGMLType,
    MetadataValue,
    ValueType,
    tensor_bytes,
)
from bitnet.core.support.source import ByteSource

MAX_ENTRIES = 1 << 16
"""Maximum metadata keys, and maximum tensors: each takes at least 15 bytes of the file, but several microseconds and
half a kilobyte here. Models have dozens of keys and hundreds of tensors."""
PROSE = ("general.name", "general.author", "general.organization", "general.description", "general.license",
         "general.tags", "general.base_model.", "general.dataset", "general.source.", "general.quantized_by",
         "general.basename", "general.finetune", "general.version", "general.url", "general.doi")  # fmt: skip
"""Beginnings of keys whose text only people read: bytes in it that are not UTF-8 are replaced."""
SHARED = (GGMLType.Q2_0, GGMLType.Q2_0_G128, GGMLType.STQ1_0)
"""Types that share the number 42 in files."""
MIN_METADATA_ENTRY = 8 + 1 + 4 + 1
MIN_TENSOR_ENTRY = 8 + 1 + 4 + 4 + 8
SHAPES = [struct.Struct(f"<{dims}Q") for dims in range(MAX_DIMS + 1)]
"""The layout of a shape of so many dimensions."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The location, shape and type of a tensor.

    Attributes:
        shape: Rows first, as in numpy (files store the reverse).
        offset: Byte offset of the data in the file.
        nbytes: Bytes of data, without padding.
        entry: Byte offset in the file of the entry that describes the tensor.
        part: Number of the file among the parts of its model.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset: int
    nbytes: int
    entry: int
    part: int = 0


class Part:
    """One file, open for as long as this object or a view of its data lives.

    Args:
        file: The file.
        number: Its number among the parts of the model, from 0 on.

    Attributes:
        file: The file.
        path: Its path, for errors.
        version: 2 or 3.
        metadata: All keys with their values.
        kinds: The type of each key's value.
        metadata_end: The byte of the file behind the metadata.
        tensors: Every tensor by name, in file order.

    Raises:
        ModelFileError: The file cannot be opened, or violates the format.
    """

    def __init__(self, file: ByteSource, number: int = 0) -> None:
        self.file, self.path, self.number = file, file.path, number
        try:
            self._read()
        finally:  # if the file has changed meanwhile, report that instead
            self.file.check()

    def _read(self) -> None:
        cursor = Cursor(self.file)
        self.version, tensor_count, metadata_count = _header(cursor)
        self._key_offsets: dict[str, int] = {}
        self.kinds: dict[str, ValueType] = {}
        self.metadata: dict[str, MetadataValue] = {}
        for i in range(metadata_count):
            self._read_metadata(cursor, i)
        self.metadata_end = cursor.at
        alignment = self._alignment()
        entries = [_tensor_entry(cursor, i) for i in range(tensor_count)]
        start = -(-cursor.at // alignment) * alignment
        entries = _distinct(entries, self.file.size - start, alignment)
        self.tensors: Mapping[str, TensorInfo] = self._place(cursor, entries, start, alignment)

    def error(
        self, message: str, *, key: str | None = None, tensor: str | None = None, hint: str | None = None
    ) -> ModelFileError:
        """Make an error about a metadata value or a tensor, with its offset in the file."""
        if tensor is not None:
            info = self.tensors.get(tensor)
            return ModelFileError(
                message, path=self.path, field=f"tensor {brief(tensor)}", offset=info.entry if info else None, hint=hint
            )
        field = None if key is None else f"metadata {brief(key)}"
        return ModelFileError(
            message, path=self.path, field=field, offset=self._key_offsets.get(key) if key else None, hint=hint
        )

    def _read_metadata(self, cursor: Cursor, index: int) -> None:
        begin = cursor.at
        key = cursor.name(f"metadata key {index}")
        field = f"metadata {brief(key)}"
        if key in self.metadata:
            cursor.fail(field, begin, "this key occurs twice.")
        kind = cursor.value_type(f"{field} type")
        self._key_offsets[key], self.kinds[key] = cursor.at, kind
        cursor.errors = "replace" if key.startswith(PROSE) else "strict"
        self.metadata[key] = cursor.value(kind, field)
        cursor.errors = "strict"

    def _alignment(self) -> int:
        key = "general.alignment"
        value = self.metadata.get(key, ALIGNMENT)
        if type(value) is not int or value < 8 or value & (value - 1):
            raise self.error(f"is {brief(value)}; it must be a power of two and at least 8.", key=key)
        return value

    def _place(self, cursor: Cursor, entries: list[_Entry], start: int, alignment: int) -> Mapping[str, TensorInfo]:
        size = self.file.size
        tensors: dict[str, TensorInfo] = {}
        for e in entries:
            cursor.tensor = e.name
            if e.name in tensors:
                cursor.fail("", e.begin, "this name occurs twice.")
            if e.offset % alignment:
                cursor.fail("offset", e.offset_at, f"{e.offset} is not a multiple of the alignment {alignment}.")
            if start + e.offset + e.nbytes > size:
                cursor.fail(
                    "offset",
                    e.offset_at,
                    f"its {e.nbytes} bytes at {start + e.offset} end past the end of the file ({size} bytes).",
                    hint="The file is truncated or corrupt: download or convert it again.",
                )
            tensors[e.name] = TensorInfo(e.name, e.shape, e.type, start + e.offset, e.nbytes, e.begin, self.number)
        last: _Entry | None = None
        for e in sorted(entries, key=lambda e: e.offset):
            if last is not None and e.offset < last.offset + last.nbytes:
                cursor.tensor = e.name
                cursor.fail("offset", e.offset_at, f"its data overlaps that of tensor {brief(last.name)}.")
            last = e
        return tensors


class _Entry(NamedTuple):
    """A tensor's entry in the file; ``offset`` counts from the start of the tensor data."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset: int
    nbytes: int
    begin: int
    offset_at: int


def _header(cursor: Cursor) -> tuple[int, int, int]:
    """Read the version, the number of tensors and the number of metadata entries."""
    begin = cursor.take(4, "magic")
    magic = cursor.data[begin : begin + 4]
    if magic != MAGIC:
        cursor.fail("magic", begin, f"is {magic!r}, not {MAGIC!r}: this is not a GGUF file.")
    begin = cursor.at
    version = cursor.u32("version")
    if version and version & 0xFFFF == 0:
        cursor.fail(
            "version",
            begin,
            "the file is big-endian, which is not supported.",
            hint="Convert the model again on a little-endian machine.",
        )
    if version == 1:
        cursor.fail(
            "version",
            begin,
            "version 1 is not supported.",
            hint="Convert the model again; converters have written version 2 or 3 since 2023.",
        )
    if version not in (2, 3):
        cursor.fail("version", begin, f"{version} is not supported; supported are 2 and 3.")
    return (
        version,
        _entries(cursor, "tensor count", MIN_TENSOR_ENTRY),
        _entries(cursor, "metadata count", MIN_METADATA_ENTRY),
    )


def _entries(cursor: Cursor, field: str, smallest: int) -> int:
    begin = cursor.at
    count = cursor.count(field, smallest)
    if count > MAX_ENTRIES:
        cursor.fail(field, begin, f"is {count}; the limit is {MAX_ENTRIES}.")
    return count


def _tensor_entry(cursor: Cursor, index: int) -> _Entry:
    begin = cursor.at
    cursor.tensor = None
    name = cursor.tensor = cursor.name(f"tensor {index} name")
    at = cursor.at
    dims = cursor.u32("dimensions")
    if dims > MAX_DIMS:
        cursor.fail("dimensions", at, f"has {dims}; the limit is {MAX_DIMS}.")
    shape_at = cursor.at
    shape = cursor.unpack(SHAPES[dims], "shape")[::-1]
    if 0 in shape or prod(shape) >= 2**63:
        cursor.fail("shape", shape_at, f"{shape} has no elements or too many.")
    at = cursor.at
    number = cursor.u32("type")
    try:
        dtype = GGMLType(number)  # numbers in files are not negative
    except ValueError:
        cursor.fail("type", at, f"{number} is not a tensor type that bitnet knows.")
    try:
        nbytes = tensor_bytes(dtype, shape)
    except ValueError as error:
        cursor.fail("shape", shape_at, f"{error}.")
    at = cursor.at
    return _Entry(name, shape, dtype, cursor.u64("offset"), nbytes, begin, at)


def _distinct(entries: list[_Entry], end: int, alignment: int) -> list[_Entry]:
    """The entries; those of type 42 get the type in :data:`SHARED` whose size matches the space of every such tensor.

    They stay Q2_0 if several types match, or none. ``end`` is the byte at which the last tensor's space ends.
    """
    if all(e.type is not GGMLType.Q2_0 for e in entries):
        return entries
    ways = ([_retyped(e, dtype) if e.type is GGMLType.Q2_0 else e for e in entries] for dtype in SHARED)
    return next((way for way in ways if _fills(way, end, alignment)), entries)


def _retyped(entry: _Entry, dtype: GGMLType) -> _Entry:
    try:
        return entry._replace(type=dtype, nbytes=tensor_bytes(dtype, entry.shape))
    except ValueError:  # rows are not a whole number of its blocks
        return entry


def _fills(entries: list[_Entry], end: int, alignment: int) -> bool:
    """Whether each such tensor ends where the next one begins or the file ends, apart from padding."""
    ordered = sorted(entries, key=lambda e: e.offset)
    ends = [*(e.offset for e in ordered[1:]), end]
    return all(
        0 <= limit - e.offset - e.nbytes < alignment for e, limit in zip(ordered, ends, strict=True) if e.type in SHARED
    )
