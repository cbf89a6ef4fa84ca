"""How long a thread may keep the GIL while others wait for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

TURN = 0.0002
"""The GIL's switch interval in seconds within :func:`short_turns`; Python's default is 5 ms."""

_lock = Lock()
_intervals: list[float] = []
"""The interval before each active context; the first one is restored at the end."""


@contextmanager
def short_turns() -> Iterator[None]:
    """Set the switch interval to :data:`TURN` until the last of the overlapping contexts is left.

    For a thread that releases the GIL often, in driver calls, file accesses or waits for a device. After each it would
    else wait for up to 5 ms until another thread's turn ends, longer than it then works.
    """
    with _lock:
        _intervals.append(sys.getswitchinterval())
        sys.setswitchinterval(min(_intervals[0], TURN))
    try:
        yield
    finally:
        with _lock:
            usual = _intervals[0]
            _intervals.pop()
            if not _intervals:
                sys.setswitchinterval(usual)
