"""What a model's file says about itself, whether or not it is loaded."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path

from bitnet.core.errors import BitNetError
from bitnet.core.gguf.split import part_paths
from bitnet.core.model.config import ModelConfig
from bitnet.core.model.file import open_model

MAX_HASHED = 256 << 20
"""Maximum bytes of a file that is read to identify it."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SCALES = ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0))


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about one file.

    Attributes:
        architecture: As in its metadata.
        parameters: Number of weights.
        quantization: Type of most of its ternary matrices.
        template: Source of its chat template, if it has one.
    """

    architecture: str
    parameters: int
    quantization: str
    template: str | None
    config: ModelConfig


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
    """64 hexadecimal digits that identify a model's file; None as for :func:`facts_of`.

    They are its SHA-256, which the hub's cache knows, and which is computed once for each state of another file. A file
    of more than :data:`MAX_HASHED` bytes would take seconds: it is identified by its name, size and times.
    """
    try:
        state = _state(path)
        if _SHA256.fullmatch(blob := path.resolve().name):
            return blob
        if sum(part.stat().st_size for part in part_paths(path)) > MAX_HASHED:
            return hashlib.sha256(repr((path.name, state)).encode()).hexdigest()
        return _digest(path, state)
    except (BitNetError, OSError):
        return None


def _state(path: Path) -> tuple[int, ...]:
    found = [part.stat() for part in part_paths(path)]
    return tuple(value for stat in found for value in (stat.st_size, stat.st_mtime_ns, stat.st_ino))


@lru_cache(maxsize=256)
def _facts(path: Path, state: tuple[int, ...]) -> ModelFacts:
    file = open_model(path)
    parameters = sum(prod(tensor.shape) for tensor in file.gguf.tensors.values())
    template = file.metadata.get("tokenizer.chat_template")
    template = template if isinstance(template, str) and template.strip() else None
    return ModelFacts(file.config.architecture, parameters, file.quantization, template, file.config)


@lru_cache(maxsize=256)
def _digest(path: Path, state: tuple[int, ...]) -> str:
    return open_model(path).sha256()
