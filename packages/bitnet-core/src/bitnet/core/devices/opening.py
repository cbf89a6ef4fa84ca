"""Opens devices in the background: the slowest parts of drivers run without the GIL."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from threading import Thread
from typing import TypeAlias, TypeVar

from bitnet.core.devices import registry
from bitnet.core.devices.select import Selection, select_devices
from bitnet.core.errors import DeviceError, DeviceUnavailableError
from bitnet.core.hal import Device
from bitnet.core.support import system
from bitnet.core.support.log import logger
from bitnet.core.support.turns import short_turns

_T = TypeVar("_T")
_Result = TypeVar("_Result")
Opened: TypeAlias = "list[tuple[Selection, Device]]"
"""The opened devices, each with its selection."""

PATIENCE = 0.3
"""Seconds to wait, after an interrupt, for a device that is being opened, in order to close it."""


@contextmanager
def opening(request: str | None, *, threads: int | None, strict: bool | None) -> Iterator[Future[Opened]]:
    """Choose and open a device, or several, in a thread; the future's result has each selection and device.

    Arguments and errors are those of :func:`~bitnet.core.devices.select.select_devices` and ``Selection.open``. Leaving
    the context with an error closes open devices. An interrupt does not wait long for a hung driver.
    """
    registry.installed()  # reads hundreds of small files, so it is done before the thread competes for the GIL
    future: Future[Opened] = Future()

    def work() -> None:
        try:
            future.set_result(_open(select_devices(request, threads=threads, strict=strict)))
        except BaseException as error:
            future.set_exception(error)

    with short_turns():
        if system.THREADS:
            Thread(target=work, name="bitnet-open", daemon=True).start()
        else:
            work()
        try:
            yield future
            wait([future])
        except Exception:
            wait([future])
            _close(future)
            raise
        except BaseException:  # an interrupt, or a signal that ends the command
            wait([future], PATIENCE)
            future.add_done_callback(_close)  # runs at once if the device is already open
            raise


def _open(selections: Sequence[Selection]) -> Opened:
    """Open each selection, several ones in processes of their own. A failing one is left out with a warning, or an
    error."""
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
    """The device, or the error in opening it, so that the results of the others are known, too."""
    try:
        return selection.open(isolated=isolated)
    except Exception as error:
        return error


def side_by_side(function: Callable[[_T], _Result], arguments: Sequence[_T]) -> list[_Result]:
    """Apply ``function`` to each argument, in threads if several. If one raises, wait for the others first."""
    if len(arguments) == 1 or not system.THREADS:
        return [function(argument) for argument in arguments]
    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(function, arguments))


def _close(future: Future[Opened]) -> None:
    if future.exception() is None:
        for _, device in future.result():
            device.close()
