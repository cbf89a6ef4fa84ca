"""Proves that a device computes correctly by running a kernel on it."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass

from bitnet.core.devices.options import open_options
from bitnet.core.devices.plugin import Plugin
from bitnet.core.hal import DeviceInfo


@dataclass(frozen=True, slots=True)
class Proof:
    """Result of a proof: ``error`` if the device failed or was wrong; ``time`` in seconds, including opening."""

    passed: bool
    time: float
    error: str = ""


def prove(backend: Plugin, info: DeviceInfo) -> Proof:
    """Multiply a fresh random ternary matrix on a device of a backend, and compare with exact integers."""
    from bitnet.core.gpu.checks.self_check import wrong_products  # imports the GPU code, which probing does not need

    begin = time.perf_counter()
    try:
        with closing(backend.open(info, open_options())) as device, backend.guard(info.name):
            error = wrong_products(device)
    except Exception as failure:  # whatever happens, the other devices must still be tested
        error = " ".join(str(failure).split()) or type(failure).__name__
    return Proof(not error, time.perf_counter() - begin, error)
