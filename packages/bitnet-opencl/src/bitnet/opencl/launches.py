"""Enqueues launches one by one, with the loader's own function if it can be found.

pyopencl's function makes an unneeded event for each launch, which would make the host the bottleneck of decode.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import pyopencl as cl


class Command(NamedTuple):
    """A kernel with its arguments set, and its sizes in work-items."""

    kernel: cl.Kernel
    global_size: tuple[int, int, int]
    local_size: tuple[int, int, int]


class Launches:
    """Commands that run in order on one queue, any number of times."""

    def __init__(self, queue: cl.CommandQueue, commands: Sequence[Command]) -> None:
        self._queue, self._commands = queue, commands
        self._library = library()
        self._handle = ctypes.c_void_p(queue.int_ptr)
        self._arguments: list[tuple[Any, ...]] = []  # made once, because they are most of a call's cost
        for kernel, *sizes in commands:
            made = ((ctypes.c_size_t * 3)(*size) for size in sizes)
            self._arguments.append((self._handle, ctypes.c_void_p(kernel.int_ptr), 3, None, *made, 0, None, None))

    def enqueue(self) -> None:
        """Start them after what the queue was given before. Raises cl.Error."""
        if self._library is None:
            for command in self._commands:
                cl.enqueue_nd_range_kernel(self._queue, *command)
            self._queue.flush()
            return
        enqueue = self._library.clEnqueueNDRangeKernel
        for arguments in self._arguments:
            if status := enqueue(*arguments):
                check("clEnqueueNDRangeKernel", status)
        check("clFlush", self._library.clFlush(self._handle))


@cache
def library() -> ctypes.CDLL | None:
    """The loader that pyopencl uses, found through pyopencl's own library, which needs it."""
    try:
        found = ctypes.CDLL(cl._cl.__file__)
        return found if found.clEnqueueNDRangeKernel and found.clFlush else None
    except (OSError, AttributeError):  # a platform whose loader does not look into what a library needs
        return None


def check(routine: str, status: int) -> None:
    """Raise the cl.Error that a routine's status stands for."""
    if status:
        raise cl.RuntimeError(cl._cl._ErrorRecord(msg="", code=status, routine=routine))
