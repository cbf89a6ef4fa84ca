"""A device in a process of its own, so that its faults do not affect our other devices.

After a kernel has faulted, CUDA fails every call of its process, on all GPUs (measured: ADR 0027). So each GPU of
several replicas is opened in a child, and used through :class:`IsolatedDevice`, which is a device like any other.
The child's side is :mod:`bitnet.core.devices.isolated_child`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from bitnet.core import hal
from bitnet.core.errors import BitNetError, DeviceError, DeviceLostError
from bitnet.core.hal import (
    BlockWeight,
    Device,
    DeviceInfo,
    ExecutableStats,
    Logprobs,
    MemoryInfo,
    OpenOptions,
    Step,
    TernaryData,
    TernaryWeight,
    Weight,
)
from bitnet.core.support import log
from bitnet.core.support.helper import HelperEnded, HelperProcess, HelperStartError, Program
from bitnet.core.support.helper.loop import Data
from bitnet.core.support.helper.values import dumped, loaded

MODULE = "bitnet.core.devices.isolated_child"
"""What a child runs."""
PATIENCE = 5.0
"""Seconds within which a child must close its device."""


def open_isolated(info: DeviceInfo, options: OpenOptions) -> Device:
    """Open a device in a child.

    Raises:
        DeviceError, DeviceUnavailableError: The device cannot be opened, or no child can be started.
    """
    device = IsolatedDevice(info)
    try:
        device.ask(None, "open", replace(info, details=dict(info.details)), options)
    except BaseException:
        device.close()
        raise
    return device


class IsolatedDevice:
    """A device that is open in a child process.

    Raises:
        DeviceError: No child can be started.
    """

    def __init__(self, info: DeviceInfo) -> None:
        self.info = info
        self._lock = threading.RLock()
        self._lost: DeviceError | None = None
        self._weights: Mapping[str, Weight] = {}
        """Weights that the child may request during a call."""
        try:
            self._process = HelperProcess(
                Program(
                    MODULE,
                    f"{info.name} is used",
                    setup=log.level(),
                    question=self._weight,
                    patience=PATIENCE,
                    stderr="shown",
                )
            )
            self._process.ready()
        except HelperStartError as error:
            raise DeviceError(f"no process can be started for it ({error.reason})", device=info.name) from error

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def memory(self) -> MemoryInfo:
        found: MemoryInfo = self.ask(None, "memory")
        return found

    def compile(self, program: hal.Program, *, keep: bool = False) -> IsolatedExecutable:
        """As :meth:`bitnet.core.hal.Device.compile`.

        The child loads the weights itself, from a file that the system has already cached. If it cannot, they are
        loaded here and sent when the child asks for them.
        """
        described = None
        if program.again is None:
            described = {name: _described(weight) for name, weight in program.weights.items()}
        bare = replace(program, weights={}, tensors=dict(program.tensors), ops=list(program.ops))
        with self._lock:
            self._weights = program.weights
            try:
                return IsolatedExecutable(self, self.ask(None, "compile", bare, described, keep))
            finally:
                self._weights = {}

    def ask(self, target: int | None, call: str, *arguments: Any) -> Any:
        """Call a method of the child's device, or of its executable number ``target``, and return the result.

        Raises:
            DeviceLostError: The child has ended, or the device has been lost before.
            BitNetError: Raised by the call in the child.
        """
        with self._lock:
            if self._lost is not None:
                raise self._lost
            try:
                value = loaded(self._process.exchange(dumped((target, call, arguments))))
            except HelperEnded as error:
                self._lost = DeviceLostError(f"its process {error}.", device=self.info.name)
                raise self._lost from error
            except BaseException:  # such as Ctrl-C: the pending answer would be taken for the next call's
                self._lost = DeviceLostError("A call to its process was interrupted.", device=self.info.name)
                raise
            if isinstance(value, BitNetError):
                if isinstance(value, DeviceLostError):
                    self._lost = value
                raise value
            return value

    def close(self) -> None:
        with self._lock:
            if self._lost is None:
                self._lost = DeviceError("the device is closed", device=self.info.name)
            self._process.end(wait=True)

    def _weight(self, name: bytearray) -> Data:
        return dumped(_loaded(self._weights[name.decode()]))


def _described(weight: Weight) -> tuple[Any, ...]:
    """A picklable description of a weight, without its ``load``."""
    if isinstance(weight, TernaryWeight):
        return "ternary", weight.shape, (weight.group, weight.binary)
    return "blocks" if isinstance(weight, BlockWeight) else "dense", weight.shape, weight.dtype


def _loaded(weight: Weight) -> Any:
    """The values of a weight, or the error in loading them, which the child then raises.

    The values are copied, so that a truncated file is noticed here, not while writing to the pipe.
    """
    try:
        data = weight.load()
    except BitNetError as error:
        return error
    copied = TernaryData(data.codes.copy(), data.scale.copy()) if isinstance(data, TernaryData) else np.array(data)
    weight.release()
    return copied


class IsolatedExecutable:
    """A program compiled by the child. Its kernels stay known after the process has ended."""

    def __init__(self, device: IsolatedDevice, number: int) -> None:
        self._device, self._number, self._kernels = device, number, ()
        self.lock: AbstractContextManager[Any] = threading.RLock()

    def _ask(self, call: str, *arguments: Any) -> Any:
        value, kernels = self._device.ask(self._number, call, *arguments)
        if kernels is not None:
            self._kernels = kernels
        return value

    @property
    def kernels(self) -> tuple[str, ...]:
        return self._kernels

    def stats(self) -> ExecutableStats:
        found: ExecutableStats = self._ask("stats")
        return found

    def start(self, step: Step, count: int = 1) -> None:
        self._ask("start", step, count)

    def go_on(self, count: int) -> None:
        self._ask("go_on", count)

    def collect(self) -> npt.NDArray[np.int32]:
        tokens: npt.NDArray[np.int32] = self._ask("collect")
        return tokens

    async def arrival(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Returns at once: :meth:`collect` waits for the device's process."""

    def logprobs(self) -> Logprobs:
        found: Logprobs = self._ask("logprobs")
        return found

    def prepare(self, step: Step, count: int = 1, stands_in: bool = False) -> None:
        self._ask("prepare", step, count, stands_in)

    def fill_slot(self, slot: int, marks: npt.NDArray[np.int32], biases: npt.NDArray[np.float32]) -> None:
        self._ask("fill_slot", slot, marks, biases)

    def write(self, name: str, array: npt.NDArray[Any]) -> None:
        self._ask("write", name, array)

    def read(self, name: str, rows: int | None = None) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = self._ask("read", name, rows)
        return found

    def close(self) -> None:
        try:
            self._ask("close")
        except DeviceError:  # nothing is left to close
            return
