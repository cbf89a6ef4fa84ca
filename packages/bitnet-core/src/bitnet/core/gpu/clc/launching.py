"""Converts launches to the values that a C interface needs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from bitnet.core.gpu.drivers.interface import Arg, Launch, Size3

Value: TypeAlias = ctypes.c_int32 | ctypes.c_uint32 | ctypes.c_float | ctypes.c_void_p


def values(launch: Launch, handle: Callable[[Any], int]) -> list[Value]:
    """A launch's arguments: numbers in their own type, buffers as pointers.

    Args:
        handle: Returns a buffer's device address or the interface's handle for it.
    """

    def value(arg: Arg) -> Value:
        if isinstance(arg, np.int32):
            return ctypes.c_int32(int(arg))
        if isinstance(arg, np.uint32):
            return ctypes.c_uint32(int(arg))
        if isinstance(arg, np.float32):
            return ctypes.c_float(float(arg))
        return ctypes.c_void_p(handle(arg))

    return [value(arg) for arg in launch.args]


def work_items(launch: Launch) -> Size3:
    """The size of a launch's grid in work-items."""
    (x, y, z), (a, b, c) = launch.grid, launch.block
    return x * a, y * b, z * c
