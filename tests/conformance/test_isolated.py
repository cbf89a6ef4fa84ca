"""The conformance suite on a device in a process of its own: it is held to what the device itself is held to."""

from __future__ import annotations

from bitnet.core.cpu.backend import BACKEND
from bitnet.core.devices.isolated import open_isolated
from bitnet.core.hal import Device, DeviceInfo, OpenOptions
from bitnet.core.testing import ConformanceSuite


class Isolated:
    """The CPU backend, whose devices are opened in children."""

    name, hal_api, probe, kernels = BACKEND.name, BACKEND.hal_api, BACKEND.probe, BACKEND.kernels

    def open(self, info: DeviceInfo, options: OpenOptions) -> Device:
        return open_isolated(info, options)


class TestIsolated(ConformanceSuite):
    backend = Isolated()
    devices = ("cpu:scalar",)
    size = "small"
