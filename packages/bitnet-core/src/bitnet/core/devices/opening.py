"""Opening a device while something else is done: what takes a driver longest it does without the interpreter's lock."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from threading import Lock, Thread
from typing import TypeAlias

from bitnet.core.devices import registry
from bitnet.core.devices.select import Selection, select_devices
from bitnet.core.errors import DeviceError, DeviceUnavailableError
from bitnet.core.hal import Device
from bitnet.core.support.log import logger

Opened: TypeAlias = "list[tuple[Selection, Device]]"
"""The devices that opened, each with how it was chosen."""

TURN = 0.0002
"""Seconds after which a thread lets others have the interpreter's lock while a device opens. With Python's own 5 ms,
the thread that opens it, which lets go of the lock in every call of a driver or a file, waits for longer than it works.
"""

PATIENCE = 0.3
"""Seconds that somebody who interrupts us waits for a device that is just being opened, so that it is closed again."""


@contextmanager
def opening(request: str | None, *, threads: int | None, strict: bool | None) -> Iterator[Future[Opened]]:
    """Choose and open a device, or each of a list, in a thread; how it was chosen, and the device, are the result.

    Arguments and errors are those of :func:`~bitnet.core.devices.select.select_devices` and ``Selection.open``. Leaving
    the context with an error closes what is open; an interrupt does not wait long for a driver that hangs.
    """
    registry.installed()  # reads hundreds of small files: here, where nobody else takes the lock meanwhile
    future: Future[Opened] = Future()

    def work() -> None:
        try:
            future.set_result(_open(select_devices(request, threads=threads, strict=strict)))
        except BaseException as error:
            future.set_exception(error)

    with _short_turns():
        Thread(target=work, name="bitnet-open", daemon=True).start()
        try:
            yield future
            wait([future])
        except Exception:
            wait([future])
            _close(future)
            raise
        except BaseException:  # an interrupt, or a signal that ends the command
            wait([future], PATIENCE)
            future.add_done_callback(_close)  # at once, if it is open
            raise


def _open(selections: Sequence[Selection]) -> Opened:
    """Open each, of several in a process of its own; one that does not open is left out with a warning, or an error."""
    opened: Opened = []
    try:
        for i, selection in enumerate(selections):
            try:
                opened.append((selection, selection.open(isolated=len(selections) > 1)))
            except (DeviceError, DeviceUnavailableError) as error:
                last = i == len(selections) - 1 and not opened
                if last or selection.options.strict:
                    raise
                logger.warning("%s is left out: %s", selection.requested, error)
    except BaseException:
        for _, device in opened:
            device.close()
        raise
    return opened


def _close(future: Future[Opened]) -> None:
    if future.exception() is None:
        for _, device in future.result():
            device.close()


_turns_lock = Lock()
_turns: list[float] = []
"""What the interval was before each of the contexts that are open now; the first is the one to go back to."""


@contextmanager
def _short_turns() -> Iterator[None]:
    """Turns of :data:`TURN` for all threads, until the last of the contexts that overlap is left."""
    with _turns_lock:
        _turns.append(sys.getswitchinterval())
        sys.setswitchinterval(min(_turns[0], TURN))
    try:
        yield
    finally:
        with _turns_lock:
            usual = _turns[0]
            _turns.pop()
            if not _turns:
                sys.setswitchinterval(usual)
