"""Constraints: which tokens a generation may choose next, asked before each one and told of it after."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt


class Constraint(Protocol):
    """What one generation may say; each generation has its own.

    Where a method raises, the generation ends with the finish reason ``failed``: it is never continued freely.
    """

    def allowed(self) -> bytes:
        """One bit for each token id, the least significant of a byte first; 1: it may come next, an end token too."""
        ...

    def accept(self, token: int) -> None:
        """``token``, no end token, was chosen."""
        ...


class ConstraintError(Exception):
    """A constraint allows no token."""


def masked(logits: npt.NDArray[np.float32], allowed: bytes) -> npt.NDArray[np.float32]:
    """``logits[V]`` with -inf at every token that is not allowed; ids beyond the mask are not.

    Raises:
        ConstraintError: None is left.
        TypeError: The mask is no ``bytes``: an array of booleans would be read as one of bits.
    """
    if not isinstance(allowed, bytes):
        raise TypeError(f"allowed() gave {type(allowed).__name__}; it must give bytes, one bit for each token id.")
    bits = np.unpackbits(np.frombuffer(allowed, np.uint8), count=min(len(logits), 8 * len(allowed)), bitorder="little")
    result = np.full_like(logits, -np.inf)
    chosen = np.flatnonzero(bits)
    result[chosen] = logits[chosen]
    if not np.isfinite(result[chosen]).any():
        raise ConstraintError("no token may come next.")
    return result
