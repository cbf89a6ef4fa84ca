"""Finding and opening spirv-cpu devices. Importing this opens no driver: only the probe does."""

from __future__ import annotations

from collections.abc import Collection

from bitnet.core.errors import DeviceUnavailableError
from bitnet.core.hal import (
    HAL_API,
    KERNEL_FEATURES,
    PREPARES,
    Device,
    DeviceInfo,
    DeviceType,
    OpenOptions,
    ProbeResult,
    ProbeStatus,
)

FEATURES = {"cl_khr_fp16": "f16", "cl_khr_integer_dot_product": "int8-dot", "cl_khr_subgroups": "subgroups"}


def find_devices() -> list[DeviceInfo]:
    """Every device that takes SPIR-V, in the driver's order, which numbers them."""
    from bitnet.spirv_cpu import api

    found = []
    for index, device in enumerate(api.devices()):
        if not api.text(device, api.IL_VERSION):
            continue
        extensions = api.text(device, api.EXTENSIONS).split()
        info = DeviceInfo(
            backend="spirv-cpu",
            index=str(index),
            id=f"{api.text(device, api.NAME)}/{index}",
            description=api.text(device, api.NAME),
            vendor=api.text(device, api.VENDOR),
            type=DeviceType.CPU,
            memory=api.number(device, api.GLOBAL_MEM_SIZE),
            driver_version=api.text(device, api.DRIVER_VERSION),
            features=(
                *(name for extension, name in FEATURES.items() if extension in extensions),
                *KERNEL_FEATURES,
                PREPARES,
            ),
        )
        found.append(info)
    return found


class SpirvCpuBackend:
    """Devices of Intel's OpenCL for CPUs, by SPIR-V."""

    name = "spirv-cpu"
    hal_api = HAL_API

    def probe(self) -> ProbeResult:
        from bitnet.spirv_cpu.api import library
        from bitnet.spirv_cpu.ops import unwritten

        devices = find_devices()
        if missing := unwritten():
            reason = f"spirv-cpu is not written yet: {len(missing)} parts are missing, {missing[0]} first."
            hint = "packages/bitnet-spirv-cpu/README.md says what to write; bitnet devices lists others."
            return ProbeResult(ProbeStatus.UNSUPPORTED, devices, reason=reason, hint=hint)
        if not library():
            reason, hint = "libintelocl.so cannot be opened.", "pip install intel-opencl-rt"
            return ProbeResult(ProbeStatus.DRIVER_MISSING, reason=reason, hint=hint, tried=library().tried)
        if not devices:
            return ProbeResult(ProbeStatus.NO_DEVICE, reason="There is no spirv-cpu device.")
        return ProbeResult(ProbeStatus.OK, devices)

    def open(self, info: DeviceInfo, options: OpenOptions) -> Device:
        from bitnet.spirv_cpu.device import SpirvCpuDriver
        from bitnet.spirv_cpu.ops import open_device

        if info not in find_devices():
            raise DeviceUnavailableError(f"{info.name} is gone since it was probed.", hint="See bitnet devices.")
        return open_device(info, SpirvCpuDriver(info))

    def kernels(self) -> Collection[str]:
        from bitnet.spirv_cpu.ops import SOURCES

        return SOURCES.names()


BACKEND = SpirvCpuBackend()
