"""Reads the metadata keys of one architecture, with errors that name the key."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np

from bitnet.core.errors import ModelFileError, brief
from bitnet.core.gguf import GGUFFile


class Keys:
    """The keys of a file that begin with ``prefix``, such as ``qwen3``.

    Methods raise :class:`ModelFileError` for a value of another type or out of range, and for a missing one without a
    default.
    """

    def __init__(self, file: GGUFFile, prefix: str) -> None:
        self.file = file
        self.prefix = prefix

    def error(self, key: str, message: str) -> ModelFileError:
        return self.file.error(message, key=f"{self.prefix}.{key}")

    def raw(self, key: str) -> Any:
        """The value as the file has it, or None."""
        return self.file.metadata.get(f"{self.prefix}.{key}")

    def get(self, key: str) -> Any:
        """The value; if it is an array with one value per layer and all are equal, that value. Other arrays of numbers
        are refused."""
        value = self.raw(key)
        if not isinstance(value, np.ndarray):
            return value
        if not value.size or (value != value[0]).any():
            raise self.error(key, f"is {brief(value)}; an empty array and values that differ are not supported.")
        return value[0].item()

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None:
            value = default
        if type(value) is not int or not 0 < value < 2**31:
            raise self.error(key, "is missing." if value is None else f"is {brief(value)}, not a positive integer.")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None:
            value = default
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.error(key, "is missing." if value is None else f"is {brief(value)}, not a positive number.")
        return float(value)

    def choice(self, key: str, known: Collection[str]) -> str | None:
        value = self.get(key)
        if value is not None and not (isinstance(value, str) and value in known):
            raise self.error(key, f"{brief(value)} is not supported; supported are {', '.join(known)}.")
        return value
