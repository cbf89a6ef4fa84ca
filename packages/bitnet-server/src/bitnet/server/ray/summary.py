"""What a replica's KV cache holds, as a set of hashes that is mirrored elsewhere by its changes.

Each version of the set has a number. A mirror asks for the changes since the number it has; if those are no longer
known, it gets the whole set. So a lost message costs one larger message, and an evicted block is never remembered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

MAX_HASHES = 1 << 16
"""Maximum hashes of a summary: 512 KiB, and a million tokens in blocks of 16."""
MAX_CHANGES = 64
"""Number of changes that a summary remembers."""


@dataclass(frozen=True, slots=True)
class Change:
    """How a set of hashes differs from an earlier version.

    Attributes:
        base: The version that it differs from; None: ``added`` is the whole set.
        version: The version with the change.
    """

    base: int | None
    version: int
    added: frozenset[int]
    removed: frozenset[int] = frozenset()


class Summary:
    """A versioned set of hashes: the original, which :meth:`update` changes, or a mirror, which :meth:`apply` does."""

    def __init__(self) -> None:
        self.version = 0
        self.hashes: set[int] = set()
        self._changes: deque[Change] = deque(maxlen=MAX_CHANGES)

    def update(self, hashes: Sequence[int]) -> None:
        """Make these the set's hashes. Of more than :data:`MAX_HASHES`, the last ones are kept."""
        new = frozenset(hashes[-MAX_HASHES:])
        if new != self.hashes:
            self.apply(Change(self.version, self.version + 1, new - self.hashes, frozenset(self.hashes - new)))

    def since(self, version: int) -> Change:
        """The change from a version to the present one."""
        if version == self.version:
            return Change(version, version, frozenset())
        touched: set[int] = set()
        base: int | None = self.version
        for change in reversed(self._changes):
            if base is None or base <= version:
                break
            touched |= change.added | change.removed
            base = change.base
        if base != version:
            return Change(None, self.version, frozenset(self.hashes))
        return Change(version, self.version, frozenset(touched & self.hashes), frozenset(touched - self.hashes))

    def apply(self, change: Change) -> bool:
        """Take over a change; return False, and change nothing, if it is from a version that this one is not at."""
        if change.base is None:
            self.hashes = set(change.added)
            self._changes.clear()
        elif change.base != self.version:
            return False
        elif change.version != change.base:
            self.hashes -= change.removed
            self.hashes |= change.added
            self._changes.append(change)
        self.version = change.version
        return True


def short_hashes(digests: Iterable[bytes], model: int = 0) -> list[int]:
    """Digests of KV blocks, shortened to 64 bits: two different ones that are equal would only send a request to a
    replica that lacks its prefix.

    Args:
        model: :func:`model_hash` of one of several models: equal tokens are different blocks to each.
    """
    return [int.from_bytes(digest[:8], "little") ^ model for digest in digests]


def model_hash(name: str) -> int:
    """64 bits that stand for one of several models; not 0."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") or 1
