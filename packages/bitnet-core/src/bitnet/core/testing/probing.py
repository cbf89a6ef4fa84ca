"""Tests of what a backend reports before any device is open."""

from __future__ import annotations

from bitnet.core.hal import HAL_API, Backend, Device, DeviceInfo, ProbeStatus
from bitnet.core.testing.base import DeviceTests


class ProbeTests(DeviceTests):
    def test_backend_and_device_keep_the_protocol(self, device: Device, info: DeviceInfo) -> None:
        assert isinstance(self.backend, Backend)
        assert self.backend.hal_api == HAL_API
        assert isinstance(device, Device)
        assert device.info == info
        assert info.backend == self.backend.name

    def test_probe_finds_the_same_devices_again(self, device: Device) -> None:
        first, second = self.backend.probe(), self.backend.probe()
        assert first.status is ProbeStatus.OK
        names = [info.name for info in first.devices]
        assert names == [info.name for info in second.devices]
        assert len(set(names)) == len(names)
        assert device.info.name in names
