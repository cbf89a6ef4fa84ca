"""Finds and opens CUDA devices. Importing this module opens no driver; the probe does, step by step."""

from __future__ import annotations

import sys
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any
from uuid import UUID

from bitnet.core.gpu.probing import denied_nodes, no_library, no_permission
from bitnet.core.hal import (
    FAMILY_FEATURES,
    KERNEL_FEATURES,
    LOOK_AHEAD,
    PREPARES,
    Device,
    DeviceInfo,
    DeviceType,
    OpenOptions,
    ProbeResult,
    ProbeStatus,
)
from bitnet.core.support.dynlib import open_library

DRIVER = {"linux": ["libcuda.so.1"], "win32": ["nvcuda.dll"]}
CAPABILITY = (7, 5)
"""Minimum compute capability, the lowest that NVRTC 13 supports."""
LARGE_STEP, LARGE_STEP_MEMORY = 2048, 16 << 30
"""Fastest number of tokens per step for the kernels of compute capability 9.0 (on an H200, 1.5 times the throughput of
512), and the device memory in bytes from which their activations (0.1 to 0.3 MB each) do not matter."""
NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE."""
NODES = ("nvidiactl", "nvidia-uvm", "nvidia[0-9]*")
"""Device nodes the driver opens, under /dev."""
OPEN = {
    ProbeStatus.DRIVER_MISSING: "Install the NVIDIA driver (Debian: apt install nvidia-driver); no toolkit is needed.",
    ProbeStatus.NO_PERMISSION: "Let this user read the driver's library and what it depends on.",
    ProbeStatus.BROKEN: "Reinstall the NVIDIA driver: its files do not match each other or this processor.",
}
"""Hints for a driver library that does not open."""
UPDATE = "Update the NVIDIA driver: https://www.nvidia.com/drivers"
REINSTALL = "pip install --force-reinstall bitnet-cuda"


class CudaBackend:
    """NVIDIA GPUs of compute capability 7.5 and newer."""

    name = "cuda"
    hal_api = 3

    def probe(self) -> ProbeResult:
        if missing := _missing_library():
            return ProbeResult(ProbeStatus.LIBRARY_MISSING, reason=missing, hint=REINSTALL)
        found = open_library(DRIVER)
        if not found:
            names = "" if found.tried else f"on {sys.platform}, which NVIDIA's driver does not support"
            return no_library("The NVIDIA driver", found, OPEN, names=names)
        return _probe_driver(dict(found.tried))

    def open(self, info: DeviceInfo, options: OpenOptions) -> Device:
        from bitnet.core.gpu import GpuDevice
        from bitnet.cuda.device import CudaDriver
        from bitnet.cuda.ops import CudaOps

        driver = CudaDriver(int(info.index), info.name)
        return GpuDevice(info, driver, CudaOps(driver.multiprocessors, driver.capability).lowering())

    def kernels(self) -> Collection[str]:
        from bitnet.cuda.ops import SOURCES

        return SOURCES.names()


def _missing_library() -> str:
    """Which of the bindings and the run-time compiler is missing; empty if none."""
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        return "cuda-bindings is not installed."
    from cuda.bindings import nvrtc

    try:
        nvrtc.nvrtcVersion()
    except Exception as error:  # cuda-bindings raises its loader's own types
        return f"NVRTC, the run-time compiler, cannot be opened: {error}"
    return ""


def _probe_driver(tried: dict[str, str]) -> ProbeResult:
    from cuda.bindings import driver, nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    _, have = driver.cuDriverGetVersion()
    versions = {"driver": _text(have), "driver-needed": f"{major}.0", "nvrtc": f"{major}.{minor}"}
    for package in ("cuda-bindings", "nvidia-cuda-nvrtc"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue

    def result(status: ProbeStatus, reason: str, hint: str) -> ProbeResult:
        return ProbeResult(status, reason=reason, hint=hint, tried=tried, versions=versions)

    if have // 1000 < major:
        reason = f"The driver supports CUDA {_text(have)}; the kernels' compiler needs {major}.0 or newer."
        return result(ProbeStatus.DRIVER_TOO_OLD, reason, UPDATE)
    (status,) = driver.cuInit(0)
    if status != driver.CUresult.CUDA_SUCCESS:
        if denied := denied_nodes(NODES):
            hint = f"sudo chmod a+rw {' '.join(denied)}"
            return no_permission(denied, tried=tried, versions=versions, hint=hint)
        if status == NO_DEVICE:
            return result(
                ProbeStatus.NO_DEVICE, "The driver sees no NVIDIA GPU.", "Check CUDA_VISIBLE_DEVICES and nvidia-smi."
            )
        return result(
            ProbeStatus.BROKEN, f"The driver does not start: {status.name}.", "See nvidia-smi and the system's log."
        )
    _, count = driver.cuDeviceGetCount()
    infos: list[DeviceInfo] = []
    old: list[DeviceInfo] = []
    for index in range(count):
        info, capability = _info(index, _text(have))
        (infos if capability >= CAPABILITY else old).append(info)
    if infos:
        return ProbeResult(ProbeStatus.OK, infos, tried=tried, versions=versions)
    if old:
        reason = (
            f"{', '.join(i.description for i in old)}: compute capability {'.'.join(map(str, CAPABILITY))} is needed."
        )
        return result(ProbeStatus.UNSUPPORTED, reason, "Use bitnet-opencl or bitnet-vulkan for this GPU.")
    return result(ProbeStatus.NO_DEVICE, "The driver sees no NVIDIA GPU.", "Check CUDA_VISIBLE_DEVICES and nvidia-smi.")


def _info(index: int, driver_version: str) -> tuple[DeviceInfo, tuple[int, int]]:
    from cuda.bindings import driver

    from bitnet.cuda.device import capability_of
    from bitnet.cuda.driver import check

    name = f"cuda:{index}"
    attribute = driver.CUdevice_attribute

    def get(result: tuple[Any, ...]) -> Any:
        return check(name, result)

    device = get(driver.cuDeviceGet(index))
    capability = capability_of(device, name)
    uuid = UUID(bytes=bytes(get(driver.cuDeviceGetUuid(device)).bytes))
    integrated = get(driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_INTEGRATED, device))
    multiprocessors = get(driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device))
    memory = int(get(driver.cuDeviceTotalMem(device)))
    features = ["int8-dot", "f16", *KERNEL_FEATURES, *FAMILY_FEATURES]
    features += [PREPARES, LOOK_AHEAD]
    features += ["int8-tensor-cores"] if capability >= (8, 0) else []
    features += ["dependent-launch"] if capability >= (9, 0) else []
    info = DeviceInfo(
        backend="cuda",
        index=str(index),
        id=f"GPU-{uuid}",
        description=get(driver.cuDeviceGetName(128, device)).split(b"\0")[0].decode(),
        vendor="NVIDIA",
        type=DeviceType.INTEGRATED if integrated else DeviceType.DISCRETE,
        memory=memory,
        driver_version=driver_version,
        features=tuple(features),
        details={
            "compute_capability": ".".join(map(str, capability)),
            "multiprocessors": str(multiprocessors),
            "pci": get(driver.cuDeviceGetPCIBusId(32, device)).split(b"\0")[0].decode(),
        },
        step_tokens=LARGE_STEP if capability >= (9, 0) and memory >= LARGE_STEP_MEMORY else 0,
    )
    return info, capability


def _text(number: int) -> str:
    """CUDA's version numbers count 1000 · major + 10 · minor."""
    return f"{number // 1000}.{number % 1000 // 10}"


BACKEND = CudaBackend()
