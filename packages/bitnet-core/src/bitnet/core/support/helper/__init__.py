"""Helper processes for untrusted input, limited in time and memory, and for libraries that may crash."""

from bitnet.core.support.helper.process import Helper, HelperProcess
from bitnet.core.support.helper.program import (
    NO_PROCESSES,
    HelperEnded,
    HelperStartError,
    Limits,
    Program,
    described,
    possible,
)

__all__ = [
    "NO_PROCESSES",
    "Helper",
    "HelperEnded",
    "HelperProcess",
    "HelperStartError",
    "Limits",
    "Program",
    "described",
    "possible",
]
