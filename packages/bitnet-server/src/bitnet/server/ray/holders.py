"""Which replicas hold which KV blocks, so that one walk over a prompt's blocks finds what each of them has.

This module knows nothing of Ray.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence


class Holders:
    """Maps the hash of a block to the set of replicas that hold it: the bits of an integer."""

    def __init__(self) -> None:
        self._sets: dict[int, int] = {}
        self._bits: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._held: dict[str, int] = {}

    def add(self, replica: str, hashes: Collection[int]) -> None:
        """Note that a replica holds blocks, some of which may be known."""
        if not hashes:
            return
        bit = self._bits.get(replica)
        if bit is None:
            number = next(i for i in range(len(self._names) + 1) if i not in self._names)
            self._names[number] = replica
            bit = self._bits[replica] = 1 << number
            self._held[replica] = 0
        for one in hashes:
            before = self._sets.get(one, 0)
            if not before & bit:
                self._sets[one] = before | bit
                self._held[replica] += 1

    def remove(self, replica: str, hashes: Iterable[int]) -> None:
        """Note that a replica no longer holds blocks. Its bit is free once it holds none."""
        bit = self._bits.get(replica, 0)
        for one in hashes:
            before = self._sets.get(one, 0)
            if not before & bit:
                continue
            self._held[replica] -= 1
            if before == bit:
                del self._sets[one]
            else:
                self._sets[one] = before ^ bit
        if bit and not self._held[replica]:
            del self._bits[replica], self._held[replica], self._names[bit.bit_length() - 1]

    def leading(self, prompt: Sequence[int]) -> dict[str, int]:
        """How many of a prompt's first blocks each replica holds without a gap; those that lack the first are left out.

        Args:
            prompt: Hashes of its full blocks, in order.
        """
        found: dict[str, int] = {}
        holding = 0
        for count, block in enumerate(prompt):
            still = self._sets.get(block, 0) & (holding if count else -1)
            for name in self._replicas(holding & ~still):
                found[name] = count
            holding = still
            if not holding:
                break
        for name in self._replicas(holding):
            found[name] = len(prompt)
        return found

    def _replicas(self, bits: int) -> Iterator[str]:
        while bits:
            lowest = bits & -bits
            yield self._names[lowest.bit_length() - 1]
            bits ^= lowest
