"""The CPU backend's probe with and without its library, and the contents of the compiled kernels."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bitnet.core.cpu import native, structures
from bitnet.core.cpu.backend import BACKEND
from bitnet.core.cpu.device import CpuDevice, device_of
from bitnet.core.cpu.probe import int8_peak, read_bandwidth
from bitnet.core.errors import DeviceError, InvalidInputError
from bitnet.core.hal import Limits, OpenOptions, Program, TensorSpec, TernaryData, TernaryMatmul, TernaryWeight
from bitnet.core.reference import ReferenceDevice
from bitnet.core.support import log


@pytest.fixture
def library_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Forgets, before and after, which library was found."""
    native.library.cache_clear()
    monkeypatch.setattr(log, "_said", set())
    yield monkeypatch
    native.library.cache_clear()


def test_without_library_numpy_is_offered_and_says_so(
    library_at: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    library_at.setattr(native, "PATHS", (tmp_path / "libbitnet_cpu.so",))
    found = BACKEND.probe()
    assert [info.name for info in found.devices] == ["cpu:numpy"]
    assert "native library is missing" in found.reason
    assert found.hint
    with caplog.at_level(logging.WARNING, "bitnet"):
        for _ in range(2):
            assert isinstance(BACKEND.open(found.devices[0], OpenOptions()), ReferenceDevice)
    assert len(caplog.records) == 1
    with pytest.raises(DeviceError, match="cpu:avx2"):
        BACKEND.open(replace(found.devices[0], index="avx2"), OpenOptions())


def test_broken_library_is_named_with_the_loader_s_message(library_at: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "libbitnet_cpu.so"
    path.write_bytes(b"no library")
    library_at.setattr(native, "PATHS", (path,))
    found = BACKEND.probe()
    assert [info.name for info in found.devices] == ["cpu:numpy"]
    assert found.tried[str(path)] in found.reason


def test_library_of_another_version_is_not_used(library: ctypes.CDLL, library_at: pytest.MonkeyPatch) -> None:
    library_at.setattr(native, "Op", structures.Matrix)
    found = BACKEND.probe()
    assert [info.name for info in found.devices] == ["cpu:numpy"]
    assert "another version" in found.reason


def test_devices_are_the_levels_this_processor_runs_best_first(library: ctypes.CDLL) -> None:
    levels = list(native.levels(library))
    assert levels == [level for level in native.LEVELS if level in levels]
    assert levels[-1] == "scalar"
    devices = [info.index for info in BACKEND.probe().devices]
    assert devices == [*dict.fromkeys(device_of(level) for level in levels), "numpy"]
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and "scalar" in levels:
        flags = set(cpuinfo.read_text().replace(":", " ").split())
        assert ("avx2" in devices) == ({"avx2", "fma", "f16c", "bmi2"} <= flags)
        assert ("avx512" in devices) == ({"avx512_vnni", "avx512bw", "avx512vl", "avx512dq"} <= flags)
        assert ("amx" in devices) == ({"amx_tile", "amx_int8", "avx512vbmi", "avx512_vnni", "gfni"} <= flags)
        assert ("neon" in devices) == ("asimddp" in flags)


def test_level_the_processor_lacks(library: ctypes.CDLL) -> None:
    info = replace(BACKEND.probe().devices[0], index="sve")
    with pytest.raises(DeviceError, match="does not support sve"):
        CpuDevice(info, library)


def test_weight_that_loads_otherwise_than_declared(library: ctypes.CDLL) -> None:
    """What C reads without looking must have been looked at."""
    device = CpuDevice(BACKEND.probe().devices[0], library)
    specs = (TensorSpec("x", "i8", ("M", 256)), TensorSpec("s", "f32", ("M",)), TensorSpec("out", "f32", ("M", 8)))
    for codes in (np.zeros((8, 32), np.uint8), np.zeros((7, 64), np.uint8), np.zeros((8, 64), np.int8)):
        weight = TernaryWeight((8, 256), lambda codes=codes: TernaryData(codes, np.ones(1, np.float32)))  # type: ignore[misc]
        ops = [TernaryMatmul("x", "s", ("w",), "out")]
        with pytest.raises(InvalidInputError, match="'w'"):
            device.compile(Program(ops, {s.name: s for s in specs}, {"w": weight}, Limits(1)))
    assert device.memory().used == 0
    device.close()


def test_rooflines_are_plausible(library: ctypes.CDLL) -> None:
    """Every byte is read: the sum proves it. And more threads never do less work."""
    for level in native.levels(library):
        device = CpuDevice(BACKEND.probe().devices[0], library, level=level, threads=3)
        data = np.random.default_rng().integers(0, 2**63, 3 << 17, dtype=np.uint64)  # 3 MiB
        where = device.level_handle, device.pool, data.ctypes.data, data.nbytes
        for ahead in (0, 4096):
            total = library.bitnet_probe_read(*where, ahead)
            assert total % 2**64 == int(data.sum())
        done = library.bitnet_probe_int8(device.level_handle, device.pool, 10)
        assert done > 0
        assert done % 10 == 0  # of each of the threads that took part
        assert 1e8 < read_bandwidth(device, repeats=1, size=16 << 20) < 1e13
        assert 1e8 < int8_peak(device, repeats=1) < 1e15
        device.close()
