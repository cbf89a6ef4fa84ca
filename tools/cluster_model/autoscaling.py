"""The autoscaler: the server's own policy, with Serve's delays and the time that a replica takes to start."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from bitnet.server.ray.scaling import Use, needed, wanted


@dataclass(frozen=True, slots=True)
class Scale:
    """How the number of replicas follows the load.

    Attributes:
        min, max: Bounds of the number.
        start: Seconds that a replica takes to start.
        look_back: Seconds over which the load is averaged.
        up, down: Seconds for which there must be too few replicas, or too many.
    """

    min: int
    max: int
    start: float = 10.0
    look_back: float = 10.0
    up: float = 5.0
    down: float = 60.0


class Decision:
    """Decides from what is measured each second.

    Attributes:
        target: Number of replicas that there should be.
    """

    def __init__(self, scale: Scale, places: int) -> None:
        self.target, self._scale, self._places = scale.min, scale, places
        self._needs: deque[float] = deque(maxlen=max(1, round(scale.look_back)))
        self._direction, self._seconds = 0, 0

    def second(self, uses: Sequence[Use]) -> int:
        """Take in what the replicas have to do now; return by how much the number of replicas is to change."""
        self._needs.append(needed(uses, 0.0, self._places))
        found = wanted(self.target, sum(self._needs) / len(self._needs))
        change = max(self._scale.min, min(self._scale.max, found)) - self.target
        direction = (change > 0) - (change < 0)
        self._seconds = self._seconds + 1 if direction == self._direction else 0
        self._direction = direction
        if not direction or self._seconds < (self._scale.up if change > 0 else self._scale.down):
            return 0
        self._seconds = 0
        self.target += change
        return change
