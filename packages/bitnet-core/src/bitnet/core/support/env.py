"""The environment variables bitnet reads, each with its meaning, and how they are parsed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from bitnet.core.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable.

    Attributes:
        values: The values it takes, for help texts.
        meaning: Its effect, in a sentence.
        recorded: Whether receipts keep its value.
    """

    name: str
    values: str
    meaning: str
    recorded: bool = True


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "BITNET_DEVICE",
        "auto|cpu|gpu|BACKEND|DEVICE",
        "Device to run on: a backend (cuda), a device (cuda:1, a UUID) or a CPU level (cpu:avx2); --device goes first.",
    ),
    Variable(
        "BITNET_BACKEND_PRIORITY",
        "BACKEND,...",
        "Backends to prefer, first to last; the rest follow in the usual order.",
    ),
    Variable(
        "BITNET_STRICT_MODE",
        "1|0",
        "1: a GPU or device that was asked for and is missing is an error, and BITNET_GPU_FAKE is refused.",
    ),
    Variable(
        "BITNET_GPU_FAKE",
        "BACKEND,...|none",
        "For tests: pretend that these GPUs are there, computed by numpy, or that there are none.",
    ),
    Variable("BITNET_ROCM_GRAPHS", "1|0", "0: on ROCm, start kernels one by one; replay no HIP graphs."),
    Variable(
        "BITNET_DETERMINISTIC",
        "1|0",
        "1: a request's tokens depend on it alone, not on what else is computed, to the bit on one kind of device.",
    ),
    Variable("BITNET_THREADS", "N", "CPU threads; by default one for each physical core."),
    Variable("BITNET_CACHE_DIR", "FOLDER", "Where caches are kept, instead of the platform's cache folder."),
    Variable("BITNET_NO_KERNEL_CACHE", "1|0", "1: compile kernels anew, and keep none."),
    Variable("BITNET_RECEIPT_KEY", "FILE", "Private key that receipts are signed with.", recorded=False),
    Variable("BITNET_LOG", "debug|info|warning|error", "What is told on stderr."),
)
"""Every variable; ``bitnet --help`` prints them, and receipts keep most of those that are set."""

TRUE, _FALSE = {"1", "true", "yes", "on"}, {"", "0", "false", "no", "off"}


def text(name: str) -> str:
    """The value, without blanks around it; empty where it is not set."""
    return os.environ.get(name, "").strip()


def flag(name: str) -> bool:
    """The value as yes or no; no where it is not set.

    Raises:
        InvalidInputError: It is neither.
    """
    value = text(name).lower()
    if value in TRUE:
        return True
    if value in _FALSE:
        return False
    raise InvalidInputError(f"{name} is {value!r}; it must be 1 or 0.")


def names(name: str) -> tuple[str, ...]:
    """The value as names separated by commas, in lower case; empty ones are left out."""
    parts = (part.strip().lower() for part in text(name).split(","))
    return tuple(part for part in parts if part)


def snapshot() -> Mapping[str, str]:
    """The variables of :data:`VARIABLES` that are set and recorded; the rest of the environment may be secret."""
    return {v.name: os.environ[v.name] for v in VARIABLES if v.recorded and v.name in os.environ}
