"""Opening a device while something else is done: what takes a driver longest it does without the interpreter's lock."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from threading import Lock, Thread
from typing import TypeAlias, TypeVar

from bitnet.core.devices import registry
from bitnet.core.devices.select import Selection, select_devices
from bitnet.core.errors import DeviceError, DeviceUnavailableError
from bitnet.core.hal import Device
from bitnet.core.support.log import logger

_T = TypeVar("_T")
_Result = TypeVar("_Result")
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
        found = side_by_side(partial(_try, isolated=len(selections) > 1), selections)
        opened += [(s, f) for s, f in zip(selections, found, strict=True) if not isinstance(f, Exception)]
        for selection, error in zip(selections, found, strict=True):
            if isinstance(error, Exception):
                absent = isinstance(error, (DeviceError, DeviceUnavailableError))
                if selection.options.strict or not opened or not absent:
                    raise error
                logger.warning("%s is left out: %s", selection.requested, error)
    except BaseException:
        for _, device in opened:
            device.close()
        raise
    return opened


def _try(selection: Selection, *, isolated: bool) -> Device | Exception:
    """The device, or why it does not open, so that the others' are known as well."""
    try:
        return selection.open(isolated=isolated)
    except Exception as error:
        return error


def side_by_side(function: Callable[[_T], _Result], arguments: Sequence[_T]) -> list[_Result]:
    """``function`` of each argument, of several in threads; where one raises, the others are waited for."""
    if len(arguments) == 1:
        return [function(arguments[0])]
    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(function, arguments))


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
