"""The passes of a decode step, in rounds; some devices begin a round before the host has the last one's tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from bitnet.core.hal import Executable, Step

AHEAD = 2
"""Rounds in flight: one whose tokens the host processes, and one that the device computes meanwhile."""


class Rounds:
    """Runs a step ``count`` times, ``each`` passes per round.

    Args:
        each: ``count`` on a device without :data:`~bitnet.core.hal.LOOK_AHEAD`, which runs one round only.
        may_go_on: Called before each round except the first; once it returns False, no further round begins.
    """

    def __init__(
        self, executable: Executable, step: Step, count: int, each: int, may_go_on: Callable[[], bool]
    ) -> None:
        self._executable, self._step, self._may_go_on = executable, step, may_go_on
        self._left, self._each = count, each
        self._begun: deque[int] = deque()
        self.passes = 0
        """Number of passes whose tokens were taken."""

    def begin(self) -> bool:
        """Begin as many rounds as allowed; False if there is nothing left to take."""
        while self._left and len(self._begun) < AHEAD:
            count = min(self._left, self._each)
            if not self._begun and not self.passes:
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
        """Wait for the tokens of the oldest round, ``int32[passes, R]``."""
        tokens = self._executable.collect()
        self.passes += self._begun.popleft()
        return tokens
