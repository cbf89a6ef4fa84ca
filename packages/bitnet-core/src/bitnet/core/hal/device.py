"""The interface of a device: it compiles programs and runs steps of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from bitnet.core.hal.probe import DeviceInfo
from bitnet.core.hal.program import Program
from bitnet.core.hal.step import Step


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Bytes on the device: ``total`` and ``free`` as its driver reports (0: unknown), ``used`` by this Device
    object."""

    total: int
    free: int
    used: int


@dataclass(frozen=True, slots=True)
class ExecutableStats:
    """Cost of one pass of a program, counted in the last run, or estimated for a decode step before any run.

    Attributes:
        weight_bytes: Bytes of weights read in the pass, in the device's layout; embedding tables do not count.
        dispatches: Kernels launched for the pass, 0 before the first run; None on devices that launch no kernels.
    """

    weight_bytes: int
    dispatches: int | None = None


class Logprobs(NamedTuple):
    """Natural log-probabilities of a run's passes, from the logits before any adjustment.

    Attributes:
        chosen: ``float32[count, R]``, of the sampled tokens.
        tokens: ``int32[count, R, k]``: the likeliest first, of equally likely ones the lower id; -1 past the
            vocabulary.
        values: ``float32[count, R, k]``, of ``tokens``.
    """

    chosen: npt.NDArray[np.float32]
    tokens: npt.NDArray[np.int32]
    values: npt.NDArray[np.float32]

    @classmethod
    def of_words(cls, words: npt.NDArray[np.int32]) -> Logprobs:
        """From ``int32[count, R, 1 + 2 k]``: the chosen token's value as bits, the k tokens, and their values as
        bits."""
        k = words.shape[2] // 2
        floats = words.view(np.float32)
        return cls(floats[:, :, 0], words[:, :, 1 : 1 + k], floats[:, :, 1 + k :])


@runtime_checkable
class Executable(Protocol):
    """A program compiled for a device, with its weights, activations and KV cache. Calls are serialised by a lock.

    A step is run by :meth:`start` and :meth:`collect`; :func:`run` does both. Between them, only :meth:`go_on`,
    :meth:`prepare`, :meth:`logprobs`, :meth:`stats`, :attr:`kernels` and :meth:`close` may be called. The last four
    methods of this class belong to features that the device may lack (:mod:`bitnet.core.hal.features`);
    :class:`~bitnet.core.hal.CheckedExecutable` refuses them then, and checks all other calls.
    """

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Re-entrant; a thread that holds it is the only one that starts and collects."""
        ...

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels launched so far, in first-launch order, as recorded at launch.

        Each is listed by its backend's ``kernels()`` and ends in the backend or level it ran on (``embed_cuda``).
        """
        ...

    def stats(self) -> ExecutableStats:
        """Cost of a pass, counted by the device, for measurements. Counting does not slow down runs.

        Raises:
            DeviceError: The executable is closed.
        """
        ...

    def start(self, step: Step, count: int = 1) -> None:
        """Begin to run the program, then ``count - 1`` more decode steps, each fed the tokens just sampled.

        Does not wait for the device. A device that is the host itself computes in :meth:`collect`. The step must not
        change before its tokens are collected.

        Args:
            count: 1 to :data:`~bitnet.core.hal.MAX_COUNT`. More than 1 needs a program that ends in ``Sample`` and a
                step with one token and one row per sequence, whose blocks have room for ``count - 1`` further
                positions.

        Raises:
            DeviceLostError, OutOfMemoryError, DeviceError: The device failed; the executable is unusable.
            UnsupportedProgramError: The step needs a feature that the device does not list.
            InvalidInputError: :class:`bitnet.core.hal.check.StepCheck` rejects the step or ``count``, or tokens of a
                started step were not collected. Nothing has begun, and the executable stays usable.
        """
        ...

    def collect(self) -> npt.NDArray[np.int32]:
        """Wait for the oldest call of :meth:`start` or :meth:`go_on` whose tokens were not collected.

        Returns: ``int32[count, R]`` sampled tokens, ``NO_TOKEN`` for a row with a NaN; ``int32[count, 0]`` if the
            program has no ``Sample``. Log-probabilities read afterwards are those of these tokens.

        Raises:
            DeviceLostError, OutOfMemoryError, DeviceError: The device failed; the executable is unusable.
            InvalidInputError: There is nothing to collect.
        """
        ...

    async def arrival(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Wait, in an event loop's task, until :meth:`collect` need not wait for the device.

        A device whose results can be waited for in a thread alone returns at once, and :meth:`collect` waits.

        Args:
            progress: Called with the kernels that are compiled and with all, after each that is waited for.

        Raises:
            DeviceLostError, OutOfMemoryError, DeviceError: The device failed; the executable is unusable.
        """
        ...

    def write(self, name: str, array: npt.NDArray[Any]) -> None:
        """Fill the first ``len(array)`` rows of an activation tensor (all of one with a fixed shape).

        Raises:
            InvalidInputError: There is no such tensor, the array's type or shape does not fit it, or tokens of a
                started step were not collected.
        """
        ...

    def read(self, name: str, rows: int | None = None) -> npt.NDArray[Any]:
        """Copy the first ``rows`` rows of an activation tensor to the host; None: its whole capacity.

        Raises:
            InvalidInputError: There is no such tensor, it has fewer rows, or tokens of a started step were not
                collected.
        """
        ...

    def close(self) -> None:
        """Free its memory. Further calls raise DeviceError; closing twice is allowed."""
        ...

    def go_on(self, count: int) -> None:
        """Begin ``count`` more decode steps after those already started, each fed the tokens just sampled.

        Needs :data:`~bitnet.core.hal.LOOK_AHEAD`. The positions must fit the blocks of the started step.

        Raises:
            As :meth:`start`; also InvalidInputError if all started steps were collected.
        """
        ...

    def prepare(self, step: Step, count: int = 1, stands_in: bool = False) -> None:
        """Prepare for a run of such a step, so that nothing is compiled or recorded then. Computes nothing.

        Saves time on devices with :data:`~bitnet.core.hal.PREPARES`, and packs weights that wait on the CPU; does
        nothing on others.

        Args:
            stands_in: Whether what is prepared also serves smaller steps until their own sizes are prepared.

        Raises:
            As :meth:`start`.
        """
        ...

    def fill_slot(self, slot: int, marks: npt.NDArray[np.int32], biases: npt.NDArray[np.float32]) -> None:
        """Set the contents of a slot. A step that names the slot also counts its chosen tokens there. Slots start as
        zeros.

        Needs :data:`~bitnet.core.hal.PENALTIES`.

        Args:
            slot: Below :attr:`~bitnet.core.hal.Limits.slots`.
            marks: ``int32[V]``: for each token, 2 × its count in the output, plus 1 if it is in the prompt.
            biases: ``float32[V]``, added to the logits; ``-inf`` forbids a token.

        Raises:
            InvalidInputError: There is no such slot, the program has no ``Sample``, an array is not as above, or tokens
                of a started step were not collected.
            OutOfMemoryError, DeviceError: The device failed; the executable is unusable.
        """
        ...

    def logprobs(self) -> Logprobs:
        """The log-probabilities of the tokens collected last. Needs :data:`~bitnet.core.hal.LOGPROBS`.

        Raises:
            InvalidInputError: Their step did not request them, or nothing was collected.
        """
        ...


def run(executable: Executable, step: Step, count: int = 1) -> npt.NDArray[np.int32]:
    """Start a step and wait for its tokens; as :meth:`Executable.start` and :meth:`Executable.collect`.

    Threads that share an executable may call it at the same time: they take turns.
    """
    with executable.lock:
        executable.start(step, count)
        return executable.collect()


@runtime_checkable
class Device(Protocol):
    """An open device."""

    @property
    def info(self) -> DeviceInfo: ...

    def compile(self, program: Program, *, keep: bool = False) -> Executable:
        """Load the program's weights in the layout that suits this device best, and prepare its kernels.

        Args:
            keep: If true, every tensor holds the contract's values after a run, so nothing may be fused or left out. If
                false, this is guaranteed only for tensors that no operation reads, and for the logits that ``Sample``
                reads if the step asks for them.

        Raises:
            InvalidInputError: The program is not well formed (:func:`bitnet.core.hal.check.check_program`).
            OutOfMemoryError: The weights, the cache or the activations do not fit.
            KernelCompileError: A kernel does not compile; the error holds the compiler's log.
        """
        ...

    def memory(self) -> MemoryInfo: ...

    def close(self) -> None:
        """Close every executable of this device and free its resources. Closing twice is allowed."""
        ...
