"""Finding and opening Vulkan devices. Importing this opens no driver: the probe does, step by step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from bitnet.core.dynlib import open_library
from bitnet.core.errors import DeviceError, DeviceUnavailableError
from bitnet.core.gpu.probing import denied_nodes, no_permission
from bitnet.core.hal import HAL_API, Device, DeviceInfo, ProbeResult, ProbeStatus

if TYPE_CHECKING:
    from bitnet.vulkan.hardware import Hardware

NEEDED = "1.1"
"""Least Vulkan version of a device."""
NODES = ("dri/renderD*", "nvidiactl", "nvidia[0-9]*")
"""Device nodes that Vulkan drivers open, under /dev."""
INSTALL = "Install your GPU vendor's Vulkan driver (Debian: mesa-vulkan-drivers or nvidia-driver)."
OPEN = {
    ProbeStatus.DRIVER_MISSING: f"{INSTALL} The loader comes with it (Debian: libvulkan1).",
    ProbeStatus.NO_PERMISSION: "Let this user read the loader's library and what it depends on.",
    ProbeStatus.BROKEN: "Reinstall the Vulkan loader (Debian: apt install --reinstall libvulkan1).",
}
"""Hints where the loader does not open."""
UPDATE = "Update the device's driver."
LOOK = "Check that the system sees the GPU: vulkaninfo --summary"


class VulkanBackend:
    """Vulkan 1.1 and newer, any vendor."""

    name = "vulkan"
    hal_api = HAL_API

    def probe(self) -> ProbeResult:
        from bitnet.vulkan.driver import LOADER, binding

        if binding() is None:
            reason = "The Python package vulkan is not installed."
            return ProbeResult(ProbeStatus.LIBRARY_MISSING, reason=reason, hint="pip install vulkan")
        found = open_library(LOADER)
        if not found:
            statuses = {"no-permission": ProbeStatus.NO_PERMISSION, "broken": ProbeStatus.BROKEN}
            status = statuses.get(found.failure, ProbeStatus.DRIVER_MISSING)
            why = "; ".join(filter(None, found.tried.values())) if status is not ProbeStatus.DRIVER_MISSING else ""
            reason = f"The Vulkan loader cannot be opened: {', '.join(found.tried)}{f' ({why})' if why else ''}."
            return ProbeResult(status, reason=reason, hint=OPEN[status], tried=found.tried)
        return _probe_loader(dict(found.tried))

    def open(self, info: DeviceInfo) -> Device:
        from bitnet.core.gpu import GpuDevice
        from bitnet.vulkan.device import VulkanDriver
        from bitnet.vulkan.driver import Instance
        from bitnet.vulkan.hardware import inspect
        from bitnet.vulkan.ops import VulkanOps

        instance = Instance(info.name)
        for index, physical in enumerate(instance.physical_devices()):
            hardware = inspect(instance, physical, index)
            if hardware is not None and str(index) == info.index and hardware.id == info.details.get("uuid"):
                return GpuDevice(info, VulkanDriver(hardware, info.name), VulkanOps(hardware).lowering())
        raise DeviceUnavailableError(f"{info.name} is gone since it was probed.", hint="See bitnet devices.")

    def kernels(self) -> Collection[str]:
        from bitnet.vulkan.ops import SOURCES

        return SOURCES.names()


def _probe_loader(tried: dict[str, str]) -> ProbeResult:
    from bitnet.vulkan.driver import Instance
    from bitnet.vulkan.hardware import NEEDED_BUFFERS, inspect

    versions = {"vulkan-needed": NEEDED}
    with contextlib.suppress(PackageNotFoundError):
        versions["vulkan (Python)"] = version("vulkan")

    def result(status: ProbeStatus, reason: str, hint: str) -> ProbeResult:
        return ProbeResult(status, reason=reason, hint=hint, tried=tried, versions=versions)

    try:
        instance = Instance()
        physical = instance.physical_devices()
        inspected = [inspect(instance, device, index) for index, device in enumerate(physical)]
    except DeviceError as error:
        return _no_driver(error, tried, versions)
    usable = [found for found in inspected if found is not None and found.buffers >= NEEDED_BUFFERS]
    if usable:
        return ProbeResult(ProbeStatus.OK, [_info(found) for found in usable], tried=tried, versions=versions)
    if few := [found for found in inspected if found is not None]:
        names = ", ".join(f"{found.name} ({found.buffers})" for found in few)
        reason = f"A kernel binds {NEEDED_BUFFERS} storage buffers; the device takes fewer: {names}."
        return result(ProbeStatus.UNSUPPORTED, reason, "Use another backend for this device: bitnet devices.")
    if physical:
        return result(ProbeStatus.DRIVER_TOO_OLD, f"Vulkan {NEEDED} with a compute queue is needed.", UPDATE)
    if denied := denied_nodes(NODES):
        return no_permission(denied, tried=tried, versions=versions)
    return result(ProbeStatus.NO_DEVICE, "The Vulkan drivers offer no device.", LOOK)


def _no_driver(error: DeviceError, tried: dict[str, str], versions: dict[str, str]) -> ProbeResult:
    """Say why there is no instance: no driver that the loader can use, no rights on its device, or a broken one."""
    if denied := denied_nodes(NODES):
        return no_permission(denied, tried=tried, versions=versions)
    if "VK_ERROR_INCOMPATIBLE_DRIVER" in error.message:
        reason, status, hint = "The Vulkan loader finds no driver.", ProbeStatus.DRIVER_MISSING, INSTALL
        given = next((n for n in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES") if os.environ.get(n)), "")
        if given:
            hint = f"Unset {given}, or let it name a driver's .json file."
    else:
        reason, status = f"The Vulkan driver does not start: {error.message}", ProbeStatus.BROKEN
        hint = "Run vulkaninfo --summary and see the system's log."
    return ProbeResult(status, reason=reason, hint=hint, tried=tried, versions=versions)


def _info(found: Hardware) -> DeviceInfo:
    from bitnet.vulkan.compiler import ways

    u = found.id
    return DeviceInfo(
        backend="vulkan",
        index=str(found.index),
        id=f"{u[:8]}-{u[8:12]}-{u[12:16]}-{u[16:20]}-{u[20:]}",
        description=found.name,
        vendor=found.vendor,
        type=found.type,
        memory=found.memory,
        driver_version=found.driver,
        features=found.used,
        details={"vulkan": found.version_text, "uuid": u, "note": ways().text},
    )


BACKEND = VulkanBackend()
