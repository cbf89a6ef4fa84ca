"""How many threads to compute with."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from bitnet.core import env, system
from bitnet.core.errors import InvalidInputError

MAX_THREADS = 1024
TOPOLOGY = Path("/sys/devices/system/cpu")
_given: ContextVar[int | None] = ContextVar("threads", default=None)


@contextmanager
def given_threads(count: int | None) -> Iterator[None]:
    """Let devices that this thread opens meanwhile compute with ``count`` threads, whatever the environment says.

    Not by setting the variable: devices that other threads open at the same time would read it.

    Raises:
        InvalidInputError: That is not a number of threads.
    """
    if count is not None and not 1 <= count <= MAX_THREADS:
        raise InvalidInputError(f"threads is {count}; it must be a number from 1 to {MAX_THREADS}.")
    token = _given.set(count)
    try:
        yield
    finally:
        _given.reset(token)


def thread_count() -> int:
    """What :func:`given_threads` says; else ``BITNET_THREADS``; else one for each physical core that this process may
    run on, within its container's quota.

    A second thread on a core shares its arithmetic units and its path to memory: there is nothing to gain from it.

    Raises:
        InvalidInputError: ``BITNET_THREADS`` is not a number of threads.
    """
    if (given := _given.get()) is not None:
        return given
    asked = env.text("BITNET_THREADS")
    if not asked:
        return max(1, min(physical_cores(), system.usable_cpus(), MAX_THREADS))
    if not asked.isdecimal() or len(asked) > len(str(MAX_THREADS)) or not 1 <= int(asked) <= MAX_THREADS:
        raise InvalidInputError(f"BITNET_THREADS is {asked!r}; it must be a number from 1 to {MAX_THREADS}.")
    return int(asked)


def physical_cores() -> int:
    """Physical cores this process may run on; logical processors where the system does not tell them apart."""
    if sys.platform == "darwin":
        # The fast cores only: a barrier waits for the slowest thread.
        return int(system.sysctl("hw.perflevel0.physicalcpu") or system.sysctl("hw.physicalcpu") or os.cpu_count() or 1)
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    processors = os.sched_getaffinity(0)
    return len({_siblings(processor) for processor in processors})


def _siblings(processor: int) -> str:
    """The logical processors of the same core, as the kernel writes them; the processor itself where it does not."""
    try:
        return (TOPOLOGY / f"cpu{processor}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(processor)
