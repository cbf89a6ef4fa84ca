"""A Windows job object: limits its process's memory, and ends it when the handle is closed, also if we crash."""

from __future__ import annotations

import ctypes
from typing import Any

KILL_ON_JOB_CLOSE, DIE_ON_UNHANDLED_EXCEPTION, PROCESS_MEMORY, ACTIVE_PROCESS = 0x2000, 0x400, 0x100, 0x8
EXTENDED_LIMIT_INFORMATION = 9


class ExtendedLimits(ctypes.Structure):
    """``JOBOBJECT_EXTENDED_LIMIT_INFORMATION``."""

    _fields_ = (
        ("process_user_time", ctypes.c_int64),
        ("job_user_time", ctypes.c_int64),
        ("flags", ctypes.c_uint32),
        ("minimum_working_set", ctypes.c_size_t),
        ("maximum_working_set", ctypes.c_size_t),
        ("active_processes", ctypes.c_uint32),
        ("affinity", ctypes.c_size_t),
        ("priority_class", ctypes.c_uint32),
        ("scheduling_class", ctypes.c_uint32),
        ("io_counters", ctypes.c_uint64 * 6),
        ("process_memory", ctypes.c_size_t),
        ("job_memory", ctypes.c_size_t),
        ("peak_process_memory", ctypes.c_size_t),
        ("peak_job_memory", ctypes.c_size_t),
    )


class Job:
    """A job with one process in it.

    Args:
        kernel32: The library, as ``ctypes.WinDLL("kernel32", use_last_error=True)``.
        process: Handle of the process.
        memory: Maximum bytes it may commit.

    Raises:
        OSError: Windows refuses.
    """

    def __init__(self, kernel32: Any, process: int, memory: int) -> None:
        self._kernel32 = kernel32
        kernel32.CreateJobObjectW.restype = ctypes.c_void_p
        self._handle = ctypes.c_void_p(kernel32.CreateJobObjectW(None, None))
        limits = ExtendedLimits(flags=KILL_ON_JOB_CLOSE | DIE_ON_UNHANDLED_EXCEPTION | PROCESS_MEMORY | ACTIVE_PROCESS)
        limits.active_processes = 1
        limits.process_memory = memory
        size = ctypes.sizeof(limits)
        done = self._handle.value and kernel32.SetInformationJobObject(
            self._handle, EXTENDED_LIMIT_INFORMATION, ctypes.byref(limits), ctypes.c_uint32(size)
        )
        if not (done and kernel32.AssignProcessToJobObject(self._handle, ctypes.c_void_p(process))):
            code = ctypes.get_last_error() if hasattr(ctypes, "get_last_error") else 0
            self.close()
            raise OSError(code, "the helper process cannot be put into a job object")

    def close(self) -> None:
        """End the process if it is still running."""
        handle, self._handle = self._handle, ctypes.c_void_p()
        if handle.value:
            self._kernel32.CloseHandle(handle)

    __del__ = close
