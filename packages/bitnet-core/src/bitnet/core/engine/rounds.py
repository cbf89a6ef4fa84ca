"""The passes of a decode step, some at a time: a device that can begins the next before the host has the last."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from bitnet.core.hal import Executable, GoesOn, Step

AHEAD = 2
"""Rounds that are begun at a time: one whose tokens the host takes in, and one that the device computes meanwhile."""


class Rounds:
    """Runs a step ``count`` times, ``each`` passes a round.

    Args:
        ahead: The executable where it goes on by itself; without, a round is begun when its tokens are asked for.
        may_go_on: Asked before each round but the first; once it says no, none is begun any more.
    """

    def __init__(
        self,
        executable: Executable,
        ahead: GoesOn | None,
        step: Step,
        count: int,
        each: int,
        may_go_on: Callable[[], bool],
    ) -> None:
        self._executable, self._ahead, self._step, self._may_go_on = executable, ahead, step, may_go_on
        self._left, self._each = count, each
        self._begun: deque[int] = deque()
        self.passes = 0
        """Passes whose tokens were taken."""

    def begin(self) -> bool:
        """Have as many rounds begun as there may be; False where there is nothing to take any more."""
        while self._left and len(self._begun) < (AHEAD if self._ahead else 1):
            count = min(self._left, self._each)
            first = not self._begun and not self.passes
            if not first and not (self._begun and self._may_go_on()):
                self._left = 0
                break
            if self._ahead is not None:
                self._ahead.start(self._step, count) if first else self._ahead.go_on(count)
            self._left -= count
            self._begun.append(count)
        return bool(self._begun)

    def take(self) -> npt.NDArray[np.int32]:
        """The tokens of the oldest round, ``int32[passes, R]``, as soon as they are there."""
        count = self._begun.popleft()
        self.passes += count
        if self._ahead is not None:
            return self._ahead.collect()
        return self._executable.run(self._step, count)
