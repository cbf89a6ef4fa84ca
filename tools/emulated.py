"""A CPU device whose native library runs in a process of its own: under an emulator, or as another system's program.

The process is ``emulated.c`` with the kernels. Python's side of the device is the real one, its pointers being
addresses in that process. ``packages/bitnet-core/tests/cpu`` runs other processors and other systems with it.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from filelock import FileLock

from bitnet.core.cpu import native, structures
from bitnet.core.cpu.backend import BACKEND
from bitnet.core.cpu.device import CpuDevice
from bitnet.core.cpu.lowering import LoweredProgram
from bitnet.core.hal import (
    BLOCK_TABLES,
    EXPERTS,
    HAL_API,
    LOGPROBS,
    PENALTIES,
    STATES,
    TERNARY_TABLES,
    WINDOWS,
    DeviceInfo,
    DeviceType,
    HeaderWord,
    OpenOptions,
    ProbeResult,
    ProbeStatus,
)
from bitnet.core.hal.step import HEADER_WORDS

SOURCE = Path(__file__).with_suffix(".c")
HOOK = Path(__file__).resolve().parents[1] / "packages/bitnet-core/hatch_build.py"
FUNCTIONS = tuple(native.FUNCTIONS)
READ, WRITE, CALL = range(3)
PATIENCE = 120
NIGHT = pytest.mark.nightly(unless_changed=["kernels/cpu", HOOK.as_posix()])
"""For what tells no more than other tests do, unless the native library has changed."""


@cache
def build_hook() -> ModuleType:
    """The wheel's build hook, for how the kernels are compiled."""
    spec = importlib.util.spec_from_file_location("bitnet_hatch_build", HOOK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@cache
def driver(target: str, *, shared: bool) -> Path:
    """``emulated.c`` as a program for a target of the build hook, kept in the build cache.

    Args:
        shared: Whether it opens the library that the wheel has, which lies beside it, or holds the kernels itself.
    """
    hook = build_hook()
    kind = hook.TARGETS[target]
    name = f"emulated-{hashlib.sha256(SOURCE.read_bytes() + bytes(shared)).hexdigest()[:16]}"
    program: Path = hook.cache() / hook.digest(kind) / (f"{name}.exe" if kind.system == "windows" else name)
    program.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{program}.lock"):  # tests run in several processes
        if not program.exists():
            with tempfile.TemporaryDirectory(dir=program.parent) as folder:
                # Without the other processor's libraries at hand, the program brings its own.
                own = ["-static"] if "musl" in target else []
                kernels = of_the_wheel(target, folder) if shared else [*own, *hook.objects(kind, folder)]
                inputs = ["-O2", "-fno-sanitize=all", str(SOURCE), *kernels]
                hook.link(kind, inputs, linked := Path(folder, program.name))
                linked.replace(program)
    return program


def of_the_wheel(target: str, folder: str) -> list[str]:
    """Linker options of a program that opens the wheel's library."""
    hook = build_hook()
    library: Path = hook.build(hook.TARGETS[target])
    if hook.TARGETS[target].system != "windows":
        return ["-dynamic", str(library)]
    exports, stubs = Path(folder, "exports.def"), Path(folder, "exports.lib")
    exports.write_text(f"LIBRARY {library.name}\nEXPORTS\n" + "".join(f"{name}\n" for name in FUNCTIONS))
    machine = {"x86_64": "i386:x86-64", "aarch64": "arm64"}[hook.TARGETS[target].arch]
    hook.run([*hook.zig(), "dlltool", "-m", machine, "-d", str(exports), "-l", str(stubs)])
    return [str(stubs)]


class EmulatedLibrary:
    """A stand-in for :func:`bitnet.core.cpu.native.library`, with functions and memory in an emulator's process.

    Args:
        command: The emulator and the program of :func:`driver`.
        environment: Variables that the emulator needs.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] = {}) -> None:
        kept = {**os.environ, **environment}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=kept)
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

    def bitnet_pack(self, level: int, pool: int, job: structures.PackJob) -> None:
        there = structures.PackJob.from_buffer_copy(job)
        there.codes = self.upload(ctypes.string_at(job.codes, job.rows * -(-job.columns // 128) * 32))
        if job.group:
            there.scales = self.upload(ctypes.string_at(job.scales, job.rows * job.columns // job.group * 2))
        self.__getattr__("bitnet_pack")(level, pool, self.upload(bytes(there)))

    def bitnet_executable_new(self, level: int, pool: int, threads: int, program: structures.NativeProgram) -> int:
        here = self.upload(bytes(program))
        handle: int = self.__getattr__("bitnet_executable_new")(level, pool, threads, here)
        self._words[handle] = program.step.words
        last = program.ops + (program.op_count - 1) * ctypes.sizeof(structures.Op)
        kind = int.from_bytes(self.read(last, 4), "little")  # its first field
        self._samples[handle] = kind in (structures.OpKind.SAMPLE, structures.OpKind.HEAD_SAMPLE)
        return handle

    def bitnet_head_pack(
        self, level: int, pool: int, threads: int, dense: structures.DenseMatmulOp, head: structures.HeadSampleOp
    ) -> bool:
        operands = self.upload(bytes(dense)), self.upload(bytes(head))
        return bool(self.__getattr__("bitnet_head_pack")(level, pool, threads, *operands))

    def bitnet_executable_run(self, handle: int, step: int, count: int, tokens: int, logprobs: int | None) -> None:
        data = ctypes.string_at(step, 4 * self._words[handle])
        header = np.frombuffer(data, np.int32, HEADER_WORDS)
        size = 4 * count * int(header[HeaderWord.ROWS])
        logprobs_size = size * max(2 * int(header[HeaderWord.LOGPROBS]) - 1, 0)
        here, out, tell = self.upload(data), *(self.bitnet_pages_alloc(max(n, 1)) for n in (size, logprobs_size))
        self.__getattr__("bitnet_executable_run")(handle, here, count, out, tell)
        if logprobs is not None:
            ctypes.memmove(logprobs, self.read(tell, logprobs_size), logprobs_size)
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


FEATURES = (PENALTIES, LOGPROBS, BLOCK_TABLES, TERNARY_TABLES, STATES, EXPERTS, WINDOWS)
"""Those of every level."""


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
        for i, row in enumerate(np.ascontiguousarray(array).reshape(len(array), -1), rows.indices(len(self))[0]):
            self._library.write(self._address + i * self._stride, row.tobytes())


class EmulatedProgram(LoweredProgram):
    """Puts in emulated memory what the native library reads."""

    MAX_COPIED = sys.maxsize
    _library: Any

    def _keep(self, structures: ctypes.Array[Any]) -> int:
        return int(self._library.upload(bytes(structures)))

    def _copy(self, address: int, array: np.ndarray[Any, Any]) -> None:
        self._library.write(address, array.tobytes())

    def _stay(self, array: np.ndarray[Any, Any]) -> int:
        return int(self._library.upload(array.tobytes()))

    def _view(self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], row_stride: int) -> Any:
        return EmulatedArray(self._library, address, shape, dtype, row_stride)


class EmulatedDevice(CpuDevice):
    lowered = EmulatedProgram


class EmulatedBackend:
    """The levels of a processor or system, under the name of what runs them: ``qemu-aarch64:neon``, ``wine:avx2``.

    Args:
        name: What runs the program.
        target: A target of the build hook.
        options: Arguments before the program's path.
    """

    hal_api = HAL_API
    package = "qemu-user"
    """Its Debian package."""
    shared = False
    """As for :func:`driver`."""

    def __init__(self, name: str, target: str, *options: str) -> None:
        self.name, self.target, self._options = name, target, options

    def program(self) -> str | None:
        """The path of what runs the program; None where it is not installed."""
        return shutil.which(self.name)

    def environment(self) -> dict[str, str]:
        """Variables that it needs."""
        return {}

    def absent(self) -> str | None:
        """Why kernels cannot be built and run; None where they can."""
        if self.program() is None:
            return f"{self.name} is not installed (Debian: {self.package})"
        return None if importlib.util.find_spec("ziglang") else "ziglang is not installed"

    def library(self) -> EmulatedLibrary:
        command = [self.program() or "", *self._options, str(driver(self.target, shared=self.shared))]
        return EmulatedLibrary(command, self.environment())

    def probe(self) -> ProbeResult:
        if reason := self.absent():
            return ProbeResult(ProbeStatus.NO_DEVICE, reason=reason)
        library = self.library()
        names = list(native.levels(library))  # type: ignore[arg-type]
        library.close()
        what = " ".join([self.name, *self._options])
        devices = [
            DeviceInfo(self.name, level, f"{self.name}:{level}", what, "", DeviceType.CPU, features=FEATURES)
            for level in names
        ]
        return ProbeResult(ProbeStatus.OK, devices)

    def open(self, info: DeviceInfo, options: OpenOptions) -> CpuDevice:
        library = self.library()
        threads = options.threads or 2
        device = EmulatedDevice(info, library, level=info.index, threads=threads)  # type: ignore[arg-type]
        weakref.finalize(device, library.close)
        return device

    def kernels(self) -> frozenset[str]:
        return BACKEND.kernels()


class BestByDay:
    """Before :class:`ConformanceSuite`: the first device by day, the others as ``NIGHT`` says."""

    def _params(self) -> list[Any]:
        first, *rest = super()._params()  # type: ignore[misc]
        return [first, *(pytest.param(*p.values, id=p.id, marks=[*p.marks, NIGHT]) for p in rest)]
