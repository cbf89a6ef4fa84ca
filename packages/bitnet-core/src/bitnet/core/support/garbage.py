"""Memory that nothing uses: when Python searches for it, and when it goes back to the system."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Suspend the search for cycles: a sixth of the time for a vocabulary's tuples, three quarters for JSON."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def set_aside() -> None:
    """Search for cycles once, then exclude the objects that are left from later searches.

    A vocabulary is some hundred thousand objects, and every thread waits while they are searched. Python searches all
    objects only once the new ones are a quarter of them; until then a server's closed connections, which are cycles,
    stay in memory. An excluded object is still freed when nothing refers to it. A cycle of excluded objects is freed by
    the next call.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.collect()  # it sees nothing, and the quarter is of what the last search saw


def give_back() -> None:
    """Give freed memory back to the system, which glibc does not do by itself."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)
