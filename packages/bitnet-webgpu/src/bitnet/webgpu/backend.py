"""Finds and opens WebGPU adapters. Importing this module opens no driver; the probe does, by importing wgpu."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from bitnet.core.errors import DeviceUnavailableError
from bitnet.core.gpu.probing import denied_nodes, device_nodes, devices_found, no_permission
from bitnet.core.hal import (
    FAMILY_FEATURES,
    KERNEL_FEATURES,
    PREPARES,
    Backend,
    Device,
    DeviceInfo,
    DeviceType,
    OpenOptions,
    ProbeResult,
    ProbeStatus,
)
from bitnet.core.support.dynlib import open_library, without_display

if TYPE_CHECKING:
    import wgpu

APIS = ("Vulkan", "Metal", "D3D12")
"""The APIs below wgpu that are supported, best first. Over OpenGL it lacks features that the kernels need."""
INSTANCES = ("Vulkan", "Metal", "DX12")
"""The same, under the names of wgpu's instance."""
TYPES = {"DiscreteGPU": DeviceType.DISCRETE, "IntegratedGPU": DeviceType.INTEGRATED, "CPU": DeviceType.CPU}
FEATURES = {"subgroup": "subgroups", "shader-f16": "f16", "timestamp-query": "timestamps"}
LOADER = {"linux": ["libvulkan.so.1"]}
INSTALL = "Install your GPU vendor's Vulkan driver (Debian: mesa-vulkan-drivers or nvidia-driver, with libvulkan1)."
REINSTALL = "pip install --force-reinstall wgpu"
NODES = ("dri/renderD*", "nvidiactl")
"""Device nodes that Vulkan drivers open, under /dev."""


class WebGPUBackend:
    """Any GPU that wgpu reaches through Vulkan, Metal or Direct3D 12.

    Args:
        without: Features that the kernels must not use even if the device has them.
    """

    name = "webgpu"
    hal_api = 3

    def __init__(self, without: Collection[str] = ()) -> None:
        self._without = without

    def probe(self) -> ProbeResult:
        if find_spec("wgpu") is None:
            return ProbeResult(ProbeStatus.LIBRARY_MISSING, reason="wgpu is not installed.", hint="pip install wgpu")
        if sys.platform == "linux" and not open_library(LOADER):  # known before the third of a second that wgpu takes
            return _nothing([], {"wgpu": version("wgpu")})
        try:
            adapters = _adapters()
        except (ImportError, OSError, RuntimeError) as error:  # the library in its wheel does not open
            reason = f"wgpu cannot be opened: {error}"
            return ProbeResult(ProbeStatus.LIBRARY_MISSING, reason=reason, hint=REINSTALL)
        versions = {"wgpu": version("wgpu")}
        usable = _usable(adapters)
        if usable:
            devices = [_info(adapter, index) for index, adapter in enumerate(usable)]
            return devices_found(devices, NODES, versions=versions)
        return _nothing([str(a.info["device"]) for a in adapters], versions)

    def open(self, info: DeviceInfo, options: OpenOptions) -> Device:
        from bitnet.core.gpu import GpuDevice
        from bitnet.webgpu.device import WebGPUDriver
        from bitnet.webgpu.ops import WebGPUOps

        usable = _usable(_adapters())
        index = int(info.index)
        if index >= len(usable) or _info(usable[index], index).id != info.id:
            raise DeviceUnavailableError(f"{info.name} is gone since it was probed.", hint="See bitnet devices.")
        driver = WebGPUDriver(usable[index], info.name, self._without)
        return GpuDevice(info, driver, WebGPUOps(driver.limits).lowering())

    def kernels(self) -> Collection[str]:
        from bitnet.webgpu.source import SOURCES

        return SOURCES.names()


def _adapters() -> list[wgpu.GPUAdapter]:
    """Every adapter that wgpu finds, in its order."""
    import wgpu
    from wgpu.backends.wgpu_native.extras import set_instance_extras

    with contextlib.suppress(RuntimeError), without_display():  # wgpu's only instance was created before
        set_instance_extras(backends=INSTANCES)
    found: list[wgpu.GPUAdapter] = wgpu.gpu.enumerate_adapters_sync()
    return found


def _usable(adapters: list[wgpu.GPUAdapter]) -> list[wgpu.GPUAdapter]:
    """One adapter per device, through the best API for it, in a stable order, which numbers the devices."""
    taken: dict[tuple[object, ...], set[str]] = {}
    usable = []
    for adapter in sorted((a for a in adapters if a.info["backend_type"] in APIS), key=_rank):
        info = adapter.info
        device = info["vendor_id"], info["device_id"]
        apis = taken.setdefault(device, set())
        # Two alike cards come twice through one API; a card that comes through a second API is not another one.
        if not apis or info["backend_type"] in apis:
            apis.add(info["backend_type"])
            usable.append(adapter)
    return usable


def _rank(adapter: wgpu.GPUAdapter) -> int:
    return APIS.index(adapter.info["backend_type"])


def _info(adapter: wgpu.GPUAdapter, index: int) -> DeviceInfo:
    info, limits = adapter.info, adapter.limits
    shown = ("max-buffer-size", "max-storage-buffer-binding-size", "max-compute-workgroup-storage-size")
    found = (text for feature, text in FEATURES.items() if feature in adapter.features)
    return DeviceInfo(
        backend="webgpu",
        index=str(index),
        id=f"{info['backend_type']}/{info['vendor_id']:04x}:{info['device_id']:04x}/{info['device']}/{index}",
        description=f"{info['device']} ({info['backend_type']})",
        vendor=info["vendor"] or f"{info['vendor_id']:04x}",
        type=TYPES.get(info["adapter_type"], DeviceType.VIRTUAL),
        driver_version=info["description"],
        features=(*found, *KERNEL_FEATURES, *FAMILY_FEATURES, PREPARES),
        details={"api": info["backend_type"], **{name: str(limits[name]) for name in shown}},
    )


def _nothing(others: list[str], versions: dict[str, str]) -> ProbeResult:
    """The result if there is no adapter: only other APIs, no Vulkan loader, no permission, or no device."""

    def result(status: ProbeStatus, reason: str, hint: str, tried: dict[str, str] | None = None) -> ProbeResult:
        return ProbeResult(status, reason=reason, hint=hint, tried=tried or {}, versions=versions)

    if others:
        reason = f"{', '.join(others)}: reached through OpenGL only; Vulkan, Metal or Direct3D 12 is needed."
        return result(ProbeStatus.UNSUPPORTED, reason, INSTALL)
    if sys.platform != "linux":
        return result(ProbeStatus.NO_DEVICE, "wgpu finds no GPU.", "Update the graphics driver.")
    loader = open_library(LOADER)
    if not loader:
        reason = f"The Vulkan loader cannot be opened: {'; '.join(loader.tried.values())}."
        return result(ProbeStatus.DRIVER_MISSING, reason, INSTALL, dict(loader.tried))
    if denied := denied_nodes(NODES):
        return no_permission(denied, tried=dict(loader.tried), versions=versions)
    if nodes := device_nodes(NODES):
        reason = f"There is {', '.join(map(str, nodes))}, but no Vulkan driver that takes it."
        return result(ProbeStatus.DRIVER_MISSING, reason, INSTALL, dict(loader.tried))
    return result(ProbeStatus.NO_DEVICE, "Vulkan finds no device.", INSTALL, dict(loader.tried))


BACKEND: Backend
if sys.platform == "emscripten":
    from bitnet.webgpu.browser_backend import BrowserBackend

    BACKEND = BrowserBackend()
else:
    BACKEND = WebGPUBackend()
