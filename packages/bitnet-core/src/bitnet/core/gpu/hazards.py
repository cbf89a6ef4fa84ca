"""Which launches of a recording have to wait for earlier ones, for APIs that do not order a recording themselves."""

from __future__ import annotations

from collections.abc import Iterable

from bitnet.core.gpu.driver import Buffer
from bitnet.core.gpu.windows import memory_of


class Hazards:
    """The memory that launches have used since the last barrier.

    A launch waits if it reads what was written since, or writes what was read or written since. Windows of one buffer
    count as the whole of it. The buffers must outlive this object.
    """

    def __init__(self) -> None:
        self._written: dict[int, bool] = {}

    def waits(self, uses: Iterable[tuple[Buffer, bool]]) -> bool:
        """Whether a barrier has to stand before the next launch; its uses are noted behind that barrier.

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
