"""The probe's result if wgpu, its driver or a device is missing, with fake adapters."""

import os
import subprocess
import sys
from ctypes import CDLL
from pathlib import Path
from types import SimpleNamespace

import pytest

from bitnet.core.errors import DeviceUnavailableError
from bitnet.core.hal import DeviceInfo, DeviceType, OpenOptions, ProbeStatus
from bitnet.core.support.dynlib import Library
from bitnet.webgpu import backend as module
from bitnet.webgpu.backend import BACKEND


def made_up(device: int = 7, api: str = "Vulkan", kind: str = "DiscreteGPU") -> SimpleNamespace:
    info = {
        "vendor": "Nobody",
        "device": f"Made-up {device}",
        "description": "driver 1.0",
        "vendor_id": 0xABC,
        "device_id": device,
        "adapter_type": kind,
        "backend_type": api,
    }
    limits = dict.fromkeys(
        ("max-buffer-size", "max-storage-buffer-binding-size", "max-compute-workgroup-storage-size"), 2**28
    )
    return SimpleNamespace(info=info, limits=limits, features={"subgroup", "shader-f16"})


def use(monkeypatch: pytest.MonkeyPatch, *adapters: SimpleNamespace) -> None:
    monkeypatch.setattr(module, "_adapters", lambda: list(adapters))
    monkeypatch.setattr(module, "open_library", lambda names: Library(CDLL(None), "libvulkan.so.1", {}, ""))


def loader(monkeypatch: pytest.MonkeyPatch, *, opens: bool, nodes: list[str]) -> None:
    """A Linux machine with or without the Vulkan loader, whose device nodes are these."""
    message = "" if opens else "libvulkan.so.1: cannot open shared object file"
    handle = CDLL(None) if opens else None
    made = Library(handle, "libvulkan.so.1", {"libvulkan.so.1": message}, "" if opens else "missing")
    monkeypatch.setattr(module, "open_library", lambda names: made)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: [Path(n) for n in nodes if Path(n).match(pattern)])


def test_importing_it_opens_no_driver() -> None:
    code = "import sys, bitnet.webgpu.backend; sys.exit('wgpu' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_wgpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    result = BACKEND.probe()
    assert result.status is ProbeStatus.LIBRARY_MISSING
    assert result.hint == "pip install wgpu"


def test_wgpu_whose_library_does_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[object]:
        raise OSError("libwgpu_native-release.so: wrong ELF class")

    use(monkeypatch)
    monkeypatch.setattr(module, "_adapters", broken)
    result = BACKEND.probe()
    assert result.status is ProbeStatus.LIBRARY_MISSING
    assert "wrong ELF class" in result.reason
    assert "wgpu" in result.hint


def test_types_and_numbers_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that comes through several APIs is one; two alike are two; what has no fitting API is none."""
    use(
        monkeypatch,
        made_up(1, "D3D12"),
        made_up(1),
        made_up(1),
        made_up(2, "OpenGL"),
        made_up(3, "Metal", "IntegratedGPU"),
        made_up(4, kind="CPU"),
        made_up(5, "D3D12", "Unknown"),
    )
    result = BACKEND.probe()
    assert result.status is ProbeStatus.OK
    assert [(d.name, d.description, d.type) for d in result.devices] == [
        ("webgpu:0", "Made-up 1 (Vulkan)", DeviceType.DISCRETE),
        ("webgpu:1", "Made-up 1 (Vulkan)", DeviceType.DISCRETE),
        ("webgpu:2", "Made-up 4 (Vulkan)", DeviceType.CPU),
        ("webgpu:3", "Made-up 3 (Metal)", DeviceType.INTEGRATED),
        ("webgpu:4", "Made-up 5 (D3D12)", DeviceType.VIRTUAL),
    ]
    assert len({d.id for d in result.devices}) == 5
    assert result.devices[0].features[:2] == ("subgroups", "f16")
    assert result.devices[0].details["api"] == "Vulkan"


def test_opengl_alone_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, made_up(2, "OpenGL"))
    result = BACKEND.probe()
    assert result.status is ProbeStatus.UNSUPPORTED
    assert "Made-up 2" in result.reason
    assert "OpenGL" in result.reason
    assert result.hint


@pytest.mark.parametrize(
    ("opens", "nodes", "allowed", "status"),
    [
        (False, [], True, ProbeStatus.DRIVER_MISSING),
        (True, [], True, ProbeStatus.NO_DEVICE),
        (True, ["/dev/dri/renderD128"], False, ProbeStatus.NO_PERMISSION),
        (True, ["/dev/dri/renderD128"], True, ProbeStatus.DRIVER_MISSING),
    ],
)
def test_no_adapter(
    monkeypatch: pytest.MonkeyPatch, opens: bool, nodes: list[str], allowed: bool, status: ProbeStatus
) -> None:
    use(monkeypatch)
    loader(monkeypatch, opens=opens, nodes=nodes)
    monkeypatch.setattr(os, "access", lambda path, mode: allowed)
    result = BACKEND.probe()
    assert result.status is status
    assert result.reason
    assert result.hint
    assert all(node in result.reason for node in nodes)
    assert ("libvulkan.so.1" in result.reason) == (not opens)


def test_a_device_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, made_up(1), made_up(2))
    first, second = BACKEND.probe().devices
    use(monkeypatch, made_up(2))
    for info in (first, second):
        with pytest.raises(DeviceUnavailableError, match=f"{info.name} is gone"):
            BACKEND.open(info, OpenOptions())


def test_kernels_are_named_after_the_backend() -> None:
    names = BACKEND.kernels()
    assert {"ternary_decode_webgpu", "absmean_scale_webgpu", "ternary_gemv_webgpu", "ternary_gemm_webgpu"} <= set(names)
    assert all(name.endswith("_webgpu") for name in names)


def test_another_user_of_wgpu_may_have_made_its_instance() -> None:
    """In a process where wgpu is in use already, the probe finds the same devices."""
    code = (
        "import wgpu; wgpu.gpu.enumerate_adapters_sync();"
        "from bitnet.webgpu.backend import BACKEND; print([d.name for d in BACKEND.probe().devices])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found: list[DeviceInfo] = list(BACKEND.probe().devices)
    assert done.stdout.strip() == str([d.name for d in found])


def test_a_probe_without_a_display_says_nothing_of_it() -> None:
    """Mesa's choice of a default device looks for a display, and complains where there is none. (wgpu 0.31 has
    complaints of its own, of Vulkan extensions that are missing.)"""
    code = "from bitnet.webgpu.backend import BACKEND; print(len(BACKEND.probe().devices))"
    display = ("DISPLAY", "WAYLAND_DISPLAY", "XDG_RUNTIME_DIR", "NODEVICE_SELECT")
    env = {name: value for name, value in os.environ.items() if name not in display}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.strip() == str(len(BACKEND.probe().devices))
    assert "XDG_RUNTIME_DIR" not in done.stderr
