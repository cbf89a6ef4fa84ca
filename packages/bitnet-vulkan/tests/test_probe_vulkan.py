"""The probe's result if Vulkan is missing, broken, old or forbidden, and for the available devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bitnet.core.errors import DeviceUnavailableError
from bitnet.core.hal import (
    FAMILY_FEATURES,
    KERNEL_FEATURES,
    DeviceInfo,
    DeviceType,
    OpenOptions,
    ProbeResult,
    ProbeStatus,
)
from bitnet.core.support.dynlib import Library, open_library
from bitnet.vulkan import backend as module
from bitnet.vulkan import driver, hardware
from bitnet.vulkan.backend import BACKEND
from bitnet.vulkan.hardware import Hardware

linux = pytest.mark.skipif(sys.platform != "linux", reason="drivers' files and device nodes are Linux's")
Patch = pytest.MonkeyPatch

MADE_UP = Hardware(
    handle=None,
    info=DeviceInfo(
        backend="vulkan",
        index="0",
        id="00112233-4455-6677-8899-aabbccddeeff",
        description="Made-up 9000",
        vendor="Nobody",
        type=DeviceType.DISCRETE,
        memory=8 << 30,
        driver_version="1.0",
        details={"vulkan": "1.3.0"},
    ),
    version=driver.VERSION_1_3,
    features=frozenset({"shaderIntegerDotProduct"}),
    extensions=frozenset(),
    subgroup=32,
    asks_subgroup=True,
    int8_tile=None,
    f16_product=False,
    largest_binding=1 << 30,
    largest_buffer=1 << 32,
    alignment=16,
    shared=48 << 10,
    group=1024,
    buffers=16,
    queue_family=0,
    processors=0,
)


def loader(patch: Patch, failure: str = "", tried: str = "") -> None:
    """The loader's library opens, or does not."""
    found = Library(None if failure else object(), "libvulkan.so.1", {"libvulkan.so.1": tried}, failure)  # type: ignore[arg-type]
    patch.setattr(module, "open_library", lambda names: found)


def machine(patch: Patch, *devices: Hardware | None) -> None:
    """A loader with these devices; None is one that is too old."""
    loader(patch)

    class Instance:
        def physical_devices(self) -> list[Any]:
            return list(devices)

    patch.setattr(driver, "Instance", Instance)

    def inspect(instance: object, device: Hardware | None, index: int) -> Hardware | None:
        return device and replace(device, info=replace(device.info, index=str(index)))

    patch.setattr(hardware, "inspect", inspect)
    patch.setattr(module, "denied_nodes", lambda _: [])


def refused(status: ProbeStatus) -> ProbeResult:
    """The probe's result, which must have this status, and a reason and a hint."""
    result = BACKEND.probe()
    assert result.status is status, result
    assert result.reason
    assert result.hint
    assert not result.devices
    return result


def probe(**environment: str) -> dict[str, Any]:
    """The probe of a new process, with what the loader reads from its environment."""
    code = (
        "import json; from bitnet.vulkan.backend import BACKEND; r = BACKEND.probe();"
        "print(json.dumps([r.status.value, r.reason, r.hint, dict(r.tried)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return dict(zip(("status", "reason", "hint", "tried"), json.loads(done.stdout), strict=True))


@pytest.fixture
def real_loader(require_device: Callable[[str, str | None], None]) -> None:
    require_device("vulkan:0", None if open_library(driver.LOADER) else "there is no Vulkan loader")


def test_importing_opens_no_driver() -> None:
    code = "import sys, bitnet.vulkan.backend; sys.exit(not {'vulkan', 'bitnet.vulkan.driver'}.isdisjoint(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_one_instance_serves_the_process(real_loader: None, monkeypatch: Patch, tmp_path: Path) -> None:
    """Drivers are not opened anew by each probe; what the loader reads from the environment counts all the same."""
    first = driver.Instance().handle
    assert driver.Instance().handle == first
    monkeypatch.setenv("VK_LAYER_SETTINGS_PATH", str(tmp_path))
    assert driver.Instance().handle != first


def test_without_a_loader_there_is_no_instance(monkeypatch: Patch) -> None:
    """Rather than functions of this program itself, which ``dlopen`` opens where it is given no name."""
    missing = {name: ["libvulkan_that_is_nowhere.so.1"] for name in ("linux", "darwin", "win32")}
    monkeypatch.setattr(driver, "LOADER", missing)
    driver.loader.cache_clear()
    with pytest.raises(driver.NoDriverError, match=r"The Vulkan loader does not open \(libvulkan_that_is_nowhere"):
        driver.Instance()


NO_LOADER = """
import sys
import pytest
from bitnet.vulkan import driver

driver.LOADER = {name: ["libvulkan_that_is_nowhere.so.1"] for name in ("linux", "darwin", "win32")}
options = ("-o", "addopts=", "--import-mode=importlib", "--noconftest", "-p", "no:cacheprovider", "--collect-only")
sys.exit(pytest.main(["-q", *options, sys.argv[1]]))
"""


@pytest.mark.nightly(unless_changed=["packages/bitnet-vulkan"])
def test_the_tests_are_collected_without_a_loader() -> None:
    folder = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", NO_LOADER, folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_conformance_vulkan.py::TestConformance::" in done.stdout


def test_no_binding(monkeypatch: Patch) -> None:
    monkeypatch.setattr(driver, "binding", lambda: None)
    assert refused(ProbeStatus.LIBRARY_MISSING).hint == "pip install vulkan"


@pytest.mark.parametrize(
    ("failure", "message", "status"),
    [
        ("missing", "cannot open shared object file", ProbeStatus.DRIVER_MISSING),
        ("no-permission", "Permission denied", ProbeStatus.NO_PERMISSION),
        ("broken", "undefined symbol: vkTeapot", ProbeStatus.BROKEN),
    ],
)
def test_a_loader_that_does_not_open(monkeypatch: Patch, failure: str, message: str, status: ProbeStatus) -> None:
    loader(monkeypatch, failure, f"libvulkan.so.1: {message}")
    result = refused(status)
    assert "libvulkan.so.1" in result.reason
    assert message in result.tried["libvulkan.so.1"]
    assert message in result.reason or status is ProbeStatus.DRIVER_MISSING


@linux
def test_no_driver(real_loader: None, tmp_path: Path) -> None:
    """The real loader, told to look for drivers where there is none."""
    result = probe(VK_ICD_FILENAMES=str(tmp_path / "gone.json"), VK_DRIVER_FILES="")
    assert result["status"] == "driver-missing"
    assert "VK_ICD_FILENAMES" in result["hint"]
    assert result["tried"] == {"libvulkan.so.1": ""}


@linux
def test_a_driver_that_cannot_be_opened(real_loader: None, tmp_path: Path) -> None:
    icd = {"library_path": str(tmp_path / "libgone.so"), "api_version": "1.3.0"}
    (tmp_path / "gone.json").write_text(json.dumps({"file_format_version": "1.0.0", "ICD": icd}))
    assert probe(VK_ICD_FILENAMES=str(tmp_path / "gone.json"), VK_DRIVER_FILES="")["status"] == "driver-missing"


def test_a_driver_that_does_not_start(monkeypatch: Patch) -> None:
    machine(monkeypatch)

    def refuse() -> None:
        driver.check("vulkan", "vkCreateInstance", -3)

    monkeypatch.setattr(driver, "Instance", refuse)
    assert "VK_ERROR_INITIALIZATION_FAILED" in refused(ProbeStatus.BROKEN).reason


def test_no_device(monkeypatch: Patch) -> None:
    machine(monkeypatch)
    refused(ProbeStatus.NO_DEVICE)


def test_a_device_node_that_may_not_be_opened(monkeypatch: Patch) -> None:
    machine(monkeypatch)
    monkeypatch.setattr(module, "denied_nodes", lambda _: ["/dev/dri/renderD128"])
    result = refused(ProbeStatus.NO_PERMISSION)
    assert "/dev/dri/renderD128" in result.reason
    assert "usermod" in result.hint


def test_a_device_that_is_too_old(monkeypatch: Patch) -> None:
    machine(monkeypatch, None)
    assert "1.1" in refused(ProbeStatus.DRIVER_TOO_OLD).reason


def test_a_device_that_binds_too_few_buffers(monkeypatch: Patch) -> None:
    machine(monkeypatch, replace(MADE_UP, buffers=4))
    assert "Made-up 9000 (4)" in refused(ProbeStatus.UNSUPPORTED).reason


def test_what_is_told_of_devices(monkeypatch: Patch) -> None:
    """Each has the number that the loader's order gives it, those that cannot be used included."""
    info = replace(MADE_UP.info, type=DeviceType.CPU)
    soft = replace(MADE_UP, info=info, subgroup=0, features=frozenset(), int8_tile=(16, 16, 32))
    machine(monkeypatch, None, MADE_UP, replace(MADE_UP, buffers=4), soft)
    first, second = BACKEND.probe().devices
    assert (first.name, second.name) == ("vulkan:1", "vulkan:3")
    assert (first.type, second.type) == (DeviceType.DISCRETE, DeviceType.CPU)
    everywhere = (*KERNEL_FEATURES, *FAMILY_FEATURES, "prepares")
    assert first.features == tuple(sorted((*everywhere, "int8-dot", "subgroups:32")))
    assert second.features == tuple(sorted((*everywhere, "cooperative-matrix")))
    assert first.id == "00112233-4455-6677-8899-aabbccddeeff"
    assert first.memory == 8 << 30
    assert first.details["vulkan"] == "1.3.0"
    assert first.details["note"].startswith("shaders: ")


def test_a_device_that_is_gone(real_loader: None) -> None:
    """Lost between probe and open: another device has its number now, or none."""
    known = BACKEND.probe().devices[0]
    for gone in (replace(known, index="97"), replace(known, id="00000000-0000-0000-0000-000000000000")):
        with pytest.raises(DeviceUnavailableError, match="is gone since it was probed"):
            BACKEND.open(gone, OpenOptions())


def test_kernels_are_named_after_the_backend() -> None:
    names = BACKEND.kernels()
    assert {"embed_vulkan", "ternary_decode_vulkan", "sample_vulkan"} <= set(names)
    assert all(name.endswith("_vulkan") for name in names)


def test_info_is_plain_data(require_device: Callable[[str, str | None], None]) -> None:
    """A probe's result outlives the instance that it was made with."""
    found = BACKEND.probe().devices
    require_device("vulkan:0", None if found else "there is no Vulkan device")
    for info in found:
        assert isinstance(info, DeviceInfo)
        json.dumps(dict(info.details))


def test_a_probe_without_a_display_says_nothing(require_device: Callable[[str, str | None], None]) -> None:
    """Mesa's choice of a default device looks for a display, and complains where there is none."""
    require_device("vulkan:0", None if BACKEND.probe().devices else "there is no Vulkan device")
    code = "from bitnet.vulkan.backend import BACKEND; print(len(BACKEND.probe().devices))"
    display = ("DISPLAY", "WAYLAND_DISPLAY", "XDG_RUNTIME_DIR", "NODEVICE_SELECT")
    env = {name: value for name, value in os.environ.items() if name not in display}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert (done.stdout.strip(), done.stderr) == (str(len(BACKEND.probe().devices)), "")
