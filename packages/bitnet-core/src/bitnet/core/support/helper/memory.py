"""Measures a helper's memory on macOS, where the system cannot limit it."""

from __future__ import annotations

import ctypes
import sys
from typing import Any


class _Usage(ctypes.Structure):
    """``rusage_info_v0`` of macOS."""

    _fields_ = (
        ("uuid", ctypes.c_uint8 * 16),
        ("user_time", ctypes.c_uint64),
        ("system_time", ctypes.c_uint64),
        ("package_idle_wakeups", ctypes.c_uint64),
        ("interrupt_wakeups", ctypes.c_uint64),
        ("pageins", ctypes.c_uint64),
        ("wired_size", ctypes.c_uint64),
        ("resident_size", ctypes.c_uint64),
        ("phys_footprint", ctypes.c_uint64),
        ("start_time", ctypes.c_uint64),
        ("exit_time", ctypes.c_uint64),
    )


def taken(pid: int) -> int:
    """Bytes of memory that a helper uses; 0 if the system limits it, or if unknown."""
    return footprint(ctypes.CDLL(None), pid) if sys.platform == "darwin" else 0


def footprint(libc: Any, pid: int) -> int:
    """Bytes of a process's memory as counted by macOS, including compressed and swapped memory; 0: it has ended."""
    usage = _Usage()
    if libc.proc_pid_rusage(ctypes.c_int(pid), ctypes.c_int(0), ctypes.byref(usage)) != 0:
        return 0
    return int(usage.phys_footprint)
