"""The CPU as a device: a whole step runs in one native call, on the device's own thread pool."""

from __future__ import annotations

import ctypes
import threading
import weakref
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from bitnet.core.cpu import native
from bitnet.core.cpu.lowering import UNPACKED_TOKENS, LoweredProgram, NativeDevice
from bitnet.core.cpu.threads import default_threads
from bitnet.core.errors import DeviceError, OutOfMemoryError
from bitnet.core.hal import (
    Begun,
    CheckedExecutable,
    DeviceInfo,
    ExecutableStats,
    HeaderWord,
    MemoryInfo,
    Passes,
    Program,
    Step,
)
from bitnet.core.support import system


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


class CpuExecutable(CheckedExecutable):
    """A program on the CPU, made by :meth:`CpuDevice.compile`. Steps are computed when their tokens are collected.

    If a step says that nobody reads the logits, only logits that could win are computed exactly
    (``kernels/cpu/head_sample.h``), and the tensor holds approximate values for the rest. With one sequence, the
    weights for that are packed after the first step that samples, which computes all logits; and those of layers after
    the first step, if it is short and the file has them as devices take them.
    """

    def __init__(self, device: CpuDevice, program: Program, *, keep: bool) -> None:
        super().__init__(device.info, program)
        self._device = device  # keeps the thread pool alive
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
        self._turns = 1  # passes of the last run
        self._ran = self._sampled = False

    @property
    def kernels(self) -> tuple[str, ...]:
        with self.lock:
            self._record_kernels()
            return self._kernels

    def on_stats(self) -> ExecutableStats:
        """The weight bytes of a compact head include the rows that the last run read in full."""
        scored: int = self._library.bitnet_executable_scored(self._handle)
        exact: bool = self._library.bitnet_executable_exact(self._handle)
        fixed = self._lowered.weight_bytes - (self._lowered.head_bytes if exact else 0)
        return ExecutableStats(fixed + round(scored * self._lowered.head_row_bytes / self._turns))

    def on_begin(self, step: Step, count: int, done: int) -> Begun:
        return partial(self._compute, step, count)

    def _compute(self, step: Step, count: int) -> Passes:
        passes = Passes.room(step, count, samples=self.check_step.samples)
        logprobs = None if passes.logprobs is None else passes.logprobs.ctypes.data
        words = self._words(step, count)
        self._library.bitnet_executable_run(self._handle, words.ctypes.data, count, passes.tokens.ctypes.data, logprobs)
        self._turns = count
        return passes

    def on_prepare(self, step: Step, count: int, stands_in: bool) -> None:
        """Pack what the second step would pack."""
        self._ran = self._sampled = True
        self._words(step, count)

    def _words(self, step: Step, count: int) -> npt.NDArray[np.int32]:
        """The step's words; those of the first step that samples ask for all logits if the compact head waits. Packs
        what the step needs packed."""
        words: npt.NDArray[np.int32] = step.data
        if self._lowered.layers_wait and (self._ran or count > 1 or words[HeaderWord.TOKENS] > UNPACKED_TOKENS):
            self._lowered.pack_layers()
        self._ran = True
        if not self._lowered.head_waits or not step.rows or words[HeaderWord.LOGITS]:
            return words
        if self._sampled or count > 1 or words[HeaderWord.LOGPROBS]:
            self._lowered.pack_head()
            return words
        self._sampled = True
        words = words.copy()
        words[HeaderWord.LOGITS] = 1
        return words

    def on_fill_slot(self, slot: int, marks: npt.NDArray[np.int32], biases: npt.NDArray[np.float32]) -> None:
        self._lowered.marks[slot : slot + 1], self._lowered.biases[slot : slot + 1] = marks[None], biases[None]

    def on_write(self, name: str, array: npt.NDArray[Any]) -> None:
        self._lowered.arrays[name][: len(array)] = array

    def on_read(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        return np.array(self._lowered.arrays[name][: shape[0]], order="C")

    def on_close(self) -> None:
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


def device_of(level: str) -> str:
    """The device name for a level: ``avx2`` for ``vnni_avx2``."""
    return level.rpartition("_")[2]
