"""Writes GGUF version 3, streamed and atomically."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from bitnet.core.errors import BitNetError, InvalidInputError, brief
from bitnet.core.gguf.types import (
    ALIGNMENT,
    MAGIC,
    MAX_DIMS,
    SCALARS,
    GGMLType,
    MetadataValue,
    ValueType,
    number_in_files,
    tensor_bytes,
)
from bitnet.core.support.files import free_space, replacing
from bitnet.core.support.units import size

MAX_ALIGNMENT = 1 << 20

Chunk: TypeAlias = "bytes | npt.NDArray[Any]"


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor to write.

    Attributes:
        shape: Rows first, as in numpy.
        data: Its bytes in the encoding of ``type``: an array, or a function that yields them piece by piece, for a
            tensor that should not be in memory whole.
    """

    shape: tuple[int, ...]
    type: GGMLType
    data: npt.NDArray[Any] | Callable[[], Iterable[Chunk]]


Tensor: TypeAlias = "npt.NDArray[Any] | TensorSource"


def write_gguf(
    path: str | Path,
    metadata: Mapping[str, MetadataValue],
    tensors: Mapping[str, Tensor],
    *,
    progress: Callable[[int, int], None] | None = None,
    check: Callable[[Path], None] | None = None,
) -> None:
    """Write a model file. On failure, an existing file at ``path`` stays untouched.

    Args:
        path: The file to write; an existing file is replaced.
        metadata: Python strings, booleans, integers (u32 where they fit, else i32, u64 or i64), floats (f32), numpy
            scalars and arrays (their own type), and lists of these (integers: i32 where all fit, else i64; an empty
            list is one of strings).
        tensors: f32 and f16 arrays as they are, and :class:`TensorSource` for every other type.
        progress: Called with the bytes of tensor data written and the total.
        check: Called with the finished file before it takes its name; an exception discards the file. Not called if
            ``path`` is a pipe.

    Raises:
        InvalidInputError: GGUF does not support the type of a value or an array, or the data does not fit its shape.
        BitNetError: The file cannot be written.
    """
    sources = {name: _source(name, tensor) for name, tensor in tensors.items()}
    if {GGMLType.Q2_0, GGMLType.Q2_0_G128} <= {source.type for source in sources.values()}:
        raise InvalidInputError("Q2_0 in groups of 64 and of 128 share a type number, so one file cannot hold both.")
    sizes = {name: _size(name, source) for name, source in sources.items()}
    head = [MAGIC, struct.pack("<IQQ", 3, len(sources), len(metadata))]
    for key, value in metadata.items():
        try:
            head += [_string(key), _value(key, value)]
        except UnicodeEncodeError as error:
            wrong = error.object[error.start]
            raise InvalidInputError(f"metadata {key!r}: {wrong!r} is not a Unicode character.") from None
    alignment = metadata.get("general.alignment", ALIGNMENT)
    alignment = int(alignment) if isinstance(alignment, np.integer) else alignment
    if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise InvalidInputError(f"general.alignment is {brief(alignment)}; it must be a power of two, 8 at least.")
    offset = 0
    for name, source in sources.items():
        dims = source.shape[::-1]
        head.append(
            _string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, number_in_files(source.type), offset)
        )
        offset += sizes[name] + -sizes[name] % alignment
    total, done = sum(sizes.values()), 0
    end = sum(map(len, head))
    _check_room(Path(path).resolve(), end + offset)
    with replacing(Path(path)) as file:
        file.write(b"".join(head))
        for name, source in sources.items():
            file.write(bytes(-end % alignment))
            written = 0
            for chunk in source.data() if callable(source.data) else (source.data,):
                raw = np.ascontiguousarray(chunk).data if isinstance(chunk, np.ndarray) else chunk
                file.write(raw)
                written += raw.nbytes if isinstance(raw, memoryview) else len(raw)
                if progress is not None:
                    progress(done + written, total)
            if written != sizes[name]:
                raise InvalidInputError(f"tensor {name!r} gave {written} bytes; its shape and type need {sizes[name]}.")
            end += -end % alignment + written
            done += written
        if check is not None and file.seekable():
            file.flush()
            check(Path(file.name))


def _check_room(path: Path, needed: int) -> None:
    """Refuse a file that its disk has no room for, before hours are spent on it."""
    if path.exists() and not path.is_file():
        return  # a pipe
    if needed > (free := free_space(path.parent)):
        raise BitNetError(f"{path} needs {size(needed)}; {size(free)} are free on its disk.")


def _source(name: str, tensor: Tensor) -> TensorSource:
    if isinstance(tensor, TensorSource):
        return tensor
    types = {np.dtype("f4"): GGMLType.F32, np.dtype("f2"): GGMLType.F16}
    dtype = types.get(tensor.dtype)
    if dtype is None:
        raise InvalidInputError(
            f"tensor {name!r} is an array of {tensor.dtype}; use a TensorSource for types other than f32 and f16."
        )
    return TensorSource(tensor.shape, dtype, tensor)


def _size(name: str, source: TensorSource) -> int:
    if len(source.shape) > MAX_DIMS or 0 in source.shape:
        raise InvalidInputError(
            f"tensor {name!r} has the shape {source.shape}; 1 to {MAX_DIMS} dimensions can be written."
        )
    try:
        return tensor_bytes(source.type, source.shape)
    except ValueError as error:
        raise InvalidInputError(f"tensor {name!r}: {error}.") from None


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


_INTEGERS = (
    (ValueType.UINT32, 0, 2**32),
    (ValueType.INT32, -(2**31), 2**31),
    (ValueType.UINT64, 0, 2**64),
    (ValueType.INT64, -(2**63), 2**63),
)
_NUMPY = {dtype: kind for kind, dtype in SCALARS.items()}


def _value(key: str, value: Any) -> bytes:
    """A metadata value, preceded by its type."""
    if isinstance(value, str):
        return struct.pack("<I", ValueType.STRING) + _string(value)
    if isinstance(value, (list, tuple, np.ndarray)):
        return struct.pack("<I", ValueType.ARRAY) + _array(key, value)
    kind = _kind(key, value)
    number = _f32(key, value) if kind is ValueType.FLOAT32 else np.array(value, SCALARS[kind])
    return struct.pack("<I", kind) + number.tobytes()


def _f32(key: str, values: Any) -> npt.NDArray[np.float32]:
    """A float, or an array of floats, as f32."""
    with np.errstate(over="ignore"):  # refused here
        numbers = np.array(values, np.float32)
    if (np.isinf(numbers) & np.isfinite(values)).any():
        raise InvalidInputError(f"metadata {key!r}: {brief(values)} is too large for f32; use numpy.float64.")
    return numbers


def _kind(key: str, value: Any) -> ValueType:
    if isinstance(value, bool):
        return ValueType.BOOL
    if isinstance(value, int):
        for kind, low, high in _INTEGERS:
            if low <= value < high:
                return kind
    elif isinstance(value, float) and not isinstance(value, np.generic):
        return ValueType.FLOAT32
    elif isinstance(value, np.generic) and value.dtype in _NUMPY:
        return _NUMPY[value.dtype]
    raise InvalidInputError(f"metadata {key!r}: {brief(value)} of type {type(value).__name__} has no GGUF form.")


def _array(key: str, values: list[Any] | tuple[Any, ...] | npt.NDArray[Any]) -> bytes:
    """Element type, length and elements."""
    if isinstance(values, np.ndarray):
        kind = _NUMPY.get(values.dtype.newbyteorder("<"))
        if kind is None or values.ndim != 1:
            raise InvalidInputError(f"metadata {key!r}: an array of {values.dtype}{values.shape} has no GGUF form.")
        return struct.pack("<IQ", kind, len(values)) + values.astype(SCALARS[kind]).tobytes()
    if all(
        isinstance(v, str) for v in values
    ):  # an empty list counts as strings, too; for other empty arrays use numpy's
        return struct.pack("<IQ", ValueType.STRING, len(values)) + b"".join(map(_string, values))
    if values and all(isinstance(v, (list, tuple, np.ndarray)) for v in values):
        return struct.pack("<IQ", ValueType.ARRAY, len(values)) + b"".join(_array(key, v) for v in values)
    types = {type(v) for v in values}
    if types == {int}:
        small = all(-(2**31) <= v < 2**31 for v in values)
        return _array(key, np.array(values, np.int32 if small else np.int64))
    if types in ({float}, {bool}):
        return _array(key, _f32(key, values) if types == {float} else np.array(values, np.bool_))
    raise InvalidInputError(f"metadata {key!r}: a list of {sorted(t.__name__ for t in types)} has no GGUF form.")
