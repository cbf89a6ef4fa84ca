"""Fake GPUs for tests of device selection: ``BITNET_GPU_FAKE=cuda,opencl``. The reference device computes."""

from __future__ import annotations

from collections.abc import Sequence

from bitnet.core.errors import DeviceUnavailableError
from bitnet.core.hal import HAL_API, Device, DeviceInfo, DeviceType, OpenOptions, ProbeResult, ProbeStatus

HINT = "Unset BITNET_GPU_FAKE or BITNET_STRICT_MODE."
"""Hint if both variables are set."""


class FakeBackend:
    """A backend with fake discrete GPUs. Receipts made with it say so and do not verify."""

    hal_api = HAL_API

    def __init__(self, name: str, devices: int) -> None:
        self.name = name
        self._devices = [
            DeviceInfo(
                backend=name,
                index=str(i),
                id=f"fake-{name}-{i}",
                description=f"fake {name} device, computed by numpy",
                vendor="BITNET_GPU_FAKE",
                type=DeviceType.DISCRETE,
            )
            for i in range(devices)
        ]

    def probe(self) -> ProbeResult:
        return ProbeResult(ProbeStatus.OK, self._devices)

    def open(self, info: DeviceInfo, options: OpenOptions) -> Device:
        if options.strict:
            raise DeviceUnavailableError(f"{info.name} is a fake device, which strict mode refuses.", hint=HINT)
        from bitnet.core.reference import ReferenceDevice

        return ReferenceDevice(info)

    def kernels(self) -> Sequence[str]:
        return ()
