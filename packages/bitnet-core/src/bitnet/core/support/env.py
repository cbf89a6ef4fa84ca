"""The environment variables that bitnet reads: their meanings and their parsing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from bitnet.core.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable.

    Attributes:
        values: Its possible values, for help texts.
        meaning: Its effect, in a sentence.
        recorded: Whether receipts record its value.
    """

    name: str
    values: str
    meaning: str
    recorded: bool = True


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "BITNET_DEVICE",
        "auto|cpu|gpu|BACKEND|DEVICE",
        "Device to run on: backend (cuda), device (cuda:1, a UUID) or CPU level (cpu:avx2); --device overrides it.",
    ),
    Variable(
        "BITNET_BACKEND_PRIORITY",
        "BACKEND,...",
        "Backends to prefer, first to last; the rest follow in the usual order.",
    ),
    Variable(
        "BITNET_STRICT_MODE",
        "1|0",
        "1: fail if the requested GPU or device is missing, and refuse BITNET_GPU_FAKE.",
    ),
    Variable(
        "BITNET_GPU_FAKE",
        "BACKEND,...|none",
        "For tests: pretend that these GPUs exist, computed by numpy, or that there are none.",
    ),
    Variable("BITNET_ROCM_GRAPHS", "1|0", "0: on ROCm, launch kernels one by one instead of replaying HIP graphs."),
    Variable(
        "BITNET_DETERMINISTIC",
        "1|0",
        "1: a request's tokens depend on it alone, not on what else runs; bit for bit on one kind of device.",
    ),
    Variable("BITNET_THREADS", "N", "CPU threads; by default one for each physical core."),
    Variable("BITNET_CACHE_DIR", "FOLDER", "Folder for caches, in place of the platform's cache folder."),
    Variable("BITNET_NO_KERNEL_CACHE", "1|0", "1: compile kernels each time, and cache none."),
    Variable("BITNET_RECEIPT_KEY", "FILE", "Private key that receipts are signed with.", recorded=False),
    Variable("BITNET_LOG", "debug|info|warning|error", "What is logged on stderr."),
)
"""Every variable. ``bitnet --help`` prints them; receipts record those that are set, except secrets."""

TRUE, _FALSE = {"1", "true", "yes", "on"}, {"", "0", "false", "no", "off"}


def text(name: str) -> str:
    """The value without surrounding blanks; empty if it is not set."""
    return os.environ.get(name, "").strip()


def flag(name: str) -> bool:
    """The value as a boolean; False if it is not set.

    Raises:
        InvalidInputError: The value is not a boolean.
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
    """The variables of :data:`VARIABLES` that are set and may be recorded; others may be secret."""
    return {v.name: os.environ[v.name] for v in VARIABLES if v.recorded and v.name in os.environ}
