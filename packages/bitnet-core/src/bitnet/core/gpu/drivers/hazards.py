"""Finds the launches of a recording that must wait for earlier ones, for APIs that do not order launches themselves."""

from __future__ import annotations

from collections.abc import Iterable

from bitnet.core.gpu.drivers.interface import Buffer
from bitnet.core.gpu.drivers.windows import memory_of


class Hazards:
    """The memory used by launches since the last barrier.

    A launch must wait if it reads memory written since then, or writes memory read or written since then. A window
    counts as its whole buffer. The buffers must outlive this object.
    """

    def __init__(self) -> None:
        self._written: dict[int, bool] = {}

    def waits(self, uses: Iterable[tuple[Buffer, bool]]) -> bool:
        """Whether the next launch needs a barrier before it; its uses are recorded after that barrier.

        Args:
            uses: Each buffer of the launch, and whether the launch writes it.
        """
        by_memory: dict[int, bool] = {}
        for buffer, writes in uses:
            key = id(memory_of(buffer))
            by_memory[key] = by_memory.get(key, False) or writes
        met = any(
            self._written.get(key, False) or (writes and key in self._written) for key, writes in by_memory.items()
        )
        if met:
            self._written.clear()
        self._written |= by_memory
        return met
