"""Constraints decide which tokens a generation may choose next; they are told each token that was chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt


class Constraint(Protocol):
    """The tokens that one generation may choose. Each generation has a constraint of its own.

    If a method raises, the generation ends with the finish reason ``failed``; it never continues unconstrained.
    """

    def allowed(self) -> bytes | None:
        """One bit per token id, least significant bit of each byte first. 1: the token, possibly an end token, may come
        next. None: it is not known yet; this generation waits and asks again, while others go on."""
        ...

    def accept(self, token: int) -> None:
        """Called when ``token``, which is not an end token, was chosen."""
        ...


class LazyConstraint(Constraint, Protocol):
    """A constraint that holds from some point of the answer on, which it finds itself.

    While it waits, every token may come next, and ``watch`` is told the tokens that were chosen. It is known by that
    method.

    Attributes:
        waiting: Whether the next token may be any.
        watching: Whether it must see the next token before a further one is chosen, as that token may begin what it
            constrains.
    """

    waiting: bool
    watching: bool

    def watch(self, tokens: Sequence[int]) -> int:
        """Called with tokens that were chosen while it waits, none of them an end token.

        Takes them in up to the one with which it begins, and returns how many those are.
        """
        ...


MakesConstraint = Callable[[], Constraint]
"""Makes the constraint of one continuation."""


class ConstraintError(Exception):
    """A constraint allows no token."""


def masked(logits: npt.NDArray[np.float32], allowed: bytes) -> npt.NDArray[np.float32]:
    """``logits[V]`` with -inf at every token that is not allowed; ids beyond the end of the mask are not allowed.

    Raises:
        ConstraintError: No token is allowed.
        TypeError: The mask is not ``bytes``: an array of booleans would be read as an array of bits.
    """
    if not isinstance(allowed, bytes):
        raise TypeError(f"allowed() gave {type(allowed).__name__}; it must give bytes, one bit for each token id.")
    bits = np.unpackbits(np.frombuffer(allowed, np.uint8), count=min(len(logits), 8 * len(allowed)), bitorder="little")
    result = np.full_like(logits, -np.inf)
    chosen = np.flatnonzero(bits)
    result[chosen] = logits[chosen]
    if not np.isfinite(result[chosen]).any():
        raise ConstraintError("the constraint allows no token here.")
    return result
