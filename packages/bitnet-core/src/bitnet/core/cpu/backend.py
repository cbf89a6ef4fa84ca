"""The CPU backend: one device for each instruction-set level of this processor, and numpy as the last resort."""

from __future__ import annotations

import logging
import platform

import numpy as np

from bitnet.core.cpu import native
from bitnet.core.cpu.device import CpuDevice, device_of
from bitnet.core.cpu.structures import OpKind
from bitnet.core.cpu.threads import default_threads
from bitnet.core.errors import DeviceError
from bitnet.core.hal import (
    BLOCK_TABLES,
    FAMILY_FEATURES,
    HAL_API,
    KERNEL_FEATURES,
    Device,
    DeviceInfo,
    DeviceType,
    OpenOptions,
    ProbeResult,
    ProbeStatus,
)
from bitnet.core.reference import NUMPY_INFO, ReferenceDevice
from bitnet.core.support import log, system

_FEATURES = {
    "amx": ("int8-matrix", "int8-dot", "byte-permute", "f16"),
    "vbmi_avx512": ("int8-dot", "byte-permute", "f16"),
    "avx512": ("int8-dot", "f16"),
    "vnni_avx2": ("int8-dot", "f16"),
    "avx2": ("f16",),
    "neon": ("int8-dot", "f16"),
    "relaxed_simd128": ("int8-dot",),
    "simd128": (),
    "scalar": (),
}
"""Hardware features of each level: int8 dot products, f16 conversion."""


class CpuBackend:
    """Implements :class:`bitnet.core.hal.Backend`."""

    name = "cpu"
    hal_api = HAL_API

    def probe(self) -> ProbeResult:
        library = native.library()
        best: dict[str, str] = {}
        for level in native.levels(library.handle):
            best.setdefault(device_of(level), level)
        devices = [self._info(device, level) for device, level in best.items()]
        reason = hint = ""
        if not devices:
            reason = "the native library is missing: models run on numpy, a hundred times slower"
            if library.failure != "missing":
                why = [*library.tried.values()][-1]
                reason = f"the native library does not load ({why}): models run on numpy"
            hint = "pip install --force-reinstall bitnet-core; in a source checkout, uv sync builds it"
        return ProbeResult(
            ProbeStatus.OK, [*devices, NUMPY_INFO], reason, hint, library.tried, {"numpy": np.__version__}
        )

    def open(self, info: DeviceInfo, options: OpenOptions) -> Device:
        if info.index == NUMPY_INFO.index:
            if reason := self.probe().reason:
                log.once(logging.WARNING, f"cpu: {reason}.")
            return ReferenceDevice(info)
        library = native.library().handle
        if library is None:
            raise DeviceError("the native library is missing.", device=info.name)
        return CpuDevice(info, library, threads=options.threads)

    def kernels(self) -> frozenset[str]:
        names = (kind.name.lower() for kind in OpKind)
        return frozenset(f"{name}_{level}" for name in names for level in (*native.LEVELS, "numpy"))

    def _info(self, device: str, level: str) -> DeviceInfo:
        return DeviceInfo(
            backend=self.name,
            index=device,
            id=f"cpu:{device}",
            description=system.cpu_model(),
            vendor=_vendor(system.cpu_model()),
            type=DeviceType.CPU,
            memory=system.memory_total(),
            features=(
                *_FEATURES[level],
                *KERNEL_FEATURES,
                *FAMILY_FEATURES,
                BLOCK_TABLES,
            ),
            details={"level": level, "cores": str(default_threads()), "architecture": platform.machine()},
        )


def _vendor(model: str) -> str:
    """The vendor, if the processor's name includes it."""
    for vendor in ("Intel", "AMD", "Apple", "Ampere", "Qualcomm"):
        if vendor.lower() in model.lower():
            return vendor
    return ""


BACKEND = CpuBackend()
