"""Finds and opens OpenCL devices. Importing this module opens no driver; the probe does, by importing pyopencl."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from bitnet.core.errors import DeviceUnavailableError
from bitnet.core.gpu.probing import denied_nodes, devices_found, no_permission, pocl_fault
from bitnet.core.hal import Device, DeviceInfo, DeviceType, OpenOptions, ProbeResult, ProbeStatus
from bitnet.core.support.dynlib import open_library

if TYPE_CHECKING:
    import pyopencl as cl

NEEDED = (1, 2)
"""Minimum OpenCL version of a device."""
VENDORS = Path("/etc/OpenCL/vendors")
PLATFORM_NOT_FOUND = -1001
UPDATE = "Update the device's driver."
LOOK = "Check that the system sees the GPU: lspci"
INSTALL = "Install your GPU vendor's OpenCL driver (Debian: intel-opencl-icd, mesa-opencl-icd or nvidia-opencl-icd)."
NODES = ("dri/renderD*", "kfd", "nvidiactl")
"""Device nodes that OpenCL drivers open, under /dev."""


class OpenCLBackend:
    """OpenCL 1.2 and newer, any vendor."""

    name = "opencl"
    hal_api = 3

    def probe(self) -> ProbeResult:
        if find_spec("pyopencl") is None:
            hint = "pip install pyopencl"
            return ProbeResult(ProbeStatus.LIBRARY_MISSING, reason="pyopencl is not installed.", hint=hint)
        import pyopencl as cl

        from bitnet.opencl.features import version

        versions = {"opencl-needed": ".".join(map(str, NEEDED)), "pyopencl": cl.VERSION_TEXT}
        try:
            platforms = cl.get_platforms()
        except cl.Error as error:
            if error.code != PLATFORM_NOT_FOUND:
                raise
            return _no_platform(versions)
        versions |= {p.name.strip(): p.version.strip() for p in platforms}
        devices, old = [], []
        for index, (platform, device) in enumerate(_all_devices(platforms)):
            if version(device) < NEEDED:
                old.append(f"{device.name.strip()} ({device.version.strip()})")
            elif device.available and device.compiler_available:
                devices.append(_info(platform, device, index))
        if devices:
            return devices_found(devices, NODES, versions=versions)
        if old:
            reason = f"OpenCL {versions['opencl-needed']} is needed; found {', '.join(old)}."
            return ProbeResult(ProbeStatus.DRIVER_TOO_OLD, reason=reason, hint=UPDATE, versions=versions)
        if denied := denied_nodes(NODES):
            return no_permission(denied, versions=versions)
        reason = f"{', '.join(p.name.strip() for p in platforms)}: no usable device."
        return pocl_fault(versions) or ProbeResult(ProbeStatus.NO_DEVICE, reason=reason, hint=LOOK, versions=versions)

    def open(self, info: DeviceInfo, options: OpenOptions) -> Device:
        import pyopencl as cl

        from bitnet.core.gpu.clc import open_device
        from bitnet.opencl.device import OpenCLDriver

        for index, (_, device) in enumerate(_all_devices(cl.get_platforms())):
            if str(index) == info.index:
                driver = OpenCLDriver(device, info.name)
                return open_device(info, driver, driver.abilities)
        raise DeviceUnavailableError(f"{info.name} is gone since it was probed.", hint="See bitnet devices.")

    def kernels(self) -> Collection[str]:
        from bitnet.opencl.compiler import SOURCES

        return SOURCES.names()


def _all_devices(platforms: list[cl.Platform]) -> Iterator[tuple[cl.Platform, cl.Device]]:
    """Every device, in the driver's order, which numbers them."""
    import pyopencl as cl

    for platform in platforms:
        try:
            devices = platform.get_devices()
        except cl.Error:  # some platforms report that they have none as an error
            continue
        for device in devices:
            yield platform, device


def _info(platform: cl.Platform, device: cl.Device, index: int) -> DeviceInfo:
    import pyopencl as cl

    from bitnet.opencl.features import features

    kind = DeviceType.INTEGRATED if device.host_unified_memory else DeviceType.DISCRETE
    if not device.type & cl.device_type.GPU:
        kind = DeviceType.CPU
    name = device.name.strip()
    return DeviceInfo(
        backend="opencl",
        index=str(index),
        id=f"{platform.name.strip()}/{name}/{index}",
        description=f"{name} ({platform.name.strip()})",
        vendor=device.vendor.strip(),
        type=kind,
        memory=int(device.global_mem_size),
        driver_version=device.driver_version.strip(),
        features=features(device),
        details={"version": device.version.strip(), "compute_units": str(device.max_compute_units)},
    )


def _no_platform(versions: dict[str, str]) -> ProbeResult:
    """The result if the loader found no driver: why, by its folder, the libraries named there, and permissions."""
    if sys.platform != "linux":
        reason = "No OpenCL platform is registered."
        return ProbeResult(ProbeStatus.DRIVER_MISSING, reason=reason, hint=INSTALL, versions=versions)
    given = os.environ.get("OCL_ICD_VENDORS")
    folder = Path(given) if given else VENDORS
    files = sorted(folder.glob("*.icd")) if folder.is_dir() else [folder] if folder.is_file() else []
    tried: dict[str, str] = {}
    for file in files:
        result = open_library(file.read_text(errors="replace").strip())
        tried |= result.tried
    if not files:
        reason = f"{folder} names no OpenCL driver."
        hint = "Unset OCL_ICD_VENDORS, or let it name a folder of .icd files." if given else INSTALL
        return ProbeResult(ProbeStatus.DRIVER_MISSING, reason=reason, hint=hint, versions=versions)
    if any(tried.values()):
        reason = f"The drivers that {folder} names cannot be opened: {'; '.join(m for m in tried.values() if m)}"
        return ProbeResult(ProbeStatus.DRIVER_MISSING, reason=reason, hint=INSTALL, tried=tried, versions=versions)
    if denied := denied_nodes(NODES):
        return no_permission(denied, versions=versions)
    reason = f"{', '.join(tried)}: opened, but they offer no platform."
    return ProbeResult(ProbeStatus.NO_DEVICE, reason=reason, hint=LOOK, versions=versions)


BACKEND = OpenCLBackend()
