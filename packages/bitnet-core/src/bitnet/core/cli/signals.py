"""Signals that end a program are handled like Ctrl-C, so that nothing is left half-written."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = ("SIGTERM", "SIGHUP", "SIGBREAK")
"""Signals that ask a program to end, those that the platform has."""


class Ended(BaseException):
    """A signal has asked the command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


@contextmanager
def unwinding() -> Iterator[None]:
    """In this context, a signal of :data:`ENDING` raises :class:`Ended`; a second one ends the process at once.

    A signal that the program was started to ignore, as by ``nohup``, stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():  # Python delivers signals only to the main thread
        yield
        return
    numbers = [number for name in ENDING if (number := getattr(signal, name, None)) is not None]
    ours = [number for number in numbers if signal.getsignal(number) == signal.SIG_DFL]

    def stand_down() -> None:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)

    def end(number: int, frame: FrameType | None) -> None:
        stand_down()
        raise Ended(number)

    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        stand_down()
