"""Host memory between two inaccessible pages, so that an access past its end ends the process.

A read there changes no result if nothing depends on what it finds, and no poison shows it. ``guarded.h`` does the same
for the drivers of tests that are in C.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from math import gcd
from pathlib import Path

import numpy as np
import numpy.typing as npt

WIDEST = 64
"""Bytes of the widest vector that a kernel loads at once, and the greatest alignment of guarded memory."""
HEADERS = Path(__file__).parent
"""The folder of ``guarded.h``, for compilers."""
_NO_ACCESS = 1 if sys.platform == "win32" else 0
"""PAGE_NOACCESS, PROT_NONE."""


def guarded(nbytes: int) -> npt.NDArray[np.uint8]:
    """``nbytes`` bytes, zeroed, with an inaccessible page behind the last.

    They begin at a multiple of the greatest power of two that divides ``nbytes``, up to :data:`WIDEST`, so
    that vectors of which rows consist are aligned. Another inaccessible page is less than a page before them, and the
    bytes between hold ones: not a number, or -1.

    Raises:
        OSError: The system cannot protect the page.
    """
    page = mmap.PAGESIZE
    size = -(-nbytes // page) * page
    pages = mmap.mmap(-1, size + 2 * page)
    whole = np.frombuffer(pages, np.uint8)
    whole[page : page + size - nbytes] = 0xFF
    _protect(whole.ctypes.data, page)
    _protect(whole.ctypes.data + page + size, page)
    memory = whole[page + size - nbytes : page + size]
    assert memory.ctypes.data % gcd(nbytes, WIDEST) == 0
    return memory


def _protect(address: int, nbytes: int) -> None:
    """Make whole pages inaccessible."""
    if sys.platform == "win32":
        before = ctypes.c_ulong()
        done = ctypes.windll.kernel32.VirtualProtect(
            ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _NO_ACCESS, ctypes.byref(before)
        )
        if not done:
            raise ctypes.WinError()
    else:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _NO_ACCESS):
            raise OSError(ctypes.get_errno(), "mprotect")
