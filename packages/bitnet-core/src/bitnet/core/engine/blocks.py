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
        return list(self._by_digest)  # one step of the interpreter, so nothing changes meanwhile

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
    """The blocks of one sequence, in order of position."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool, self._block_size = pool, block_size
        self._digests: list[bytes] = []
        self.blocks = array("i")  # an array, which numpy copies into a step in one go
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

    def reuse(self, tokens: Sequence[int], most: int, usable: Callable[[bytes], bool] = lambda _: True) -> int:
        """Share the blocks of the longest cached prefix of ``tokens``, up to ``most`` positions; return its length.

        Args:
            usable: Whether a prefix whose last block has this digest may be taken.
        """
        assert not self.blocks
        found, taken = [], 0
        for digest in self._chain(tokens[:most]):
            block = self._pool.find(digest)
            if block is None:
                break
            found.append((block, digest))
            if usable(digest):
                taken = len(found)
        for block, digest in found[:taken]:
            self._pool.share(block)
            self.blocks.append(block)
            self._digests.append(digest)
        self.matched = len(found) * self._block_size
        return taken * self._block_size

    def missing(self, length: int) -> int:
        """Number of blocks to add until the table holds ``length`` positions."""
        return max(0, -(-length // self._block_size) - len(self.blocks))

    def reserve(self, length: int) -> bool:
        """Add blocks until ``length`` positions fit. If too few are available, change nothing and return False."""
        missing = self.missing(length)
        if missing > self._pool.available:
            return False
        self.blocks.extend([self._pool.allocate() for _ in range(missing)])
        return True

    def record(self, tokens: Sequence[int], length: int) -> None:
        """Record the contents of blocks that are full once the first ``length`` tokens are in the cache."""
        if length // self._block_size > len(self._digests):
            for digest in self._chain(tokens[:length]):
                self._pool.name(self.blocks[len(self._digests)], digest)
                self._digests.append(digest)

    def release(self) -> None:
        """Release every block, the last first: the end of a sequence is the least likely to be shared."""
        self._pool.release(reversed(self.blocks))
        self.blocks, self._digests = array("i"), []

    def _chain(self, tokens: Sequence[int]) -> Iterator[bytes]:
        """Digests of the full blocks of ``tokens`` after those already known."""
        return prefix_digests(tokens, self._block_size, self._digests)


def prefix_digests(tokens: Sequence[int], block_size: int, known: Sequence[bytes] = ()) -> Iterator[bytes]:
    """The digests of the full blocks of ``tokens`` that follow the blocks with the digests ``known``."""
    digest = known[-1] if known else b""
    for end in range((len(known) + 1) * block_size, len(tokens) + 1, block_size):
        content = array("i", tokens[end - block_size : end]).tobytes()
        digest = hashlib.blake2b(digest + content, digest_size=16).digest()
        yield digest
