"""What Python's search for unreachable cycles looks at, and when."""

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
    """Take every object there is now out of the search for cycles, after one last search.

    A vocabulary is some hundred thousand objects. While they are searched, every thread waits; and Python searches
    all objects only once the new ones are a quarter of them. Until then a server's closed connections, which are
    cycles, would stay in memory. Objects set aside are still freed when nothing refers to them; cycles among them are
    found by the next call.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.collect()  # the quarter is of what this search sees: nothing


def give_back() -> None:
    """Return the pages of memory that was freed to the system; glibc alone would keep them."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)
