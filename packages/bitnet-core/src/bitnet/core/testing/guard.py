"""Host memory that ends where an inaccessible page begins, so that a read past its end ends the process.

Such a read changes no result if nothing depends on what it finds, and no poison shows it.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from math import gcd

import numpy as np
import numpy.typing as npt

WIDEST = 64
"""Bytes of the widest vector that a kernel loads at once, and the greatest alignment of guarded memory."""
_NO_ACCESS = 1 if sys.platform == "win32" else 0
"""PAGE_NOACCESS, PROT_NONE."""


def guarded(nbytes: int) -> npt.NDArray[np.uint8]:
    """``nbytes`` bytes, zeroed, with an inaccessible page behind the last.

    They begin at a multiple of the greatest power of two that divides ``nbytes``, up to :data:`WIDEST`, so
    that vectors of which rows consist are aligned.

    Raises:
        OSError: The system cannot protect the page.
    """
    page = mmap.PAGESIZE
    size = -(-nbytes // page) * page
    pages = mmap.mmap(-1, size + page)
    whole = np.frombuffer(pages, np.uint8)
    _protect(whole.ctypes.data + size, page)
    memory = whole[size - nbytes : size]
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
