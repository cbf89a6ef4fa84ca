"""Making many objects at once without Python's search for cycles among them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Look for no cycles meanwhile: of a vocabulary's tuples that is a sixth of the time, of JSON three quarters."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
