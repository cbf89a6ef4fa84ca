"""The conformance suite on a device in a process of its own: it is held to what the device itself is held to."""

from __future__ import annotations

import bitnet.opencl.backend
from bitnet.core.cpu.backend import BACKEND
from bitnet.core.devices.isolated import open_isolated
from bitnet.core.hal import Backend, Device, DeviceInfo, OpenOptions
from bitnet.core.testing import ConformanceSuite
from bitnet.core.testing.starting import LookAheadTests


class Isolated:
    """A backend whose devices are opened in children."""

    def __init__(self, backend: Backend) -> None:
        self.name, self.hal_api, self.probe, self.kernels = (
            backend.name,
            backend.hal_api,
            backend.probe,
            backend.kernels,
        )

    def open(self, info: DeviceInfo, options: OpenOptions) -> Device:
        return open_isolated(info, options)


class TestIsolated(ConformanceSuite):
    backend = Isolated(BACKEND)
    devices = ("cpu:scalar",)
    size = "small"


class TestIsolatedLookAhead(LookAheadTests):
    """OpenCL's devices go on before the host has the last tokens, which no level of the CPU does."""

    backend = Isolated(bitnet.opencl.backend.BACKEND)
    size = "small"
