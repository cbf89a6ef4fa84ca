"""The default number of compute threads."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from bitnet.core.hal.backend import MAX_THREADS
from bitnet.core.support import system

TOPOLOGY = Path("/sys/devices/system/cpu")


def default_threads() -> int:
    """One for each physical core that this process may run on, within its container's quota.

    A second thread on a core shares its arithmetic units and memory path, so it gains nothing.
    """
    return max(1, min(physical_cores(), system.usable_cpus(), MAX_THREADS))


def physical_cores() -> int:
    """Physical cores this process may run on; logical processors if the system does not distinguish them."""
    if sys.platform == "darwin":
        # Only the fast cores, because a barrier waits for the slowest thread.
        return int(system.sysctl("hw.perflevel0.physicalcpu") or system.sysctl("hw.physicalcpu") or os.cpu_count() or 1)
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    processors = os.sched_getaffinity(0)
    return len({_siblings(processor) for processor in processors})


def _siblings(processor: int) -> str:
    """The logical processors on the same core, as listed by the kernel; if unknown, the processor itself."""
    try:
        return (TOPOLOGY / f"cpu{processor}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(processor)
