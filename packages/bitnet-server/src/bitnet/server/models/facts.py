"""What a model's file says about itself, whether or not it is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path

from bitnet.core.errors import BitNetError
from bitnet.core.gguf.split import part_paths
from bitnet.core.model.file import open_model

_SCALES = ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0))


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about one file.

    Attributes:
        architecture: As in its metadata.
        parameters: Number of weights.
        quantization: Type of most of its ternary matrices.
    """

    architecture: str
    parameters: int
    quantization: str


def parameter_size(parameters: int) -> str:
    """A number of weights as Ollama writes it: ``2.4B``."""
    for scale, unit, digits in _SCALES:
        if parameters >= scale:
            return f"{parameters / scale:.{digits}f}{unit}"
    return str(parameters)


def facts_of(path: Path) -> ModelFacts | None:
    """The facts about a file, read once for each state of it; None: it is no model any more. This is slow: call it
    outside the event loop."""
    try:
        return _facts(path, _state(path))
    except (BitNetError, OSError):
        return None


def digest_of(path: Path) -> str | None:
    """Hexadecimal SHA-256 of a model's file, computed once for each state of it; None as for :func:`facts_of`."""
    try:
        return _digest(path, _state(path))
    except (BitNetError, OSError):
        return None


def _state(path: Path) -> tuple[int, ...]:
    found = [part.stat() for part in part_paths(path)]
    return tuple(value for stat in found for value in (stat.st_size, stat.st_mtime_ns, stat.st_ino))


@lru_cache(maxsize=256)
def _facts(path: Path, state: tuple[int, ...]) -> ModelFacts:
    file = open_model(path)
    parameters = sum(prod(tensor.shape) for tensor in file.gguf.tensors.values())
    return ModelFacts(file.config.architecture, parameters, file.quantization)


@lru_cache(maxsize=256)
def _digest(path: Path, state: tuple[int, ...]) -> str:
    return open_model(path).sha256()
