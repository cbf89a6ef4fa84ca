"""Finds and opens Vulkan devices. Importing this module opens no driver; the probe does, step by step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from bitnet.core.errors import DeviceError, DeviceUnavailableError
from bitnet.core.gpu.probing import denied_nodes, devices_found, no_library, no_permission
from bitnet.core.hal import Device, DeviceInfo, OpenOptions, ProbeResult, ProbeStatus
from bitnet.core.support.dynlib import open_library

if TYPE_CHECKING:
    from bitnet.vulkan.hardware import Hardware

NEEDED = "1.1"
"""Minimum Vulkan version of a device."""
NODES = ("dri/renderD*", "nvidiactl", "nvidia[0-9]*")
"""Device nodes that Vulkan drivers open, under /dev."""
INSTALL = "Install your GPU vendor's Vulkan driver (Debian: mesa-vulkan-drivers or nvidia-driver)."
OPEN = {
    ProbeStatus.DRIVER_MISSING: f"{INSTALL} The loader comes with it (Debian: libvulkan1).",
    ProbeStatus.NO_PERMISSION: "Let this user read the loader's library and what it depends on.",
    ProbeStatus.BROKEN: "Reinstall the Vulkan loader (Debian: apt install --reinstall libvulkan1).",
}
"""Hints for a loader that does not open."""
UPDATE = "Update the device's driver."
LOOK = "Check that the system sees the GPU: vulkaninfo --summary"


class VulkanBackend:
    """Vulkan 1.1 and newer, any vendor."""

    name = "vulkan"
    hal_api = 3

    def probe(self) -> ProbeResult:
        from bitnet.vulkan.driver import LOADER, binding

        if binding() is None:
            reason = "The Python package vulkan is not installed."
            return ProbeResult(ProbeStatus.LIBRARY_MISSING, reason=reason, hint="pip install vulkan")
        if not (found := open_library(LOADER)):
            return no_library("The Vulkan loader", found, OPEN)
        return _probe_loader(dict(found.tried))

    def open(self, info: DeviceInfo, options: OpenOptions) -> Device:
        from bitnet.core.gpu import GpuDevice
        from bitnet.vulkan.device import VulkanDriver
        from bitnet.vulkan.driver import Instance
        from bitnet.vulkan.hardware import inspect
        from bitnet.vulkan.ops import VulkanOps

        instance = Instance(info.name)
        for index, physical in enumerate(instance.physical_devices()):
            hardware = inspect(instance, physical, index)
            if hardware is not None and (hardware.info.index, hardware.info.id) == (info.index, info.id):
                return GpuDevice(info, VulkanDriver(hardware, info.name), VulkanOps(hardware).lowering())
        raise DeviceUnavailableError(f"{info.name} is gone since it was probed.", hint="See bitnet devices.")

    def kernels(self) -> Collection[str]:
        from bitnet.vulkan.compiler import KERNELS
        from bitnet.vulkan.modules import all_modules

        return {f"{made.entry}_vulkan" for made in all_modules(KERNELS)}


def _probe_loader(tried: dict[str, str]) -> ProbeResult:
    from bitnet.vulkan.driver import Instance, NoDriverError
    from bitnet.vulkan.hardware import NEEDED_BUFFERS, Hardware, inspect

    versions = {"vulkan-needed": NEEDED}
    with contextlib.suppress(PackageNotFoundError):
        versions["vulkan (Python)"] = version("vulkan")

    libraries: dict[str, Any] = {"tried": tried, "versions": versions}
    found, physical = list[Hardware](), []
    why = ProbeStatus.NO_DEVICE, "The Vulkan drivers offer no device.", LOOK
    try:
        instance = Instance()
        physical = instance.physical_devices()
        found = [known for i, device in enumerate(physical) if (known := inspect(instance, device, i)) is not None]
    except NoDriverError:
        given = next((name for name in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES") if os.environ.get(name)), "")
        hint = f"Unset {given}, or let it name a driver's .json file." if given else INSTALL
        why = ProbeStatus.DRIVER_MISSING, "The Vulkan loader finds no driver.", hint
    except DeviceError as error:
        hint = "Run vulkaninfo --summary and see the system's log."
        why = ProbeStatus.BROKEN, f"The Vulkan driver does not start: {error.message}", hint
    if usable := [hardware for hardware in found if hardware.buffers >= NEEDED_BUFFERS]:
        return devices_found([_info(hardware) for hardware in usable], NODES, **libraries)
    if found:
        names = ", ".join(f"{hardware.info.description} ({hardware.buffers})" for hardware in found)
        reason = f"A kernel binds {NEEDED_BUFFERS} storage buffers; the device takes fewer: {names}."
        why = ProbeStatus.UNSUPPORTED, reason, "Use another backend for this device: bitnet devices."
    elif physical:
        why = ProbeStatus.DRIVER_TOO_OLD, f"Vulkan {NEEDED} with a compute queue is needed.", UPDATE
    elif denied := denied_nodes(NODES):
        return no_permission(denied, **libraries)
    status, reason, hint = why
    return ProbeResult(status, reason=reason, hint=hint, **libraries)


def _info(found: Hardware) -> DeviceInfo:
    from bitnet.vulkan.compiler import ways

    details = {**found.info.details, "note": ways().text}
    return replace(found.info, features=found.used, details=details)


BACKEND = VulkanBackend()
