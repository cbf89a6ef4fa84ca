"""The passes of a decode step, in bursts; some devices begin a burst before the host has the previous one's tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from bitnet.core.hal import Executable, Step

MAX_IN_FLIGHT = 2
"""Bursts in flight: one whose tokens the host processes, and one that the device computes meanwhile."""


class Bursts:
    """Runs a step ``count`` times, ``passes`` at a time.

    Args:
        passes: Passes of a burst: ``count`` on a device without :data:`~bitnet.core.hal.LOOK_AHEAD`, which runs one
            burst only.
        may_go_on: Called before each burst except the first; once it returns False, no further burst begins.
    """

    def __init__(
        self, executable: Executable, step: Step, count: int, passes: int, may_go_on: Callable[[], bool]
    ) -> None:
        self._executable, self._step, self._may_go_on = executable, step, may_go_on
        self._left, self._passes = count, passes
        self._begun: deque[int] = deque()
        self.taken = 0
        """Number of passes whose tokens were taken."""

    def begin(self) -> bool:
        """Begin as many bursts as allowed; False if there is nothing left to take."""
        while self._left and len(self._begun) < MAX_IN_FLIGHT:
            count = min(self._left, self._passes)
            if not self._begun and not self.taken:
                self._executable.start(self._step, count)
            elif self._begun and self._may_go_on():
                self._executable.go_on(count)
            else:
                self._left = 0
                break
            self._left -= count
            self._begun.append(count)
        return bool(self._begun)

    def take(self) -> npt.NDArray[np.int32]:
        """Wait for the tokens of the oldest burst, ``int32[passes, R]``."""
        tokens = self._executable.collect()
        self.taken += self._begun.popleft()
        return tokens
