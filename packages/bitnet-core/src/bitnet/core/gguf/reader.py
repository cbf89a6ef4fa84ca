"""A GGUF model: one file, or the parts of a split model."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bitnet.core.errors import ModelFileError, brief
from bitnet.core.gguf.part import MAX_ENTRIES, Part, TensorInfo
from bitnet.core.gguf.split import part_name
from bitnet.core.gguf.types import SCALARS, MetadataValue
from bitnet.core.support.mapped import open_file
from bitnet.core.support.source import ByteSource

NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
"""Keys of a split model: the number of a part, from 0 on, of all parts, and of all tensors."""


class GGUFFile:
    """A GGUF file, or all parts of a split model, open for as long as this object or a view of its data lives.

    Args:
        source: The file, which is mapped if this is a path; or the first part: the others are beside it.

    Attributes:
        path: The file, or the first part.
        size: Bytes of all parts.
        version: 2 or 3.
        metadata: All keys of the first part with their values; those of other parts only describe the split.
        tensors: Every tensor by name, in the order of the parts.

    Raises:
        ModelFileError: A file cannot be opened, violates the format, or is not the part that it should be.
    """

    def __init__(self, source: str | Path | ByteSource) -> None:
        first = Part(source if isinstance(source, ByteSource) else open_file(Path(source)))
        self.path = Path(first.path)
        self.version, self.metadata = first.version, first.metadata
        self._parts = [first, *_others(first)]
        self.size = sum(part.file.size for part in self._parts)
        self.tensors: dict[str, TensorInfo] = {}
        for part in self._parts:
            for name, tensor in part.tensors.items():
                if name in self.tensors:
                    raise part.error("is in an earlier part, too.", tensor=name)
                self.tensors[name] = tensor
            if len(self.tensors) > MAX_ENTRIES:
                raise part.error(f"has tensors beyond the limit of {MAX_ENTRIES}.")
        expected = first.metadata.get(TENSORS)
        if len(self._parts) > 1 and expected is not None and expected != len(self.tensors):
            raise first.error(f"is {expected}, but the parts have {len(self.tensors)} tensors.", key=TENSORS)

    def typed_metadata(self) -> dict[str, MetadataValue]:
        """The model's keys with their values, without those of a split; numbers are numpy scalars of the types they
        have in the file."""
        kinds = self._parts[0].kinds
        return {
            key: SCALARS[kinds[key]].type(value) if kinds[key] in SCALARS else value
            for key, value in self.metadata.items()
            if key not in (NUMBER, COUNT, TENSORS)
        }

    def metadata_digest(self) -> bytes:
        """SHA-256 of the bytes that :attr:`metadata` was read from.

        Raises:
            ModelFileError: The file has changed since it was opened.
        """
        first = self._parts[0]
        with memoryview(first.file.prefix(first.metadata_end)) as data, data[: first.metadata_end] as metadata:
            digest = hashlib.sha256(metadata).digest()
        first.file.check()
        return digest

    def data(self, tensor: TensorInfo, begin: int = 0, end: int | None = None) -> npt.NDArray[np.uint8]:
        """The tensor's bytes from ``begin`` to ``end``, ``uint8[end - begin]``: a read-only view of a mapping, or read
        from the file."""
        size = (tensor.nbytes if end is None else end) - begin
        return self._parts[tensor.part].file.bytes(tensor.offset + begin, size)

    def release(self, tensor: TensorInfo) -> None:
        """Release the tensor's mapped pages."""
        self._parts[tensor.part].file.release(tensor.offset, tensor.nbytes)

    @property
    def lost(self) -> bool:
        """Whether reads have hit missing pages."""
        return any(part.file.lost for part in self._parts)

    def check(self) -> None:
        """Check that no file has changed since it was opened.

        Raises:
            ModelFileError: One was cut short or written to.
        """
        for part in self._parts:
            part.file.check()

    @property
    def identity(self) -> tuple[int, ...]:
        """Values that differ between files, and before and after a write to the same file."""
        return tuple(value for part in self._parts for value in part.file.identity)

    def sha256(self) -> str:
        """Hexadecimal SHA-256 of the whole opened file; for a split model, of its parts one after another."""
        digest = hashlib.sha256()
        for part in self._parts:
            part.file.hash_into(digest)
        return digest.hexdigest()

    def error(
        self, message: str, *, key: str | None = None, tensor: str | None = None, hint: str | None = None
    ) -> ModelFileError:
        """Make an error about a metadata value or a tensor, with its file and offset."""
        info = self.tensors.get(tensor) if tensor is not None else None
        part = self._parts[0 if info is None else info.part]
        return part.error(message, key=key, tensor=tensor, hint=hint)


def _others(first: Part) -> list[Part]:
    """The parts after the first one, if the model is split."""
    count = first.metadata.get(COUNT, 0)
    if type(count) is not int or not 0 <= count < 100_000:
        raise first.error(f"is {brief(count)}; it must be a number of files.", key=COUNT)
    if count < 2:
        return []
    name, number = part_name(Path(first.path).name), first.metadata.get(NUMBER, 0)
    if type(number) is not int or number != 0:
        hint = "" if name is None else f"Name the first one, {name.at(1)}; the others are found beside it."
        raise first.error(f"says that this is part {_ordinal(number)} of {count}.", key=NUMBER, hint=hint or None)
    if name is None or name.number != 1 or name.parts != count:
        raise first.error(
            f"says that this is the first of {count} parts, so the file's name must end in -00001-of-{count:05d}.gguf.",
            key=COUNT,
            hint="Give all parts the names that they had: they are found by these.",
        )
    parts = []
    for i in range(1, count):
        file = first.file.beside(name.at(i + 1))
        if file is None:
            raise first.error(
                f"is the first of {count} parts, but {name.at(i + 1)} is not beside it.",
                hint="Put all parts into one folder; 'bitnet pull' downloads all of them.",
            )
        part = Part(file, i)
        found = part.metadata.get(NUMBER), part.metadata.get(COUNT)
        if any(type(value) is not int for value in found) or found != (i, count):
            raise part.error(
                f"says part {_ordinal(found[0])} of {brief(found[1])}; by its name it is {i + 1} of {count}."
            )
        parts.append(part)
    return parts


def _ordinal(number: object) -> str:
    """The number of a part, from 1 on."""
    return brief(number + 1 if isinstance(number, int) else number)
