"""A family of bad inputs, and the entry points to test with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Door = Literal["inspect", "run", "convert", "encode"]
"""How input gets in: three commands, and a text long enough that the tokenizer builds all of its vocabulary."""

GGUF_DOORS: tuple[Door, ...] = ("inspect", "run", "convert", "encode")
FOLDER_DOORS: tuple[Door, ...] = ("convert",)


@dataclass(frozen=True)
class Family:
    """Input of a few kilobytes to about ten megabytes that is made to cost much.

    Attributes:
        make: Writes it below the given folder; returns the model file, or the model folder.
        refused: A part of the error that it ends in at every door; None: it opens, within the same bounds.
        doors: Where it is brought to.
        lenient: Doors at which it opens although the others refuse it.
    """

    name: str
    make: Callable[[Path], Path]
    refused: str | None
    doors: tuple[Door, ...] = GGUF_DOORS
    lenient: tuple[Door, ...] = ()
