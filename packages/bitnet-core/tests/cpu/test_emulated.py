"""The conformance suite under qemu's user emulation: kernels for other processors, and dispatch on older ones.

The native library runs as a process of its own in the emulator (``tools/emulated.py``).
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
from filelock import FileLock

from bitnet.core.cpu import native
from bitnet.core.cpu.backend import BACKEND
from bitnet.core.cpu.device import CpuDevice
from bitnet.core.hal import (
    GREEDY,
    HAL_API,
    DenseMatmul,
    DeviceInfo,
    DeviceType,
    Limits,
    Op,
    OpenOptions,
    ProbeResult,
    ProbeStatus,
    Program,
    Sample,
    SequenceStep,
    Step,
    StepLayout,
    TernaryMatmul,
    run,
)
from bitnet.core.testing import ConformanceSuite
from bitnet.core.testing.cases import Size
from bitnet.core.testing.linear import LinearTests
from bitnet.core.testing.rig import Rig, dense, tensor, ternary, tokens
from emulated import FEATURES, NIGHT, BestByDay, EmulatedBackend, build_hook

HERE = Path(__file__).parent


class TestNeon(BestByDay, ConformanceSuite):
    """NEON with dot products, and the portable level as an ARM compiler makes it."""

    backend = EmulatedBackend("qemu-aarch64", "musl-aarch64", "-cpu", "max")
    size = "small"


class StandIn(NamedTuple):
    """A level compiled for a processor that lacks some of its instructions.

    Attributes:
        level: What is compiled.
        needs: The level that this processor must run instead.
        without: Flags that are left out.
        flags: Flags that are added.
        header: What stands before the sources, in this folder.
    """

    level: str
    needs: str
    without: frozenset[str]
    flags: tuple[str, ...]
    header: str

    def changed(self, flags: list[str]) -> list[str]:
        return [*(flag for flag in flags if flag not in self.without), *self.flags, "-include", str(HERE / self.header)]


STAND_INS = (
    # `vpdpbusd` of 256 bits has an encoding in AVX-512 and one without it; all but that is as it ships.
    StandIn(
        "vnni_avx2",
        "avx512",
        frozenset({"-mavxvnni"}),
        ("-mavx512f", "-mavx512vl", "-mavx512vnni"),
        "other_encoding.h",
    ),
    # The tile registers and their instructions in C.
    StandIn("amx", "vbmi_avx512", frozenset({"-mamx-tile", "-mamx-int8"}), (), "software_tiles.h"),
)


@cache
def stand_in_library(stand_in: StandIn) -> ctypes.CDLL:
    """The native library with the level as this processor runs it, kept in the build cache."""
    hook = build_hook()
    target = hook.TARGETS[hook.host()]
    included = hashlib.sha256((HERE / stand_in.header).read_bytes()).hexdigest()[:16]
    path: Path = hook.cache() / hook.digest(target) / f"{stand_in.level}-{included}.so"
    path.parent.mkdir(parents=True, exist_ok=True)
    units = hook.units

    def changed(table: object, arch: str) -> object:
        for source, flags in units(table, arch):
            yield source, stand_in.changed(flags) if f"-DLEVEL={stand_in.level}" in flags else flags

    with FileLock(f"{path}.lock"):  # tests run in several processes
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                hook.__dict__["units"] = changed
                try:
                    inputs = ["-shared", "-O2", *hook.objects(target, folder)]
                finally:
                    hook.__dict__["units"] = units
                hook.link(target, inputs, linked := Path(folder, "library.so"))
                linked.replace(path)
    opened = ctypes.CDLL(str(path))
    for name, (result, arguments) in native.FUNCTIONS.items():
        function = getattr(opened, name)
        function.restype, function.argtypes = result, arguments
    runs = opened.bitnet_level_runs
    called = opened.bitnet_level_name
    vars(opened)["bitnet_level_runs"] = lambda level: called(level) == stand_in.level.encode() or runs(level)
    return opened


class StandInBackend:
    name = "cpu"
    hal_api = HAL_API

    def probe(self) -> ProbeResult:
        levels = native.levels(native.library().handle)
        devices = [
            DeviceInfo("cpu", s.level, f"cpu:{s.level}", s.level, "", DeviceType.CPU, features=FEATURES)
            for s in STAND_INS
            if s.needs in levels
        ]
        reason = "" if devices else "this processor has no AVX-512 to stand in"
        return ProbeResult(ProbeStatus.OK if devices else ProbeStatus.NO_DEVICE, devices, reason)

    def open(self, info: DeviceInfo, options: OpenOptions) -> CpuDevice:
        stand_in = next(s for s in STAND_INS if s.level == info.index)
        return CpuDevice(info, stand_in_library(stand_in), level=stand_in.level, threads=2)

    def kernels(self) -> frozenset[str]:
        return BACKEND.kernels()


class TestStandIns(ConformanceSuite):
    backend = StandInBackend()
    devices = tuple(info.name for info in StandInBackend().probe().devices)
    size: ClassVar[Size] = "small"


class TestStandInsProducts(LinearTests):
    """Small products miss the last of many pieces of columns, and registers that keep another pass's shape."""

    backend = StandInBackend()
    devices = TestStandIns.devices
    size = "quick"


@NIGHT
class TestStandInsAtLength(TestStandIns):
    size = "quick"


@pytest.mark.parametrize("level", TestStandIns.devices)
@pytest.mark.parametrize(("rows", "vocabulary", "width"), [(1, 700, 100), (2, 517, 64), (3, 130, 200), (8, 3000, 136)])
@pytest.mark.parametrize("more", [0, 9])
def test_tokens_of_a_compact_head(level: str, rows: int, vocabulary: int, width: int, more: int) -> None:
    """Those of the exact logits, from scores near them (test_head.py has all of it, for the levels that run here)."""
    seed = int(np.random.default_rng().integers(2**31))
    print("seed", seed)
    rng, rows = np.random.default_rng(seed), rows + more
    weight = rng.standard_normal((vocabulary, width)).astype(np.float16)
    x = rng.standard_normal((rows, width)).astype(np.float32)
    ops: list[Op] = [DenseMatmul("x", "head", "logits"), Sample("logits", "out")]
    specs = tensor("x", "f32", "R", width), tensor("logits", "f32", "R", vocabulary), tensor("out", "i32", "R")
    limits = Limits(rows, rows, rows)
    program = Program(ops, {s.name: s for s in specs}, {"head": dense(weight)}, limits, name="head")
    parts = [SequenceStep([0], 7 + i, rows=[0], sampling=GREEDY) for i in range(rows)]
    backend = StandInBackend()
    device = backend.open(next(info for info in backend.probe().devices if info.name == level), OpenOptions())
    executable = device.compile(program)
    for _ in range(2):  # of a single row, the first step computes all logits, and the next one packs
        executable.write("x", x)
        executable.write("logits", np.full((rows, vocabulary), np.nan, np.float32))
        out = run(executable, Step(StepLayout(limits), parts, logits=False))[0]
    wide = weight.astype(np.float64)
    scores, exact = executable.read("logits", rows), x.astype(np.float64) @ wide.T
    device.close()
    assert out.tolist() == exact.argmax(axis=1).tolist()
    column = np.sqrt((wide**2).sum(axis=0) / 4096)
    step, norm = abs(wide / column).max(axis=1) / 7.5, np.linalg.norm(x * column, axis=1)
    error = abs(scores - exact) / (step * norm[:, None])
    assert error.max() < 7.5 / np.sqrt(12)
    assert error.std() > 0.1, "the head was not compact"


def test_inner_loop_of_neon_is_made_of_dot_products(tmp_path: Path, require_device: Any) -> None:
    """A backward branch over at least 16 ``sdot`` by element, and little else (A64 encodings, Arm ARM C6.2, C7.2).

    The same by eye: ``llvm-objdump -d`` of the object that the build's command for ``-DLEVEL=neon`` makes.
    """
    require_device("qemu-aarch64", None if importlib.util.find_spec("ziglang") else "ziglang is not installed")
    hook = build_hook()
    source = next(flags for name, flags in hook.units(hook.settings(), "aarch64") if "-DLEVEL=neon" in flags)
    path = tmp_path / "neon.o"
    target = ["-target", hook.TARGETS["linux-aarch64"].zig, *hook.settings()["flags"], *source]
    hook.run([*hook.compiler(), *target, "-c", "level.c", "-o", str(path)])
    words = np.frombuffer(path.read_bytes()[: path.stat().st_size // 4 * 4], "<u4").astype(np.int64)
    dots = np.concatenate([[0], np.cumsum((words & 0xFFC0F400) == 0x4F80E000)])
    conditional = (words & 0xFF000010) == 0x54000000
    loops = []
    for at in np.flatnonzero(conditional):
        offset = (int(words[at]) >> 5 & 0x7FFFF) - (1 << 19)  # 19 bits, signed: what is wanted goes back
        if -200 <= offset < 0 and at + offset >= 0:
            loops.append((int(dots[at] - dots[at + offset]), -offset))
    assert any(count >= 16 and count >= length / 4 for count, length in loops), sorted(loops)[-5:]


def levels(emulator: str, target: str, cpu: str, require_device: Callable[[str, str | None], None]) -> list[str]:
    backend = EmulatedBackend(emulator, target, "-cpu", cpu)
    require_device(emulator, backend.absent())
    return [info.index for info in backend.probe().devices]


@pytest.mark.parametrize(
    ("cpu", "expected"), [("cortex-a53", ["scalar"]), ("cortex-a76", ["neon", "scalar"]), ("max", ["neon", "scalar"])]
)
def test_levels_of_arm_processors(cpu: str, expected: list[str], require_device: Any) -> None:
    assert levels("qemu-aarch64", "musl-aarch64", cpu, require_device) == expected


@pytest.mark.parametrize(("cpu", "expected"), [("Nehalem", ["scalar"]), ("Haswell", ["avx2", "scalar"])])
def test_levels_of_x86_processors(cpu: str, expected: list[str], require_device: Any) -> None:
    assert levels("qemu-x86_64", "linux-x86_64", cpu, require_device) == expected


@pytest.mark.parametrize(
    ("emulator", "target", "cpu"),
    [("qemu-aarch64", "musl-aarch64", "cortex-a53"), ("qemu-x86_64", "linux-x86_64", "Nehalem")],
)
def test_no_illegal_instruction_on_the_least_processor(
    emulator: str, target: str, cpu: str, require_device: Any
) -> None:
    """What runs outside of a level (choosing it, packing, the pool) must keep to the baseline too."""
    backend = EmulatedBackend(emulator, target, "-cpu", cpu)
    require_device(emulator, backend.absent())
    device = backend.open(backend.probe().devices[0], OpenOptions())
    rng = np.random.default_rng(1)
    codes, matrix = rng.integers(-127, 128, (3, 260), dtype=np.int8), rng.integers(-1, 2, (21, 260), dtype=np.int8)
    specs = [tensor("x", "i8", "M", 260), tensor("s", "f32", "M"), tensor("out", "f32", "M", 21)]
    with Rig(
        device, [TernaryMatmul("x", "s", ("w",), "out")], specs, {"w": ternary(matrix, 1)}, limits=Limits(3)
    ) as rig:
        out = rig.run(tokens(3), {"x": codes, "s": np.ones(3, np.float32)}, ["out"])["out"]
    assert np.array_equal(out, codes.astype(int) @ matrix.astype(int).T)
    device.close()


def test_a_finaliser_within_a_request(require_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage may be collected anywhere, and what is collected gives memory back: neither waits for the other."""
    backend = EmulatedBackend("qemu-x86_64", "linux-x86_64", "-cpu", "Nehalem")
    require_device("qemu-x86_64", backend.absent())
    library = backend.library()
    address, send = library.bitnet_pages_alloc(64), library._send

    def collected(*words: int, data: bytes = b"") -> None:
        monkeypatch.setattr(library, "_send", send)
        send(*words, data=data)
        library.bitnet_pages_free(address, 64)

    monkeypatch.setattr(library, "_send", collected)
    other = library.upload(b"abc")
    assert library.read(other, 3) == b"abc"
    assert not library._put_off
    library.close()
