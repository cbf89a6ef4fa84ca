"""Levels that this processor supports but that no device of the CPU backend uses, because there are better ones."""

from __future__ import annotations

from bitnet.core.cpu import native
from bitnet.core.cpu.backend import BACKEND
from bitnet.core.cpu.device import CpuDevice
from bitnet.core.errors import DeviceError
from bitnet.core.hal import (
    BLOCK_TABLES,
    DETERMINISTIC,
    EXPERTS,
    HAL_API,
    KV_I8,
    LOGPROBS,
    PENALTIES,
    STATES,
    TERNARY_TABLES,
    WINDOWS,
    DeviceInfo,
    DeviceType,
    OpenOptions,
    ProbeResult,
    ProbeStatus,
)
from bitnet.core.testing import ConformanceSuite


class LevelBackend:
    name = "cpu"
    hal_api = HAL_API

    def probe(self) -> ProbeResult:
        chosen = {info.details.get("level") for info in BACKEND.probe().devices}
        rest = [level for level in native.levels(native.library().handle) if level not in chosen]
        features = (PENALTIES, LOGPROBS, BLOCK_TABLES, TERNARY_TABLES, DETERMINISTIC, KV_I8, STATES, EXPERTS, WINDOWS)
        devices = [DeviceInfo("cpu", n, f"cpu:{n}", n, "", DeviceType.CPU, features=features) for n in rest]
        return ProbeResult(ProbeStatus.OK, devices)

    def open(self, info: DeviceInfo, options: OpenOptions) -> CpuDevice:
        library = native.library().handle
        if library is None:
            raise DeviceError("no native library.", device=info.name)
        return CpuDevice(info, library, level=info.index, threads=2)

    def kernels(self) -> frozenset[str]:
        return BACKEND.kernels()


class TestOtherLevels(ConformanceSuite):
    backend = LevelBackend()
    devices = tuple(info.name for info in LevelBackend().probe().devices)  # not those that CI wants of the real backend
