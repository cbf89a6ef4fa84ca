"""The Vulkan backend against the operations' contract; any message of the validation layer fails a test.

It runs on every device of the machine, and on SwiftShader too where that is installed. Loader and layer read their
environment when an instance is made, so it is set for as long as that takes: other tests see the machine as it is.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from bitnet.core.errors import DeviceError
from bitnet.core.hal import Device, DeviceInfo, DeviceType, Limits, OpenOptions, ProbeResult
from bitnet.core.testing import ConformanceSuite
from bitnet.core.testing.model import TinyModel
from bitnet.vulkan import driver
from bitnet.vulkan.backend import VulkanBackend
from bitnet.vulkan.device import VulkanDriver
from bitnet.vulkan.driver import Functions, NoDriverError, binding, text

SWIFTSHADER = Path("/usr/lib/chromium/vk_swiftshader_icd.json")
"""Where Debian's chromium-common puts it, out of the loader's search path; VK_ADD_DRIVER_FILES can name another."""
LAYER = "VK_LAYER_KHRONOS_validation"


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """These variables, and afterwards what there was."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class SoftwareVulkan(VulkanBackend):
    """The backend, with SwiftShader among its drivers where it is installed, and the layer's messages in a file."""

    def __init__(self, folder: Path) -> None:
        self.log, self._read = folder / "validation.log", 0
        (folder / "vk_layer_settings.txt").write_text(
            "khronos_validation.debug_action = VK_DBG_LAYER_ACTION_LOG_MSG\n"
            "khronos_validation.report_flags = error,warn,perf\n"
            f"khronos_validation.log_filename = {self.log}\n"
        )
        self._layer = {"VK_INSTANCE_LAYERS": LAYER} if has_layer() else {}
        self._environment = {"VK_LAYER_SETTINGS_PATH": str(folder)}
        if SWIFTSHADER.exists() and "VK_ADD_DRIVER_FILES" not in os.environ:
            self._environment["VK_ADD_DRIVER_FILES"] = str(SWIFTSHADER)

    def probe(self) -> ProbeResult:
        with environment(self._environment):
            return super().probe()

    def open(self, info: DeviceInfo, options: OpenOptions) -> Device:
        with environment({**self._environment, **self._layer}):
            return super().open(info, options)

    def unread(self) -> str:
        """What the layer has said since this was asked last."""
        said = self.log.read_text(errors="replace") if self.log.exists() else ""
        self._read, before = len(said), self._read
        return said[before:]


def has_layer() -> bool:
    """Whether the validation layer is installed; a loader refuses instances that name it where it is not."""
    if binding() is None:
        return False
    try:
        layers = Functions("vulkan").listed("EnumerateInstanceLayerProperties", "VkLayerProperties")
    except NoDriverError:  # no Vulkan loader
        return False
    return LAYER in [text(layer.layerName) for layer in layers]


FOLDER = tempfile.TemporaryDirectory(prefix="bitnet-vulkan-")  # removed when the interpreter exits
SOFTWARE = SoftwareVulkan(Path(FOLDER.name))


@pytest.fixture(autouse=True)
def silent_layer() -> Iterator[None]:
    """Fails a test that gives the validation layer a reason to speak."""
    SOFTWARE.unread()
    yield
    assert SOFTWARE.unread() == ""


class TestConformance(ConformanceSuite):
    backend = SOFTWARE
    size = "small"  # software devices; on a GPU run it with BITNET_CONFORMANCE=quick

    def largest_binding(self, driver: VulkanDriver) -> int:
        return driver.hardware.largest_binding


def test_the_layer_is_on(require_device: Callable[[str, str | None], None]) -> None:
    """A buffer of no bytes is forbidden: the layer must say so, where the tests above look."""
    require_device("vulkan-validation", None if has_layer() else "the validation layer is not installed")
    found = SOFTWARE.probe().devices
    require_device("vulkan:0", None if found else "there is no Vulkan device")
    device = SOFTWARE.open(found[0], OpenOptions())
    opened = device._driver  # type: ignore[attr-defined]
    assert isinstance(opened, VulkanDriver)
    try:
        opened._vk.create("Buffer", usage=0x20)
    except DeviceError:
        pass
    finally:
        device.close()
    assert "VUID-VkBufferCreateInfo-size-00912" in SOFTWARE.unread()


def test_a_loader_older_than_the_devices(
    require_device: Callable[[str, str | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a device's newer version has built in is an extension to be asked for then, as the layer would tell."""
    found = SOFTWARE.probe().devices
    require_device("vulkan:0", None if found else "there is no Vulkan device")
    monkeypatch.setenv("VK_NONE_READS_THIS", "1")  # another environment has an instance of its own
    monkeypatch.setattr(driver, "VERSION_1_3", driver.VERSION_1_2)  # the newest that instances are made for
    model, limits = TinyModel(np.random.default_rng(), layers=1), Limits(4, 1, 1, 1)
    for info in SOFTWARE.probe().devices:
        device = SOFTWARE.open(info, OpenOptions())
        try:
            assert info.details["vulkan"] <= "1.2.0"
            device.compile(model.program(limits, 1)).close()
        finally:
            device.close()


def test_software_devices_are_no_gpus(require_device: Callable[[str, str | None], None]) -> None:
    """They are listed and can be named, but are of a type that is never chosen by itself."""
    known = [i for i in SOFTWARE.probe().devices if "llvmpipe" in i.description or "SwiftShader" in i.description]
    require_device("vulkan:0", None if known else "there is no Vulkan device in software")
    assert {info.type for info in known} == {DeviceType.CPU}
