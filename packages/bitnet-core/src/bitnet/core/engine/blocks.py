"""The paged KV cache's bookkeeping: reference counts of blocks, and full blocks whose content can be shared.

A full block is identified by a digest of its tokens and of the block before it, so a chain of digests names a prefix
wherever it appears. An unreferenced block keeps its content and can be shared again until its memory is needed; the
least recently used one is evicted first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from bitnet.core.model.cache import most_blocks

UNUSED = 0
"""What a table names for a block that it no longer holds: any valid block, as no result depends on it."""
DIGEST_BYTES = 16


class BlockPool:
    """Counts the references to each of ``size`` blocks and remembers the contents of full ones."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._references = [0] * size
        self._digests: list[bytes | None] = [None] * size
        self._by_digest: dict[bytes, int] = {}
        # Lowest first, so that memory that a device commits on first touch stays uncommitted for as long as possible.
        self._empty = list(range(size - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Number of blocks that :meth:`allocate` can return, including idle ones with content."""
        return len(self._empty) + len(self._idle)

    @property
    def idle(self) -> int:
        """Number of unreferenced blocks whose content can still be shared."""
        return len(self._idle)

    def allocate(self) -> int:
        """A block with one reference and no content. The caller must check :attr:`available` first."""
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            digest = self._digests[block]
            assert digest is not None
            del self._by_digest[digest]
            self._digests[block] = None
        self._references[block] = 1
        return block

    def find(self, digest: bytes) -> int | None:
        """The block that holds the content named by ``digest``."""
        return self._by_digest.get(digest)

    def contents(self) -> list[bytes]:
        """The digests that :meth:`find` finds, those named last at the end. May be called from any thread."""
        names = list(self._by_digest)  # one step of the interpreter, so nothing changes meanwhile
        return [name for name in names if len(name) == DIGEST_BYTES]

    def share(self, block: int) -> None:
        """Add a reference to a block with content."""
        self._idle.pop(block, None)
        self._references[block] += 1

    def name(self, block: int, digest: bytes) -> None:
        """Record a full block's content. Of two blocks with the same content, only the first can be found."""
        if self._by_digest.setdefault(digest, block) == block:
            self._digests[block] = digest

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each block; those that become idle are reused in this order."""
        for block in blocks:
            if self._references[block] < 1:
                raise AssertionError(f"KV block {block} was released more often than it was referenced")
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._digests[block] is None:
                    self._empty.append(block)
                else:
                    self._idle[block] = None


class BlockTable:
    """The blocks of one sequence, in order of position.

    A sequence has several tables where layers attend to windows (:mod:`bitnet.core.model.cache`). Their blocks behind
    the window are released while the sequence runs.

    Args:
        windows: For each table, the positions that a token attends to, its own among them; None: all.
    """

    def __init__(self, pool: BlockPool, block_size: int, windows: Sequence[int | None] = (None,)) -> None:
        self._pool, self._block_size, self._windows = pool, block_size, windows
        self._digests: list[bytes] = []
        # arrays, which numpy copies into a step in one go
        self.tables = tuple(array("i") for _ in windows)
        self._released = [0] * len(windows)  # blocks at the beginning of each table that it no longer holds
        self.matched = 0
        """Positions of the prefix that was cached, whether it could be used or not."""

    @property
    def recorded(self) -> int:
        """Positions in blocks whose content is recorded."""
        return len(self._digests) * self._block_size

    @property
    def last_digest(self) -> bytes:
        """The digest of the last block whose content is recorded."""
        return self._digests[-1]

    @property
    def held(self) -> int:
        """Number of blocks that it holds."""
        return sum(map(len, self.tables)) - sum(self._released)

    def reuse(self, tokens: Sequence[int], most: int, usable: Callable[[bytes], bool] = lambda _: True) -> int:
        """Share the blocks of the longest cached prefix of ``tokens``, up to ``most`` positions; return its length.

        Args:
            usable: Whether a prefix whose last block has this digest may be taken.
        """
        assert not self.held
        digests = self._chain(tokens[:most])
        prefix = cached_prefix(self._pool, digests, self._windows, self._block_size, usable)
        for t, (table, window) in enumerate(zip(self.tables, self._windows, strict=True)):
            behind = blocks_behind(window, prefix.usable * self._block_size, self._block_size)
            table.extend([UNUSED] * behind)
            self._released[t] = behind
            for digest in prefix.digests[behind : prefix.usable]:
                block = self._pool.find(content_name(digest, t))
                assert block is not None
                self._pool.share(block)
                table.append(block)
        self._digests = prefix.digests[: prefix.usable]
        self.matched = len(prefix.digests) * self._block_size
        return prefix.usable * self._block_size

    def missing(self, length: int, soon: int | None = None) -> int:
        """Number of blocks to add until the table holds ``length`` positions.

        Args:
            soon: The positions that tables with windows must hold; None: as many.
        """
        return sum(
            max(0, self._blocks(length if window is None or soon is None else soon) - len(table))
            for table, window in zip(self.tables, self._windows, strict=True)
        )

    def peak(self, length: int, ahead: int) -> int:
        """Maximum blocks to hold until it has ``length`` positions, of which a step adds ``ahead``."""
        return sum(most_blocks(window, length, self._block_size, ahead) for window in self._windows)

    def reserve(self, length: int, soon: int | None = None) -> bool:
        """Add blocks until ``length`` positions fit. If too few are available, change nothing and return False.

        Args:
            soon: As for :meth:`missing`.
        """
        if self.missing(length, soon) > self._pool.available:
            return False
        for table, window in zip(self.tables, self._windows, strict=True):
            wanted = self._blocks(length if window is None or soon is None else soon)
            table.extend([self._pool.allocate() for _ in range(wanted - len(table))])
        return True

    def record(self, tokens: Sequence[int], length: int) -> None:
        """Record the contents of blocks that are full once the first ``length`` tokens are in the cache."""
        if length // self._block_size > len(self._digests):
            for digest in self._chain(tokens[:length]):
                at = len(self._digests)
                for t, table in enumerate(self.tables):
                    if at >= self._released[t]:
                        self._pool.name(table[at], content_name(digest, t))
                self._digests.append(digest)

    def slide(self, position: int) -> None:
        """Release the blocks that neither the token at ``position`` nor later ones attend to."""
        for t, (table, window) in enumerate(zip(self.tables, self._windows, strict=True)):
            behind = blocks_behind(window, position, self._block_size)
            for at in range(self._released[t], behind):
                self._pool.release([table[at]])
                table[at] = UNUSED
                self._released[t] = at + 1

    def release(self) -> None:
        """Release every block, the last first: the end of a sequence is the least likely to be shared."""
        for at in range(max(map(len, self.tables)) - 1, -1, -1):
            held = zip(self.tables, self._released, strict=True)
            self._pool.release([table[at] for table, released in held if released <= at < len(table)])
        self.tables, self._digests = tuple(array("i") for _ in self._windows), []
        self._released = [0] * len(self._windows)

    def _blocks(self, length: int) -> int:
        """Blocks of so many positions."""
        return -(-length // self._block_size)

    def _chain(self, tokens: Sequence[int]) -> Iterator[bytes]:
        """Digests of the full blocks of ``tokens`` after those already known."""
        return prefix_digests(tokens, self._block_size, self._digests)


class CachedPrefix(NamedTuple):
    """What is cached of a prompt.

    Attributes:
        digests: Of the blocks that layers find that attend to all positions.
        usable: Number of blocks after which a prompt can go on.
    """

    digests: list[bytes]
    usable: int


def cached_prefix(
    pool: BlockPool,
    digests: Iterable[bytes],
    windows: Sequence[int | None],
    block_size: int,
    usable: Callable[[bytes], bool] = lambda _: True,
) -> CachedPrefix:
    """The longest prefix of a prompt whose blocks are cached: all of those that layers without windows attend to, and
    the last ones of those with windows. May be called from any thread.

    Args:
        digests: The digests of the prompt's full blocks.
        usable: Whether a prefix whose last block has this digest may be taken.
    """
    found: list[bytes] = []
    taken, since = 0, [0] * len(windows)  # since: number of the first block from which on all are cached
    for digest in digests:
        count = len(found) + 1
        for t in range(len(windows)):
            if pool.find(content_name(digest, t)) is None:
                since[t] = count
        if any(first and window is None for first, window in zip(since, windows, strict=True)):
            break
        found.append(digest)
        behind = (blocks_behind(window, count * block_size, block_size) for window in windows)
        if all(first <= gone for first, gone in zip(since, behind, strict=True)) and usable(digest):
            taken = count
    return CachedPrefix(found, taken)


def blocks_behind(window: int | None, position: int, block_size: int) -> int:
    """Number of blocks that neither the token at ``position`` nor later ones attend to."""
    return 0 if window is None else max(0, position + 1 - window) // block_size


def content_name(digest: bytes, table: int) -> bytes:
    """The name of the content of a block of a table; of the first, the digest itself."""
    return digest + bytes([table]) if table else digest


def prefix_digests(tokens: Sequence[int], block_size: int, known: Sequence[bytes] = ()) -> Iterator[bytes]:
    """The digests of the full blocks of ``tokens`` that follow the blocks with the digests ``known``."""
    digest = known[-1] if known else b""
    for end in range((len(known) + 1) * block_size, len(tokens) + 1, block_size):
        content = array("i", tokens[end - block_size : end]).tobytes()
        digest = hashlib.blake2b(digest + content, digest_size=DIGEST_BYTES).digest()
        yield digest
