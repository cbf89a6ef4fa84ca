"""Names of the parts of a split model: ``NAME-00001-of-00003.gguf``, as ``llama-gguf-split`` writes them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from bitnet.core.support.files import length

_PART = re.compile(r"(?P<begin>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<end>\.gguf)?", re.IGNORECASE | re.DOTALL)


class PartName(NamedTuple):
    """A part's name, taken apart.

    Attributes:
        begin: What precedes the numbers; all parts have it in common.
        number: 1 for the first part.
        end: The ending ``.gguf`` as it is written, or nothing.
    """

    begin: str
    number: int
    parts: int
    end: str

    def at(self, number: int) -> str:
        """The name of another part."""
        return f"{self.begin}-{number:05d}-of-{self.parts:05d}{self.end}"


def part_name(name: str) -> PartName | None:
    """The name of a part, with or without folder and ending, taken apart; None if it is not a part's name."""
    found = _PART.fullmatch(name)
    if found is None or not 1 <= int(found["number"]) <= int(found["count"]):
        return None
    return PartName(found["begin"], int(found["number"]), int(found["count"]), found["end"] or "")


def whole_name(name: str) -> str:
    """A model's name without the numbers of a part."""
    found = part_name(name)
    return name if found is None else found.begin + found.end


def part_paths(path: Path) -> list[Path]:
    """The file, or all parts of a split model, which are beside the first; empty if it is a later part."""
    name = part_name(path.name)
    if name is None:
        return [path]
    return [path.with_name(name.at(number + 1)) for number in range(name.parts)] if name.number == 1 else []


def model_bytes(path: Path) -> int:
    """Bytes of a model's file, or of all parts of a split model; those that are missing have none."""
    return sum(map(length, part_paths(path)))
