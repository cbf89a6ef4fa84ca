"""Reads the values of a GGUF file in sequence, and checks every count against the bytes left."""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from bitnet.core.errors import ModelFileError, brief
from bitnet.core.gguf.types import SCALARS, MetadataValue, ValueType
from bitnet.core.support.source import ByteSource

MAX_KEY = 65_535
"""Maximum bytes of a metadata key or tensor name, by the specification."""
MAX_NESTING = 4
"""Maximum depth of nested arrays; no known writer nests arrays at all."""
MAX_NESTED = 1 << 16
"""Maximum nested arrays in a file: each takes 12 bytes of the file, but half a kilobyte and ten microseconds here."""
PIECE = 1 << 18
"""Bytes of a string array that are read together, so that temporaries fit the CPU's cache."""
MAX_ODD = 1000
"""Strings to read one by one after fewer short ones than this were found: the search costs as much as reading about a
hundred. Each further time in a row that few are found, twice as many are read before the next search."""

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class Cursor:
    """Reads values in sequence, never past the end.

    Attributes:
        data: The beginning of the file, as far as it has been read.
        end: Where the file ends.
        at: Offset of the next value.
        tensor: The tensor whose fields are read, if any. Errors name it.
        errors: What becomes of bytes that are not UTF-8: ``strict`` or ``replace``, as for ``bytes.decode``.
    """

    def __init__(self, source: ByteSource) -> None:
        self.source, self.path = source, source.path
        self.data = source.prefix(0)
        self.end = source.size
        self.at = 0
        self.tensor: str | None = None
        self.nested = 0
        self.errors = "strict"

    def fail(self, field: str, offset: int, message: str, *, hint: str | None = None) -> NoReturn:
        if self.tensor is not None:
            field = f"tensor {brief(self.tensor)} {field}".rstrip()
        raise ModelFileError(message, path=self.path, field=field, offset=offset, hint=hint)

    def take(self, size: int, field: str) -> int:
        """Move past ``size`` bytes; returns where they begin."""
        begin = self.at
        if size > self.end - begin:
            self.fail(
                field,
                begin,
                f"needs {size} bytes, but only {self.end - begin} are left in the file.",
                hint="The file is truncated or corrupt: download or convert it again.",
            )
        self.at = begin + size
        self._have(self.at)
        return begin

    def _have(self, end: int) -> None:
        """Have ``data`` reach until ``end``."""
        if end > len(self.data):
            self.data = self.source.prefix(end)

    def u32(self, field: str) -> int:
        return self.unpack(_U32, field)[0]

    def u64(self, field: str) -> int:
        return self.unpack(_U64, field)[0]

    def unpack(self, layout: struct.Struct, field: str) -> tuple[int, ...]:
        """Several numbers at once."""
        begin = self.take(layout.size, field)  # which may replace the data
        return layout.unpack_from(self.data, begin)

    def count(self, field: str, smallest: int) -> int:
        """A u64 count of items of at least ``smallest`` bytes each, which must fit into the rest of the file."""
        begin = self.at
        count = self.u64(field)
        if count * smallest > self.end - self.at:
            self.fail(field, begin, f"{count} is impossible: only {self.end - self.at} bytes are left in the file.")
        return count

    def string(self, field: str) -> str:
        begin = self.at
        size = self.count(f"{field} length", 1)
        first = self.take(size, field)
        raw = self.data[first : self.at]
        try:
            return raw.decode(errors=self.errors)
        except UnicodeDecodeError as error:
            self.fail(field, begin + 8 + error.start, "is not valid UTF-8.")

    def name(self, field: str) -> str:
        begin = self.at
        name = self.string(field)
        if not 0 < self.at - begin - 8 <= MAX_KEY:
            self.fail(field, begin, f"has {self.at - begin - 8} bytes; names have 1 to {MAX_KEY}.")
        return name

    def value_type(self, field: str) -> ValueType:
        begin = self.at
        number = self.u32(field)
        try:
            return ValueType(number)
        except ValueError:
            self.fail(field, begin, f"{number} is not a metadata value type.")

    def value(self, kind: ValueType, field: str, depth: int = 0) -> MetadataValue:
        if kind is ValueType.STRING:
            return self.string(field)
        if kind is ValueType.ARRAY:
            return self._array(field, depth + 1)
        return self._numbers(kind, 1, field)[0].item()  # type: ignore[no-any-return]

    def _array(self, field: str, depth: int) -> MetadataValue:
        if depth > MAX_NESTING:
            self.fail(field, self.at, f"arrays are nested more than {MAX_NESTING} deep.")
        kind = self.value_type(f"{field} element type")
        smallest = {ValueType.STRING: 8, ValueType.ARRAY: 12}.get(kind) or SCALARS[kind].itemsize
        count = self.count(f"{field} array length", smallest)
        if kind is ValueType.STRING:
            return self._strings(count, field)
        if kind is ValueType.ARRAY:
            self.nested += count
            if self.nested > MAX_NESTED:
                self.fail(field, self.at, f"there are {self.nested} nested arrays; the limit is {MAX_NESTED}.")
            return [self._array(f"{field}[{i}]", depth + 1) for i in range(count)]
        return self._numbers(kind, count, field)

    def _numbers(self, kind: ValueType, count: int, field: str) -> npt.NDArray[Any]:
        dtype = SCALARS[kind]
        begin = self.take(count * dtype.itemsize, field)
        if kind is ValueType.BOOL:
            wrong = np.flatnonzero(np.frombuffer(self.data, np.uint8, count, begin) > 1)
            if wrong.size:
                self.fail(field, begin + int(wrong[0]), "is neither true (1) nor false (0).")
        return np.frombuffer(self.data, dtype, count, begin)

    def _strings(self, count: int, field: str) -> list[str]:
        # A vocabulary has hundreds of thousands of strings, nearly all of them short.
        out: list[str] = []
        odd = MAX_ODD
        while len(out) < count:
            found = self._short_strings(count - len(out))
            out += found
            if len(found) < MAX_ODD:
                out += self._any_strings(min(count - len(out), odd), field, len(out))
                odd *= 2
            else:
                odd = MAX_ODD
        return out

    def _short_strings(self, most: int) -> list[str]:
        """Consecutive short strings from here on, within one piece of the file. Empty if the first one is not simple.

        All places that look like a length below 256 are found at once; they are valid as long as each leads to the
        next.
        """
        end = min(self.at + PIECE, self.end)
        self._have(end)
        raw = self.data[self.at : end]
        if len(raw) < 8:
            return []
        text = np.frombuffer(raw, np.uint8).copy()
        zero = text == 0
        two = zero[:-1] & zero[1:]
        four = two[:-2] & two[2:]
        heads = np.flatnonzero((four[:-3] & four[3:])[1:])[:most]  # seven zeros follow
        ends = heads + 8 + text[heads]
        follows = np.concatenate(([0], ends[:-1])) == heads
        follows &= ends <= len(raw)
        if not len(follows) or not follows[0]:
            return []
        heads = heads[: len(heads) if follows.all() else int(follows.argmin())]
        size = int(ends[len(heads) - 1])
        text, zero = text[:size], zero[:size]
        text[heads], zero[heads] = 0, False  # of each length field one NUL remains, as separator
        if np.count_nonzero(zero) != 7 * len(heads):  # some strings contain NULs
            return []
        try:
            found: list[str] = text[~zero].tobytes().decode().split("\0")[1:]
        except UnicodeDecodeError:
            return []
        self.at += size
        return found

    def _any_strings(self, count: int, field: str, index: int) -> list[str]:
        """Read ``count`` strings one by one, the first of them number ``index``."""
        unpack = _U64.unpack_from
        out: list[str] = []
        append = out.append
        while len(out) < count:
            data, at, end = self.data, self.at, len(self.data)
            with suppress(struct.error, UnicodeDecodeError):
                for _ in range(count - len(out)):
                    begin = at + 8
                    at = begin + unpack(data, at)[0]
                    if at > end:
                        break
                    append(data[begin:at].decode(errors=self.errors))
                    self.at = at
            if len(out) < count:  # an error, which is raised here, or the end of what has been read of the file
                append(self.string(f"{field}[{index + len(out)}]"))
        return out
