"""The CPU as a device: a whole step runs in one native call, on the device's own thread pool."""

from __future__ import annotations

import ctypes
import threading
import weakref
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from bitnet.core.cpu import native
from bitnet.core.cpu.lowering import LoweredProgram, NativeDevice
from bitnet.core.cpu.threads import default_threads
from bitnet.core.errors import DeviceError, InvalidInputError, OutOfMemoryError
from bitnet.core.hal import DeviceInfo, ExecutableStats, HeaderWord, Logprobs, MemoryInfo, Program, Step
from bitnet.core.hal.check import SlotCheck, StepCheck, TensorCheck, check_program
from bitnet.core.support import system

# Looked up once: steps are run thousands of times a second
_LOGITS, _LOGPROBS = HeaderWord.LOGITS.value, HeaderWord.LOGPROBS.value


class CpuDevice:
    """A CPU device with one instruction-set level of this processor.

    Args:
        library: The native library, open.
        level: One of :func:`bitnet.core.cpu.native.levels`; None: the best one for the device's name.
        threads: Number of threads; None: :func:`~bitnet.core.cpu.threads.default_threads`.

    Raises:
        DeviceError: This processor does not support that level.
    """

    lowered: ClassVar[type[LoweredProgram]] = LoweredProgram

    def __init__(
        self, info: DeviceInfo, library: ctypes.CDLL, *, level: str | None = None, threads: int | None = None
    ) -> None:
        self._info, self.library = info, library
        runnable = native.levels(library)
        wanted = [name for name in runnable if name == level or (level is None and device_of(name) == info.index)]
        if not wanted:
            raise DeviceError(
                f"this processor does not support {level or info.index}; it supports {', '.join(runnable) or 'none'}.",
                device=info.name,
            )
        self.level = wanted[0]
        self.level_handle = runnable[self.level]
        self.threads = threads or default_threads()
        self.pool = library.bitnet_pool_new(self.threads)
        if not self.pool:
            raise OutOfMemoryError("no memory for a thread pool.", device=info.name)
        self._delete_pool = weakref.finalize(self, library.bitnet_pool_delete, self.pool)
        self._delete_pool.atexit = False  # as an Arena's memory
        self._open: weakref.WeakSet[CpuExecutable] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._compiling = threading.Lock()  # held while the pool packs weights
        self._closed = False

    @property
    def info(self) -> DeviceInfo:
        return self._info

    def compile(self, program: Program, *, keep: bool = False) -> CpuExecutable:
        check_program(program)
        with self._compiling:
            if self._closed:
                raise DeviceError("the device is closed.", device=self.info.name)
            executable = CpuExecutable(self, program, keep=keep)
            with self._lock:
                self._open.add(executable)
        return executable

    def memory(self) -> MemoryInfo:
        with self._lock:
            used = sum(executable.used for executable in self._open)
        return MemoryInfo(system.memory_total(), system.memory_available(), used)

    def close(self) -> None:
        with self._compiling, self._lock:
            self._closed = True
            executables = list(self._open)
        for executable in executables:
            executable.close()
        self._delete_pool()


class CpuExecutable:
    """A program on the CPU, made by :meth:`CpuDevice.compile`.

    If a step says that nobody reads the logits, only logits that could win are computed exactly
    (``kernels/cpu/head_sample.h``), and the tensor holds approximate values for the rest.
    """

    def __init__(self, device: CpuDevice, program: Program, *, keep: bool) -> None:
        self._device = device  # keeps the thread pool alive
        self._name = program.name
        self._check = StepCheck(program)
        self._tensors, self._check_slot = TensorCheck(program), SlotCheck(program)
        self._lock = threading.Lock()
        self._kernels: tuple[str, ...] = ()
        self._library = library = device.library
        parts = NativeDevice(device.info.name, library, device.level_handle, device.pool, device.threads)
        self._lowered = device.lowered(program, parts, keep=keep)
        self._handle = library.bitnet_executable_new(parts.level, parts.pool, parts.threads, self._lowered.program)
        if not self._handle:
            self._lowered.close()
            raise OutOfMemoryError("no memory for the kernels' scratch space.", device=device.info.name)
        self._delete = weakref.finalize(self, library.bitnet_executable_delete, self._handle)
        self._delete.atexit = False  # as an Arena's memory
        self.used = self._lowered.used + library.bitnet_executable_bytes(self._handle)
        self._logprobs: npt.NDArray[np.int32] | None = None
        self._turns, self._exact = 1, False  # of the last run: number of passes, whether it computed all logits

    def stats(self) -> ExecutableStats:
        """The weight bytes of a compact head include the rows that the last run read in full."""
        with self._lock:
            self._usable()
            scored: int = self._library.bitnet_executable_scored(self._handle)
            fixed = self._lowered.weight_bytes - (self._lowered.head_bytes if self._exact else 0)
            return ExecutableStats(fixed + round(scored * self._lowered.head_row_bytes / self._turns))

    @property
    def kernels(self) -> tuple[str, ...]:
        with self._lock:
            self._record_kernels()
            return self._kernels

    def run(self, step: Step, count: int = 1) -> npt.NDArray[np.int32]:
        with self._lock:
            self._usable()
            self._check(step, count)
            tokens = np.zeros((count, step.rows if self._check.samples else 0), np.int32)
            told = 2 * int(step.data[_LOGPROBS]) - 1
            self._logprobs = None if told < 0 else np.zeros((count, step.rows, told), np.int32)
            where = None if self._logprobs is None else self._logprobs.ctypes.data
            self._library.bitnet_executable_run(self._handle, step.data.ctypes.data, count, tokens.ctypes.data, where)
            self._turns, self._exact = count, bool(step.data[_LOGITS]) or told >= 0
            return tokens

    def logprobs(self) -> Logprobs:
        """Implements :class:`~bitnet.core.hal.TellsLogprobs`."""
        with self._lock:
            self._usable()
            if self._logprobs is None:
                raise InvalidInputError("the last step did not request log-probabilities.")
            return Logprobs.of_words(self._logprobs)

    def fill_slot(self, slot: int, marks: npt.NDArray[np.int32], biases: npt.NDArray[np.float32]) -> None:
        """Implements :class:`~bitnet.core.hal.Adjusting`."""
        with self._lock:
            self._usable()
            self._check_slot(slot, marks, biases)
            self._lowered.marks[slot : slot + 1], self._lowered.biases[slot : slot + 1] = marks[None], biases[None]

    def write(self, name: str, array: npt.NDArray[Any]) -> None:
        with self._lock:
            self._usable()
            self._tensors.write(name, array)
            self._lowered.arrays[name][: len(array)] = array

    def read(self, name: str, rows: int | None = None) -> npt.NDArray[Any]:
        with self._lock:
            self._usable()
            self._tensors.read(name, rows)
            return np.array(self._lowered.arrays[name][:rows], order="C")

    def close(self) -> None:
        with self._lock:
            if not self._delete.alive:
                return
            self._record_kernels()
            self._delete()
            self._lowered.close()
            self.used = 0

    def _record_kernels(self) -> None:
        if not self._delete.alive:
            return
        library, names = self._library, list(self._kernels)
        while name := library.bitnet_executable_kernel(self._handle, len(names)):
            names.append(name.decode())
        self._kernels = tuple(names)

    def _usable(self) -> None:
        if not self._delete.alive:
            raise DeviceError(f"the executable of {self._name!r} is closed.", device=self._device.info.name)


def device_of(level: str) -> str:
    """The device name for a level: ``avx2`` for ``vnni_avx2``."""
    return level.rpartition("_")[2]
