"""The kernels of other processors, and dispatch on lesser ones: the conformance suite through qemu's user emulation.

The native library runs as a process of its own in the emulator (``emulated.c``); Python's side of the CPU device is the
real one, its pointers being addresses in that process.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest

from bitnet.core.cpu import native
from bitnet.core.cpu.backend import BACKEND
from bitnet.core.cpu.device import CpuDevice, device_of
from bitnet.core.cpu.lowering import Lowering
from bitnet.core.hal import (
    GREEDY,
    HAL_API,
    DenseMatmul,
    DeviceInfo,
    DeviceType,
    Limits,
    Op,
    ProbeResult,
    ProbeStatus,
    Program,
    Sample,
    SequenceStep,
    Step,
    StepLayout,
    TernaryMatmul,
)
from bitnet.core.testing import ConformanceSuite
from bitnet.core.testing.rig import Rig, dense, tensor, ternary, tokens

HERE = Path(__file__).parent
FUNCTIONS = tuple(native.FUNCTIONS)
READ, WRITE, CALL = range(3)
PATIENCE = 120


@cache
def build_hook() -> ModuleType:
    """The wheel's build hook, for how the kernels are compiled."""
    spec = importlib.util.spec_from_file_location("bitnet_hatch_build", HERE.parents[1] / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@cache
def absent(emulator: str) -> str:
    """Why kernels cannot be built and run under an emulator; empty where they can."""
    if shutil.which(emulator) is None:
        return f"{emulator} is not installed (Debian: qemu-user)"
    if importlib.util.find_spec("ziglang") is None:
        return "ziglang is not installed"
    return ""


@cache
def driver(target: str) -> Path:
    """The kernels and ``emulated.c`` as a program for a target of the build hook, kept in the build cache."""
    hook = build_hook()
    source = HERE / "emulated.c"
    kind = hook.TARGETS[target]
    name = f"emulated-{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}"
    program: Path = hook.cache() / hook.digest(kind) / name
    if not program.exists():
        program.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=program.parent) as folder:
            # Without the other processor's libraries at hand, the program brings its own.
            static = ["-static"] if "musl" in target else []
            inputs = [*static, "-O1", "-fno-sanitize=all", str(source), *hook.objects(kind, folder)]
            hook.link(kind, inputs, linked := Path(folder, name))
            linked.replace(program)
    return program


class EmulatedLibrary:
    """What :func:`bitnet.core.cpu.native.library` opens, with its functions and its memory in an emulator's process.

    Args:
        command: The emulator and the program of :func:`driver`.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._words: dict[int, int] = {}
        self._samples: dict[int, bool] = {}
        self._lock, self._busy = threading.RLock(), False  # a request and its answer go together
        self._put_off: list[tuple[int, ...]] = []

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with self._lock:
            self._busy = True
            try:
                yield
                while self._put_off:
                    self._call(*self._put_off.pop())
            finally:
                self._busy = False

    def read(self, address: int, size: int) -> bytes:
        with self._alone():
            self._send(READ, address, size)
            return self._receive(size)

    def write(self, address: int, data: bytes) -> None:
        with self._alone():
            self._send(WRITE, address, len(data), data=data)

    def upload(self, data: bytes) -> int:
        """The address of a copy, which lives as long as the process."""
        address: int = self.bitnet_pages_alloc(len(data))
        self.write(address, data)
        return address

    def __getattr__(self, name: str) -> Callable[..., Any]:
        result, arguments = native.FUNCTIONS[name]

        def call(*values: int) -> Any:
            assert len(values) == len(arguments)
            request = (FUNCTIONS.index(name), *values)
            with self._lock:
                if self._busy:  # a finaliser, run by the collection of garbage in the middle of this thread's request
                    assert result is None
                    self._put_off.append(request)
                    return None
                with self._alone():
                    word = self._call(*request)
            if result is ctypes.c_char_p:
                return self.read(word, 64).partition(b"\0")[0] if word else None
            return word

        return call

    def bitnet_pack(self, level: int, pool: int, codes: int, packed: int, rows: int, columns: int) -> None:
        here = self.upload(ctypes.string_at(codes, rows * -(-columns // 128) * 32))
        self.__getattr__("bitnet_pack")(level, pool, here, packed, rows, columns)

    def bitnet_executable_new(self, level: int, pool: int, threads: int, program: native.NativeProgram) -> int:
        here = self.upload(bytes(program))
        handle: int = self.__getattr__("bitnet_executable_new")(level, pool, threads, here)
        self._words[handle] = program.step.words
        last = program.ops + (program.op_count - 1) * ctypes.sizeof(native.Op)
        kind = int.from_bytes(self.read(last, 4), "little")  # its first field
        self._samples[handle] = kind in (native.OpKind.SAMPLE, native.OpKind.HEAD_SAMPLE)
        return handle

    def bitnet_head_pack(
        self, level: int, pool: int, threads: int, dense: native.DenseMatmulOp, head: native.HeadSampleOp
    ) -> bool:
        operands = self.upload(bytes(dense)), self.upload(bytes(head))
        return bool(self.__getattr__("bitnet_head_pack")(level, pool, threads, *operands))

    def bitnet_executable_run(self, handle: int, step: int, count: int, tokens: int) -> None:
        data = ctypes.string_at(step, 4 * self._words[handle])
        size = 4 * count * int.from_bytes(data[8:12], "little")
        here, out = self.upload(data), self.bitnet_pages_alloc(max(size, 1))
        self.__getattr__("bitnet_executable_run")(handle, here, count, out)
        if self._samples[handle]:  # else there is no room for tokens
            ctypes.memmove(tokens, self.read(out, size), size)

    def _call(self, *request: int) -> int:
        self._send(CALL, *request)
        return int.from_bytes(self._receive(8), "little")

    def _send(self, *words: int, data: bytes = b"") -> None:
        assert self._process.stdin is not None
        request = [word % 2**64 for word in words] + [0] * (8 - len(words))
        self._process.stdin.write(b"".join(word.to_bytes(8, "little") for word in request) + data)
        self._process.stdin.flush()

    def _receive(self, size: int) -> bytes:
        assert self._process.stdout is not None
        pipe, data = self._process.stdout.fileno(), bytearray()
        while len(data) < size:
            assert select.select([pipe], [], [], PATIENCE)[0], f"no answer of the emulated process within {PATIENCE} s"
            part = os.read(pipe, size - len(data))
            assert part, f"the emulated process ended with status {self._process.wait(10)}"
            data += part
        return bytes(data)


class EmulatedArray:
    """As much of an array over emulated memory as an executable uses."""

    def __init__(
        self, library: EmulatedLibrary, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], stride: int
    ) -> None:
        self._library, self._address, self.shape, self.dtype = library, address, shape, dtype
        self._stride = stride if len(shape) > 1 else dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray[Any, Any]:
        count = len(range(*rows.indices(len(self))))
        data = np.frombuffer(self._library.read(self._address, count * self._stride), np.uint8)
        row = data.reshape(count, self._stride)[:, : int(np.prod(self.shape[1:])) * self.dtype.itemsize]
        return np.ascontiguousarray(row).view(self.dtype).reshape(count, *self.shape[1:])

    def __setitem__(self, rows: slice, array: np.ndarray[Any, Any]) -> None:
        for i, row in enumerate(np.ascontiguousarray(array).reshape(len(array), -1)):
            self._library.write(self._address + i * self._stride, row.tobytes())


class EmulatedLowering(Lowering):
    """Puts in emulated memory what the native library reads."""

    _library: Any

    def _keep(self, structures: ctypes.Array[Any]) -> int:
        return int(self._library.upload(bytes(structures)))

    def _copy(self, address: int, array: np.ndarray[Any, Any]) -> None:
        self._library.write(address, array.tobytes())

    def _view(self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], row_stride: int) -> Any:
        return EmulatedArray(self._library, address, shape, dtype, row_stride)


class EmulatedDevice(CpuDevice):
    lowering = EmulatedLowering


class EmulatedBackend:
    """The levels of an emulated processor, under the name of the emulator: ``qemu-aarch64:neon``."""

    hal_api = HAL_API

    def __init__(self, name: str, target: str, cpu: str) -> None:
        self.name, self._target, self._cpu = name, target, cpu

    def library(self) -> EmulatedLibrary:
        return EmulatedLibrary([self.name, "-cpu", self._cpu, str(driver(self._target))])

    def probe(self) -> ProbeResult:
        if reason := absent(self.name):
            return ProbeResult(ProbeStatus.NO_DEVICE, reason=reason)
        library = self.library()
        names = list(native.levels(library))  # type: ignore[arg-type]
        library.close()
        devices = [
            DeviceInfo(self.name, device_of(n), f"{self.name}:{n}", self._cpu, "", DeviceType.CPU) for n in names
        ]
        return ProbeResult(ProbeStatus.OK, devices)

    def open(self, info: DeviceInfo) -> CpuDevice:
        library = self.library()
        device = EmulatedDevice(info, library, threads=2)  # type: ignore[arg-type]
        weakref.finalize(device, library.close)
        return device

    def kernels(self) -> frozenset[str]:
        return BACKEND.kernels()


class TestNeon(ConformanceSuite):
    """NEON with dot products, and the portable level as an ARM compiler makes it."""

    backend = EmulatedBackend("qemu-aarch64", "musl-aarch64", "max")
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
    if not path.exists():
        units = hook.units

        def changed(table: object, arch: str) -> object:
            for source, flags in units(table, arch):
                yield source, stand_in.changed(flags) if f"-DLEVEL={stand_in.level}" in flags else flags

        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            hook.__dict__["units"] = changed
            try:
                inputs = ["-shared", *hook.objects(target, folder)]
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
            DeviceInfo("cpu", s.level, f"cpu:{s.level}", s.level, "", DeviceType.CPU)
            for s in STAND_INS
            if s.needs in levels
        ]
        reason = "" if devices else "this processor has no AVX-512 to stand in"
        return ProbeResult(ProbeStatus.OK if devices else ProbeStatus.NO_DEVICE, devices, reason)

    def open(self, info: DeviceInfo) -> CpuDevice:
        stand_in = next(s for s in STAND_INS if s.level == info.index)
        return CpuDevice(info, stand_in_library(stand_in), level=stand_in.level, threads=2)

    def kernels(self) -> frozenset[str]:
        return BACKEND.kernels()


class TestStandIns(ConformanceSuite):
    backend = StandInBackend()
    devices = tuple(info.name for info in StandInBackend().probe().devices)


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
    device = backend.open(next(info for info in backend.probe().devices if info.name == level))
    executable = device.compile(program)
    executable.write("x", x)
    executable.write("logits", np.full((rows, vocabulary), np.nan, np.float32))
    out = executable.run(Step(StepLayout(limits), parts, logits=False))[0]
    wide = weight.astype(np.float64)
    scores, exact = executable.read("logits", rows), x.astype(np.float64) @ wide.T
    device.close()
    assert out.tolist() == exact.argmax(axis=1).tolist()
    column = np.sqrt((wide**2).sum(axis=0) / 4096)
    step, norm = abs(wide / column).max(axis=1) / 7.5, np.linalg.norm(x * column, axis=1)
    error = abs(scores - exact) / (step * norm[:, None])
    assert error.max() < 7.5 / np.sqrt(12)
    assert error.std() > 0.1, "the head was not compact"


def test_inner_loop_of_neon_is_made_of_dot_products(tmp_path: Path) -> None:
    """A backward branch over at least 16 ``sdot`` by element, and little else (A64 encodings, Arm ARM C6.2, C7.2).

    The same by eye: ``llvm-objdump -d`` of the object that the build's command for ``-DLEVEL=neon`` makes.
    """
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("ziglang is not installed")
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
    backend = EmulatedBackend(emulator, target, cpu)
    require_device(emulator, absent(emulator) or None)
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
    require_device(emulator, absent(emulator) or None)
    backend = EmulatedBackend(emulator, target, cpu)
    device = backend.open(backend.probe().devices[0])
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
    require_device("qemu-x86_64", absent("qemu-x86_64") or None)
    library = EmulatedBackend("qemu-x86_64", "linux-x86_64", "Nehalem").library()
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
