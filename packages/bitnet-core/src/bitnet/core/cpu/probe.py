"""Measures this machine's limits: the rooflines to which speeds are compared.

Both limits are measured on a device's own threads, with its own instructions. The best of several short runs counts,
because other load on the machine can only slow a run down.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import partial

from bitnet.core.cpu.device import CpuDevice
from bitnet.core.cpu.memory import Arena

READ_BYTES = 512 << 20
"""Bytes of the buffer: larger than any cache, so that memory is measured."""
AHEAD = (0, 4096)
"""Prefetch distances, in bytes: some processors read fastest on their own, others with prefetching."""
_TURNS = 200_000


def read_bandwidth(device: CpuDevice, *, repeats: int = 4, size: int = READ_BYTES) -> float:
    """Bytes per second that the device's threads read from memory, on huge pages if available.

    Raises:
        OutOfMemoryError: There is no memory for the buffer of ``size`` bytes.
    """
    arena = Arena(device.library, size, device=device.info.name, what="measuring the read bandwidth")
    address = arena.take(size)
    ctypes.memset(address, 1, size)  # pages never written would all map to one page of zeros
    read = partial(device.library.bitnet_probe_read, device.level_handle, device.pool)
    try:
        seconds = min(_best(partial(read, address, size, ahead), repeats) for ahead in AHEAD)
    finally:
        arena.close()
    return size / seconds


def int8_peak(device: CpuDevice, *, repeats: int = 8) -> float:
    """int8 multiply-adds per second of the device's threads, in registers, with the level's best instruction."""
    products = 0

    def run() -> None:
        nonlocal products
        products = device.library.bitnet_probe_int8(device.level_handle, device.pool, _TURNS)

    seconds = _best(run, repeats)
    return products / seconds


def _best(run: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest run, after an uncounted warm-up run."""
    run()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)
