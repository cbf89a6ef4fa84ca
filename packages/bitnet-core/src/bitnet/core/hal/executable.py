"""What every executable checks alike, so that a device's own methods see only calls that the contract allows."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from bitnet.core.errors import DeviceError, InvalidInputError, UnsupportedProgramError
from bitnet.core.hal.check import SlotCheck, StepCheck, TensorCheck, check_features, check_program
from bitnet.core.hal.device import ExecutableStats, Logprobs
from bitnet.core.hal.features import LOGPROBS, LOOK_AHEAD, PENALTIES, PREPARES
from bitnet.core.hal.probe import DeviceInfo
from bitnet.core.hal.program import Program
from bitnet.core.hal.step import HeaderWord, Step

_ADJUST, _LOGPROBS = HeaderWord.ADJUST.value, HeaderWord.LOGPROBS.value
"""Looked up once, because steps are run thousands of times a second."""

_METHODS = {PENALTIES: "on_fill_slot", PREPARES: "on_prepare"}
"""The method that a device overrides if it lists a feature."""


class Passes(NamedTuple):
    """The results of some passes.

    Attributes:
        tokens: ``int32[count, R]``; ``int32[count, 0]`` if the program has no ``Sample``.
        logprobs: ``int32[count, R, 1 + 2 k]``, as :meth:`Logprobs.of_words <bitnet.core.hal.Logprobs.of_words>` reads
            it; None if the step did not ask for log-probabilities.
    """

    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.int32] | None

    @classmethod
    def room(cls, step: Step, count: int, *, samples: bool) -> Passes:
        """Uninitialised arrays for ``count`` passes of a step."""
        rows, words = step.rows if samples else 0, 2 * int(step.data[_LOGPROBS]) - 1
        return cls(np.empty((count, rows), np.int32), np.empty((count, rows, words), np.int32) if words > 0 else None)


Begun: TypeAlias = Callable[[], Passes]
"""Passes that have begun: a function that waits for them and returns their results. It is called once at most."""


class CheckedExecutable(ABC):
    """Implements :class:`~bitnet.core.hal.Executable`: a device overrides the methods that begin with ``on_``.

    They are called one at a time, on an open executable, with arguments that were checked; ``on_write``, ``on_read``
    and ``on_fill_slot`` never between a start and its collect.

    Raises:
        InvalidInputError: The program is not well formed.
        UnsupportedProgramError: The program needs a feature that the device does not list.
        DeviceError: The device lists a feature, but its class does not override the method that the feature needs.
    """

    def __init__(self, info: DeviceInfo, program: Program) -> None:
        check_program(program)
        check_features(program, info)
        self._check_methods(info)
        self.info, self.program = info, program
        self.check_step, self.check_slot = StepCheck(program), SlotCheck(program)
        self.check_tensor = TensorCheck(program)
        self.lock: AbstractContextManager[Any] = threading.RLock()
        self.closed = False
        self._begun: deque[Begun] = deque()
        self._last: tuple[Step, int] | None = None  # the started step, and its number of passes
        self._logprobs: npt.NDArray[np.int32] | None = None

    @property
    @abstractmethod
    def kernels(self) -> tuple[str, ...]: ...

    @abstractmethod
    def on_stats(self) -> ExecutableStats: ...

    @abstractmethod
    def on_begin(self, step: Step, count: int, done: int) -> Begun:
        """Begin ``count`` passes of a step after the ``done`` passes that began before.

        ``done`` is 0 on devices without :data:`~bitnet.core.hal.LOOK_AHEAD`.
        """

    @abstractmethod
    def on_write(self, name: str, array: npt.NDArray[Any]) -> None:
        """Fill the first rows of a tensor."""

    @abstractmethod
    def on_read(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """The first rows of a tensor, as a new array of this shape."""

    @abstractmethod
    def on_close(self) -> None:
        """Free the memory. Called once."""

    async def arrival(  # noqa: B027  # most devices are waited for by collect
        self, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Wait in a task; needed by devices whose results only an event loop brings."""

    def on_prepare(self, step: Step, count: int, stands_in: bool) -> None:  # noqa: B027  # most devices prepare nothing
        """Prepare for a step; needed by devices with :data:`~bitnet.core.hal.PREPARES`."""

    def on_fill_slot(  # noqa: B027  # only devices with that feature
        self, slot: int, marks: npt.NDArray[np.int32], biases: npt.NDArray[np.float32]
    ) -> None:
        """Fill a slot; needed by devices with :data:`~bitnet.core.hal.PENALTIES`."""

    def stats(self) -> ExecutableStats:
        with self.lock:
            self._check_open()
            return self.on_stats()

    def start(self, step: Step, count: int = 1) -> None:
        with self.lock:
            self._check_idle()
            self._check(step, count, 0)
            self._begun.append(self.on_begin(step, count, 0))
            self._last = step, count

    def go_on(self, count: int) -> None:
        with self.lock:
            self._check_open()
            self._need(LOOK_AHEAD)
            if not self._begun or self._last is None:
                raise InvalidInputError("all started steps were collected; call start before go_on.")
            step, done = self._last
            self._check(step, count, done)
            self._begun.append(self.on_begin(step, count, done))
            self._last = step, done + count

    def collect(self) -> npt.NDArray[np.int32]:
        with self.lock:
            self._check_open()
            if not self._begun:
                raise InvalidInputError("there are no tokens to collect; call start before collect.")
            tokens, self._logprobs = self._begun.popleft()()
            return tokens

    def prepare(self, step: Step, count: int = 1, stands_in: bool = False) -> None:
        with self.lock:
            self._check_open()
            self._check(step, count, 0)
            self.on_prepare(step, count, stands_in)

    def logprobs(self) -> Logprobs:
        with self.lock:
            self._check_open()
            if self._logprobs is None:
                raise InvalidInputError("the last step did not request log-probabilities.")
            return Logprobs.of_words(self._logprobs)

    def fill_slot(self, slot: int, marks: npt.NDArray[np.int32], biases: npt.NDArray[np.float32]) -> None:
        with self.lock:
            self._check_idle()
            self._need(PENALTIES)
            self.check_slot(slot, marks, biases)
            self.on_fill_slot(slot, marks, biases)

    def write(self, name: str, array: npt.NDArray[Any]) -> None:
        with self.lock:
            self._check_idle()
            self.check_tensor.write(name, array)
            self.on_write(name, array)

    def read(self, name: str, rows: int | None = None) -> npt.NDArray[Any]:
        with self.lock:
            self._check_idle()
            return self.on_read(name, self.check_tensor.read(name, rows))

    def close(self) -> None:
        with self.lock:
            if not self.closed:
                self.closed = True
                self._begun.clear()
                self.on_close()

    def _check_methods(self, info: DeviceInfo) -> None:
        for feature, method in _METHODS.items():
            if feature in info.features and getattr(type(self), method) is getattr(CheckedExecutable, method):
                raise DeviceError(
                    f"it lists the feature {feature!r}, but {type(self).__name__} does not override {method}.",
                    device=info.name,
                    hint="This is a fault of the backend: it implements the method, or does not list the feature.",
                )

    def _check(self, step: Step, count: int, done: int) -> None:
        self.check_step(step, count, done)
        if step.data[_ADJUST]:
            self._need(PENALTIES)
        if step.data[_LOGPROBS]:
            self._need(LOGPROBS)

    def _check_open(self) -> None:
        if self.closed:
            raise DeviceError(f"the executable of {self.program.name!r} is closed.", device=self.info.name)

    def _check_idle(self) -> None:
        self._check_open()
        if self._begun:
            raise InvalidInputError("a started step was not collected; call collect first.")

    def _need(self, feature: str) -> None:
        if feature not in self.info.features:
            raise UnsupportedProgramError(f"it lacks the feature {feature!r}.", device=self.info.name)
