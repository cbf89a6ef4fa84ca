"""Entries of a program's states: those of running sequences, and snapshots from which later prompts go on.

A snapshot is the state after a prefix that ends at a border of KV blocks, under the digest that the last of these
blocks has (:mod:`bitnet.core.engine.blocks`). A state cannot be cut back to fewer tokens, so a prompt can begin only
where there is a snapshot. A snapshot costs no copy: the sequence goes on in another entry.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

MAX_SNAPSHOTS = 64
"""Maximum entries for snapshots, besides those of running sequences, where memory allows."""


class StatePool:
    """Counts the entries of a program's states.

    A running sequence needs two at most: the one that it writes, and one that it reads, which may be a snapshot.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        # Lowest first, so that memory that a device commits on first touch stays uncommitted for as long as possible.
        self._free = list(range(size - 1, -1, -1))
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._read: set[int] = set()

    @property
    def sequences(self) -> int:
        """Maximum sequences that may run at the same time."""
        return self.size // 2

    @property
    def snapshots(self) -> int:
        return len(self._snapshots)

    def holds(self, digest: bytes) -> bool:
        """Whether there is a snapshot after this prefix. May be called from any thread."""
        return digest in self._snapshots

    def use(self, digest: bytes) -> int:
        """The entry of a snapshot, which stays until :meth:`next_step`."""
        entry = self._snapshots[digest]
        self._snapshots.move_to_end(digest)
        self._read.add(entry)
        return entry

    def allocate(self) -> int:
        """An entry for a sequence; if none is free, that of the snapshot used least recently, which is lost."""
        if self._free:
            return self._free.pop()
        digest = next(digest for digest, entry in self._snapshots.items() if entry not in self._read)
        return self._snapshots.pop(digest)

    def keep(self, entry: int, digest: bytes) -> None:
        """Make a sequence's entry a snapshot, or free it if there is one after the same prefix."""
        if self._snapshots.setdefault(digest, entry) != entry:
            self._free.append(entry)
        self._snapshots.move_to_end(digest)

    def drop(self, digest: bytes) -> None:
        """Forget a snapshot, if it is there and no sequence reads it."""
        if self._snapshots.get(digest, -1) not in self._read | {-1}:
            self._free.append(self._snapshots.pop(digest))

    def release(self, entry: int) -> None:
        """Free a sequence's entry."""
        self._free.append(entry)

    def next_step(self, read: Iterable[int]) -> None:
        """The steps planned so far have been run: snapshots may go, but for those that sequences are yet to read."""
        self._read = set(read)


@dataclass(slots=True)
class SequenceStates:
    """A running sequence's entries.

    Attributes:
        entry: The entry that it writes.
        source: The entry with its states before its next token: ``entry``, or a snapshot, or -1 for zeros.
        spare: The entry that a step with a draft writes; None: there is no such step.
        borders: Positions of its prompt after which a snapshot is wanted.
        last: Digest of the last snapshot that it left while decoding.
    """

    entry: int
    source: int = -1
    spare: int | None = None
    borders: frozenset[int] = field(default_factory=frozenset)
    last: bytes | None = None
