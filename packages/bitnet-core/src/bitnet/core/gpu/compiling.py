"""Compiling the kernels of a recording side by side: a first launch takes the time of a few, not of their sum."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Made = TypeVar("Made")


def compile_all(compile_one: Callable[[Key], Made], keys: Collection[Key]) -> dict[Key, Made]:
    """What ``compile_one`` makes of each of the keys, in a thread for each processor this process may use.

    It is for compilers that release the interpreter's lock. The first error is raised once all that had begun has
    ended; what had not begun is left.
    """
    distinct = list(dict.fromkeys(keys))
    workers = min(len(distinct), _processors())
    if workers <= 1:
        return {key: compile_one(key) for key in distinct}
    with ThreadPoolExecutor(workers, "compile") as pool:
        futures = {key: pool.submit(compile_one, key) for key in distinct}
        try:
            return {key: future.result() for key, future in futures.items()}
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _processors() -> int:
    """How many this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
