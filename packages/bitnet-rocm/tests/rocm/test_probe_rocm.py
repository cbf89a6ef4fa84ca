"""The probe's result if ROCm is missing, old, forbidden, or has no device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from bitnet.core import list_devices
from bitnet.core.hal import Backend, ProbeResult, ProbeStatus
from bitnet.core.support.dynlib import Library
from bitnet.rocm import backend as module
from bitnet.rocm import comgr_process, libraries
from bitnet.rocm.backend import BACKEND

Patch = pytest.MonkeyPatch
Run: TypeAlias = Callable[..., subprocess.CompletedProcess[str]]
PROBE = (
    "import json; from bitnet.rocm.backend import BACKEND; r = BACKEND.probe();"
    "print(json.dumps([r.status.value, r.reason, r.hint, [(d.name, d.type.value, d.id, d.description, d.memory,"
    "d.features, dict(d.details)) for d in r.devices], dict(r.versions)]))"
)
linux = pytest.mark.skipif(sys.platform != "linux", reason="device nodes and these libraries' names are Linux's")


def probe(run: Run, **environment: Any) -> tuple[str, str, str, list[Any], dict[str, str]]:
    """Status, reason, hint, devices and versions of a new process's probe on the test driver."""
    status, reason, hint, devices, versions = json.loads(run("-c", PROBE, **environment).stdout)
    assert devices or (reason and hint)
    return status, reason, hint, devices, versions


def test_it_is_discovered() -> None:
    (report,) = [report for report in list_devices() if report.name == "rocm"]
    assert report.distribution == "bitnet-rocm"
    assert report.probe.status is not ProbeStatus.BROKEN, report.probe.reason
    assert isinstance(BACKEND, Backend)


def test_importing_it_opens_no_driver() -> None:
    code = "import sys, bitnet.rocm.backend; sys.exit('bitnet.rocm.hip' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_kernels_are_amds_or_everyones() -> None:
    names = BACKEND.kernels()
    assert {"embed_rocm", "ternary_decode_rocm", "attention_merge_rocm"} <= set(names)
    assert not {name for name in names if "mma" in name or "warps" in name}


def opened(patch: Patch, failure: str, message: str) -> ProbeResult:
    """The probe's result where the runtime's library does not open."""
    name = "libamdhip64.so.7"
    patch.setattr(libraries, "open_hip", lambda: Library(None, name, {name: message}, failure))  # type: ignore[arg-type]
    patch.setattr(sys, "platform", "linux")
    result = BACKEND.probe()
    assert name in result.reason
    assert result.hint
    return result


def test_nothing_there(monkeypatch: Patch) -> None:
    result = opened(monkeypatch, "missing", "cannot open shared object file: No such file or directory")
    assert result.status is ProbeStatus.DRIVER_MISSING
    assert "ROCM_PATH" in result.hint
    assert result.tried


def test_a_library_that_does_not_open(monkeypatch: Patch) -> None:
    assert opened(monkeypatch, "broken", "libhsa-runtime64.so.1: no such").status is ProbeStatus.BROKEN
    assert opened(monkeypatch, "no-permission", "Permission denied").status is ProbeStatus.NO_PERMISSION


def test_a_system_that_has_no_hip(monkeypatch: Patch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert BACKEND.probe().status is ProbeStatus.DRIVER_MISSING


def test_where_libraries_are_looked_for(monkeypatch: Patch, tmp_path: Path) -> None:
    """ROCM_PATH, the loader's path, pip's SDK, then /opt; only files that are there, but for the loader's names."""
    for folder in ("given", f"site/{libraries.SDK}", "opt/rocm", "opt/rocm-6.4.0"):
        (tmp_path / folder / "lib").mkdir(parents=True)
        (tmp_path / folder / "lib" / "libamdhip64.so.6").touch()
    (tmp_path / "site" / libraries.SDK / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "given"))
    monkeypatch.setattr(libraries, "SYSTEM", tmp_path / "opt")
    monkeypatch.setattr(sys, "platform", "linux")
    seen: list[str] = []
    monkeypatch.setattr(libraries, "open_library", seen.extend)
    libraries.open_hip()
    folders = ("given", f"site/{libraries.SDK}", "opt/rocm", "opt/rocm-6.4.0")
    places = [str(tmp_path / place / "lib" / "libamdhip64.so.6") for place in folders]
    assert seen == [places[0], *libraries.HIP["linux"], *places[1:]]


def test_where_windows_has_them(monkeypatch: Patch, tmp_path: Path) -> None:
    """The driver's, by the names that the loader finds, or those of an SDK's folder."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "amdhip64_7.dll").touch()
    monkeypatch.delenv("ROCM_PATH", raising=False)
    monkeypatch.setenv("HIP_PATH", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "win32")
    seen: list[str] = []
    monkeypatch.setattr(libraries, "open_library", seen.extend)
    libraries.open_hip()
    assert seen == [str(tmp_path / "bin" / "amdhip64_7.dll"), "amdhip64_7.dll", "amdhip64_6.dll", "amdhip64.dll"]


def test_a_device(run: Run, tmp_path: Path) -> None:
    environment = {"HIP_TEST_DEVICES": 2, "HIP_TEST_ARCH": "gfx90a:sramecc+:xnack-", "BITNET_CACHE_DIR": tmp_path}
    status, _, _, devices, versions = probe(run, **environment)
    assert status == "ok"
    assert [device[0] for device in devices] == ["rocm:0", "rocm:1"]
    name, _, uuid, description, memory, features, details = devices[1]
    assert (name, uuid, memory) == ("rocm:1", "GPU-00000000000b17e1", 2**32)
    assert "gfx90a" in description
    everywhere = [
        "deterministic",
        "kv-i8",
        "logprobs",
        "penalties",
        "ternary-tables",
        "embedders",
        "experts",
        "rotated-norms",
        "states",
        "windows",
        "prepares",
        "look-ahead",
    ]
    assert features == ["int8-dot", "int8-matrix", "f16", "wave64", *everywhere]
    assert details["architecture"] == "gfx90a:sramecc+:xnack-"
    assert details["pci"] == "0000:04:00.0"
    assert details["note"].startswith("kernels: compiled here by libamd_comgr 3.0")
    assert versions == {"hip-needed": "6.0", "hip": "7.0.51831", "comgr": "3.0"}


def test_an_old_driver(run: Run) -> None:
    status, reason, hint, _, versions = probe(run, HIP_TEST_VERSION=50732831)
    assert (status, versions["hip"]) == ("driver-too-old", "5.7.32831")
    assert "5.7.32831" in reason
    assert "6.0" in hint


def test_a_driver_that_lacks_a_call(run: Run, build_driver: Callable[..., Path], tmp_path: Path) -> None:
    status, reason, _, _, _ = probe(run, ROCM_PATH=build_driver(tmp_path / "old", "-DOLD_HIP"))
    assert status == "driver-too-old"
    assert "hipGetDevicePropertiesR0600" in reason


def test_no_compiler(run: Run, monkeypatch: Patch) -> None:
    status, reason, _, _, _ = probe(run, HIP_TEST_COMGR=4)
    assert status == "library-missing"
    assert "libamd_comgr 4.0 is neither version 2 nor 3" in reason
    gone = Library(None, "", {"libamd_comgr.so.3": "cannot open shared object file"}, "missing")
    monkeypatch.setattr(comgr_process, "open_comgr", lambda hip: gone)
    assert comgr_process.compiled("", None) == {"error": "cannot open shared object file"}


@pytest.mark.parametrize("arch", ["gfx803", "gfx1310"])
def test_a_device_the_kernels_are_not_for(run: Run, arch: str) -> None:
    """Too old for them, or too new for the compiler that is installed."""
    status, reason, hint, _, _ = probe(run, HIP_TEST_ARCH=arch)
    assert status == "unsupported"
    assert arch in reason
    assert "bitnet-vulkan" in hint


def no_device(patch: Patch, *, kfd: bool, container: bool = False, denied: tuple[str, ...] = ()) -> ProbeResult:
    """What a runtime that sees no device makes of this machine."""
    here, gone = Path(__file__), Path("/nowhere/at/all")
    patch.setattr(module, "KFD", here if kfd else gone)
    patch.setattr(module, "CONTAINERS", [here if container else gone])
    patch.setattr(module, "denied_nodes", lambda patterns: list(denied))
    result = module._no_device("hipErrorNoDevice", {}, {})
    assert result.reason
    assert result.hint
    return result


@linux
def test_no_device(run: Run, monkeypatch: Patch) -> None:
    assert probe(run, HIP_TEST_DEVICES=0)[0] in ("no-device", "no-permission")
    result = no_device(monkeypatch, kfd=True)
    assert result.status is ProbeStatus.NO_DEVICE
    assert "hipErrorNoDevice" in result.reason
    assert "HIP_VISIBLE_DEVICES" in result.hint
    result = no_device(monkeypatch, kfd=False)
    assert "its kernel driver is not loaded" in result.reason


@linux
def test_a_container_without_the_device(monkeypatch: Patch) -> None:
    result = no_device(monkeypatch, kfd=False, container=True)
    assert result.status is ProbeStatus.NO_DEVICE
    assert "container" in result.reason
    assert "--device /dev/kfd" in result.hint


@linux
def test_a_node_without_permission(monkeypatch: Patch, tmp_path: Path) -> None:
    """The hint names the group of the node; AMD's own groups where it is root's alone."""
    import grp

    node = tmp_path / "kfd"
    node.touch()
    result = no_device(monkeypatch, kfd=True, denied=(str(node),))
    assert result.status is ProbeStatus.NO_PERMISSION
    assert str(node) in result.reason
    group = grp.getgrgid(node.stat().st_gid).gr_name
    assert f"usermod -aG {'render,video' if group == 'root' else group} $USER" in result.hint
    if os.geteuid() == 0:
        os.chown(node, -1, grp.getgrnam("users").gr_gid)
        assert "usermod -aG users $USER" in no_device(monkeypatch, kfd=True, denied=(str(node),)).hint
