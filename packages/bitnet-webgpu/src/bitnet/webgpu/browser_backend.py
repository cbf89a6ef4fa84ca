"""The WebGPU backend in a browser's Python: adapter and device are asked for in a task, before they are probed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import js
from pyodide.ffi import JsException, can_run_sync, run_sync

from bitnet.core.errors import DeviceUnavailableError
from bitnet.core.gpu import GpuDevice
from bitnet.core.hal import (
    FAMILY_FEATURES,
    KERNEL_FEATURES,
    PREPARES,
    Device,
    DeviceInfo,
    DeviceType,
    OpenOptions,
    ProbeResult,
    ProbeStatus,
)
from bitnet.webgpu.browser import LIMITS, BrowserDriver, features_of
from bitnet.webgpu.browser_kernels import js_object, message
from bitnet.webgpu.ops import WebGPUOps
from bitnet.webgpu.source import SOURCES

ABSENT = "Use a browser with WebGPU (Chrome or Edge 113, Firefox 141, Safari 26, or later), or compute on the CPU."


class BrowserBackend:
    """The GPU that the browser prefers."""

    name = "webgpu"
    hal_api = 3

    def __init__(self) -> None:
        self._adapter: Any = None
        self._device: Any = None
        self._reason = "the browser was not asked for its GPU: load the model with `await load_model_async(...)`."

    async def request(self) -> None:
        """Ask the browser for its adapter and its device. What it lacks is in the result of :meth:`probe`."""
        self._adapter = self._device = None
        gpu = getattr(js.navigator, "gpu", None)
        if gpu is None:
            self._reason = "this browser has no WebGPU, or the page is not served by HTTPS or from this machine."
            return
        try:
            adapter = await gpu.requestAdapter(js_object({"powerPreference": "high-performance"}))
            if adapter is None:  # Chromium on a server's H200 has one all the same
                adapter = await gpu.requestAdapter()
            if adapter is None:
                self._reason = "the browser finds no GPU that it allows to use."
                return
            limits = {name: getattr(adapter.limits, name) for name in LIMITS.values()}
            wanted = ["subgroups"] if adapter.features.has("subgroups") else []
            asked = js_object({"requiredLimits": limits, "requiredFeatures": wanted})
            self._device = await adapter.requestDevice(asked)
            self._adapter = adapter
        except JsException as error:
            self._reason = f"the browser's GPU cannot be opened: {message(error)}"

    def probe(self) -> ProbeResult:
        if self._adapter is None:
            return ProbeResult(ProbeStatus.NO_DEVICE, reason=self._reason, hint=ABSENT)
        info = self._adapter.info
        described = " ".join(filter(None, (info.vendor, info.architecture, info.description))) or "GPU"
        emulated = bool(getattr(info, "isFallbackAdapter", False)) or info.architecture == "swiftshader"
        found = DeviceInfo(
            backend="webgpu",
            index="0",
            id=f"browser/{info.vendor}/{info.architecture}/{info.device}",
            description=f"{described} (browser)",
            vendor=info.vendor,
            type=DeviceType.CPU if emulated else DeviceType.INTEGRATED,
            features=(
                *sorted(features_of(self._adapter)),
                *KERNEL_FEATURES,
                *FAMILY_FEATURES,
                PREPARES,
            ),
            details={ours: str(getattr(self._adapter.limits, theirs)) for ours, theirs in LIMITS.items()},
        )
        return ProbeResult(ProbeStatus.OK, [found])

    def open(self, info: DeviceInfo, options: OpenOptions) -> Device:
        if self._device is None and can_run_sync():
            run_sync(self.request())  # each device is opened once
        if self._device is None:
            raise DeviceUnavailableError(
                f"{info.name} was opened before.", hint="Load the model again with `await load_model_async(...)`."
            )
        device, self._device = self._device, None
        driver = BrowserDriver(device, info.name, features_of(self._adapter))
        return GpuDevice(info, driver, WebGPUOps(driver.limits, emulated=info.type is DeviceType.CPU).lowering())

    def kernels(self) -> Collection[str]:
        return SOURCES.names()
