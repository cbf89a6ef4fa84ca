"""Compiling for a real device: what is kept and found again, bad entries, drivers that promise what they do not do."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bitnet.core.errors import KernelCompileError
from bitnet.core.gpu import KernelSpec
from bitnet.core.gpu.programs import Programs
from bitnet.core.hal import FAMILY_FEATURES, KERNEL_FEATURES, LOOK_AHEAD, PREPARES
from bitnet.core.support import cache

cl = pytest.importorskip("pyopencl")

from bitnet.opencl import compiler, device, features, launches  # noqa: E402  (they import pyopencl)
from bitnet.opencl.command_buffer import CommandBuffer  # noqa: E402

SPECS = [KernelSpec("embed", "embed", (("WG", 64), ("WEIGHT_F16", n))) for n in (0, 1)]


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is compiled during the test, with a cache of its own."""
    monkeypatch.setenv("BITNET_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("BITNET_NO_KERNEL_CACHE", raising=False)
    labels: list[str] = []

    def listen(label: str, seconds: float) -> None:
        labels.append(label)

    cache.listeners.append(listen)
    yield labels
    cache.listeners.remove(listen)


@pytest.fixture
def opened(require_device: Callable[[str, str | None], None]) -> Any:
    """The first device there is."""
    try:
        devices = [d for platform in cl.get_platforms() for d in platform.get_devices()]
    except cl.Error:
        devices = []
    require_device("opencl:0", None if devices else "there is no OpenCL device")
    return devices[0]


def make(opened: Any) -> Programs[Any]:
    return compiler.programs(cl.Context([opened]), opened, "opencl:0")


def test_programs_are_kept_and_found_again(opened: Any, compiled: list[str]) -> None:
    for _ in range(2):
        made = make(opened)
        made.prepare(SPECS * 3)
        assert cl.Kernel(made[SPECS[1]], "embed").num_args == 5
    assert compiled == ["embed", "embed"]


def test_an_entry_the_driver_refuses_is_compiled_again(opened: Any, compiled: list[str], tmp_path: Path) -> None:
    """A flipped byte is the cache's to notice; a whole entry that is no binary is the driver's."""
    made = make(opened)
    made.prepare(SPECS)
    entries = sorted((tmp_path / "kernels").glob("*.kernel"))
    assert len(entries) == 2
    kept = cache.KernelCache()
    kept.put(entries[0].stem, b"no binary of any driver" * 9, label="junk", seconds=0.0)
    spoiled = bytearray(entries[1].read_bytes())
    spoiled[-1] ^= 1
    entries[1].write_bytes(spoiled)
    compiled.clear()
    for _ in range(2):
        again = make(opened)
        again.prepare(SPECS)
        assert cl.Kernel(again[SPECS[0]], "embed").num_args == 5
    assert compiled == ["embed", "embed"]


def test_features_that_do_not_compile_are_left_out(
    opened: Any, compiled: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a driver of NVIDIA's that takes no PTX, this one's too: the plain way is compiled, kept and found again."""
    monkeypatch.setattr(compiler, "flags", lambda opened: ("-cl-std=CL1.2", "-DPTX=1", "-Dasm=untaken"))
    spec = KernelSpec("row_sums", "row_sums", (("WG", 64), ("COLS", 128)))
    for _ in range(2):
        made = make(opened)
        made.prepare([spec])
        assert cl.Kernel(made[spec], "row_sums").num_args == 3
    assert compiled == ["row_sums"]
    assert caplog.text.count("row_sums does not compile with the device's features") == 1


def test_a_kernel_that_a_driver_does_not_take_is_told(
    opened: Any, compiled: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By it the matrix units of a device are used or not: no plain way is tried."""
    spec = KernelSpec("row_sums", "row_sums", (("WG", 64), ("COLS", 128)))
    monkeypatch.setattr(compiler, "flags", lambda opened: ("-cl-std=CL1.2", "-DPTX=1", "-Dasm=untaken"))
    assert not make(opened).builds(spec)
    assert caplog.text.count("row_sums does not build") == 1
    monkeypatch.setattr(compiler, "flags", lambda opened: ("-cl-std=CL1.2",))
    assert compiled == []
    assert make(opened).builds(spec)
    assert make(opened).builds(spec)
    assert compiled == ["row_sums"]


def test_what_does_not_compile_says_why(opened: Any, compiled: list[str]) -> None:
    with pytest.raises(KernelCompileError) as raised:
        make(opened).prepare([KernelSpec("row_sums", "row_sums", (("WG", 64), ("COLS", "no_number")))])
    assert re.search(r"row_sums(\.cl)? does not compile", str(raised.value))
    assert "no_number" in raised.value.log
    assert compiled == []


def test_what_the_compiler_says_is_logged_not_warned(
    opened: Any, compiled: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """pyopencl warns whenever a log is not empty, as that of NVIDIA's driver always is."""
    spec = KernelSpec("row_sums", "row_sums", (("WG", 64), ("COLS", 64), ("COLS", 128)))
    with warnings.catch_warnings(), caplog.at_level("DEBUG", "bitnet"):
        warnings.simplefilter("error")
        make(opened).prepare([spec])
        make(opened).prepare([spec])
    assert compiled == ["row_sums"]
    if "pocl" in opened.platform.name.lower() or "Portable" in opened.platform.name:
        assert "COLS" in caplog.text


@pytest.mark.parametrize("way", ["command-buffer", "loader", "pyopencl"])
def test_a_recording_can_be_replayed(
    opened: Any, compiled: list[str], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The same launches with command buffers, where the device has them, by the loader's function and by pyopencl's."""
    if way != "command-buffer":
        monkeypatch.setattr(device, "functions", lambda opened: None)
    if way == "pyopencl":
        monkeypatch.setattr(launches, "library", lambda: None)
    driver = device.OpenCLDriver(opened, "opencl:0")
    step = np.array([3, 1, 3, 0, 0, 0, 0, 0, 2, 0, 1], np.int32)
    table = np.arange(12, dtype=np.float32).reshape(3, 4)
    there = [driver.alloc(a.nbytes) for a in (step, table, table)]
    for buffer, array in zip(there, (step, table, np.zeros_like(table)), strict=True):
        driver.upload(buffer, array)
    args = (there[0], np.int32(8), there[1], there[2], np.int32(4))
    first = compiler_launch(args)
    second = compiler_launch((there[0], np.int32(8), there[2], there[1], np.int32(4)))
    recording = driver.record([first, second])
    has = features.features(opened)
    assert isinstance(recording, CommandBuffer) == (way == "command-buffer" and "command-buffer" in has)
    expected = table
    for _ in range(3):  # each sees what the one before wrote
        driver.submit(recording)
        expected = expected[[2, 0, 1]][[2, 0, 1]]
    out = np.empty_like(table)
    driver.download(there[1], out)
    assert out.tolist() == expected.tolist()
    driver.close()


def test_a_lost_device_can_be_closed(opened: Any, compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def finish() -> None:
        launches.check("clFinish", cl.status_code.INVALID_COMMAND_QUEUE)

    driver = device.OpenCLDriver(opened, "opencl:0")
    monkeypatch.setattr(driver, "_queue", SimpleNamespace(finish=finish))
    driver.close()


def compiler_launch(args: Any) -> Any:
    from bitnet.core.gpu import Launch

    return Launch(SPECS[0], (3, 1, 1), (64, 1, 1), args)


def made_up(extensions: str, version: str = "OpenCL 3.0 x", **more: Any) -> SimpleNamespace:
    limits = {"max_compute_units": 4, "max_work_group_size": 256, "local_mem_size": 32768}
    return SimpleNamespace(extensions=extensions, version=version, type=cl.device_type.GPU, **limits, **more)


@pytest.mark.parametrize(
    ("opened", "expected"),
    [
        (made_up(""), ()),
        (made_up("cl_khr_fp16 cl_khr_integer_dot_product"), ("f16", "int8-dot")),
        (made_up("cl_khr_subgroups", "OpenCL 2.0 x"), ("subgroups",)),
        (made_up("", max_num_sub_groups=16), ("subgroups",)),
        (made_up("", "OpenCL 2.1 x", max_num_sub_groups=16), ()),
        (made_up("", max_num_sub_groups=0), ()),
        (
            made_up(features.NVIDIA, compute_capability_major_nv=9, compute_capability_minor_nv=0),
            ("ptx-dp4a", "ptx-mma"),
        ),
        (
            made_up(features.NVIDIA, compute_capability_major_nv=8, compute_capability_minor_nv=0),
            ("ptx-dp4a", "ptx-mma"),
        ),
        (made_up(features.NVIDIA, compute_capability_major_nv=7, compute_capability_minor_nv=5), ("ptx-dp4a",)),
        (made_up(features.NVIDIA, compute_capability_major_nv=6, compute_capability_minor_nv=1), ("ptx-dp4a",)),
        (made_up(features.NVIDIA, compute_capability_major_nv=6, compute_capability_minor_nv=0), ()),
        (made_up(features.NVIDIA), ()),
        (made_up("", compute_capability_major_nv=9, compute_capability_minor_nv=0), ()),
    ],
)
def test_what_a_device_is_found_to_have(opened: Any, expected: tuple[str, ...]) -> None:
    assert features.features(opened) == (
        *expected,
        *KERNEL_FEATURES,
        *FAMILY_FEATURES,
        PREPARES,
        LOOK_AHEAD,
    )
    options = features.flags(opened)
    defines = {"f16": "FP16", "int8-dot": "INT_DOT", "subgroups": "SUBGROUPS", "ptx-dp4a": "PTX"}
    assert {f"-D{defines[name]}=1" for name in expected if name in defines} == set(options) - {options[0], "-DGPU=1"}
    assert features.abilities(opened).matrix == ("ptx" if "ptx-mma" in expected else "none")
    assert options[0] == ("-cl-std=CL3.0" if "subgroups" in expected and "3.0" in opened.version else "-cl-std=CL1.2")


@pytest.mark.parametrize(
    ("name", "wave", "expected"),
    [
        ("gfx1100", 32, ("sudot4", "wmma11")),
        ("gfx1201", 32, ("sudot4", "wmma12")),
        ("gfx90a:sramecc+:xnack-", 64, ("sdot4", "mfma16")),
        ("gfx942", 64, ("sdot4", "mfma32")),
        ("gfx1030", 32, ("sdot4", "none")),
        ("gfx1100", 64, ("none", "none")),  # compiled for other waves than the kernels'
        ("gfx1100", None, ("none", "none")),
        ("AMD Radeon (radeonsi)", 64, ("none", "none")),
    ],
)
def test_amds_architectures(name: str, wave: int | None, expected: tuple[str, str]) -> None:
    wavefront: dict[str, Any] = {"wavefront_width_amd": wave} if wave else {}
    opened: Any = made_up(features.AMD, name=name, **wavefront)
    has = features.abilities(opened)
    assert (has.dot4, has.matrix) == expected
    options = zip(("amd-int8-dot", "amd-int8-matrix"), expected, strict=True)
    found = (feature for feature, kind in options if kind != "none")
    assert features.features(opened) == (
        *found,
        *KERNEL_FEATURES,
        *FAMILY_FEATURES,
        PREPARES,
        LOOK_AHEAD,
    )
