"""What a device does: compile a program and run steps of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from bitnet.core.hal.probe import DeviceInfo
from bitnet.core.hal.program import Program
from bitnet.core.hal.step import Step


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Bytes on the device: ``total`` and ``free`` as its driver tells (0: unknown), ``used`` by this Device object."""

    total: int
    free: int
    used: int


@dataclass(frozen=True, slots=True)
class ExecutableStats:
    """What one pass of a program costs on its device, by the run before; by a decode step where there was none.

    Attributes:
        weight_bytes: Bytes of weights that the pass read, as the device stores them; of a table, none.
        dispatches: Kernels launched for the pass, 0 where there was none; None on a device that launches none.
    """

    weight_bytes: int
    dispatches: int | None = None


@runtime_checkable
class Executable(Protocol):
    """A program made ready on a device, with its weights, activations and KV cache. Calls are serialised by a lock."""

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels launched so far, in first-launch order, as recorded at launch.

        They are among those its backend's ``kernels()`` lists, and end in what they ran on (``embed_cuda``).
        """
        ...

    def stats(self) -> ExecutableStats:
        """What a pass costs, counted by the device. For measuring: a run is not slower for it.

        Raises:
            DeviceError: The executable is closed.
        """
        ...

    def run(self, step: Step, count: int = 1) -> npt.NDArray[np.int32]:
        """Run the program, and after it ``count - 1`` more decode steps, each feeding the tokens just sampled.

        ``count > 1`` needs a program that ends in ``Sample`` and a step with one token and one row a sequence, whose
        blocks hold ``count - 1`` positions more.

        Returns:
            ``int32[count, R]`` sampled tokens, ``NO_TOKEN`` for a row with a NaN; ``int32[count, 0]`` where the program
            has no ``Sample``.

        Raises:
            DeviceLostError, OutOfMemoryError, DeviceError: The device failed; the executable is unusable.
            InvalidInputError: The step or ``count`` is not what :class:`bitnet.core.hal.check.StepCheck` allows.
                Nothing has run then, and the executable stays usable.
        """
        ...

    def write(self, name: str, array: npt.NDArray[Any]) -> None:
        """Fill the first ``len(array)`` rows of an activation tensor (all of one with a fixed shape).

        Raises:
            InvalidInputError: There is no such tensor, or the array's type or shape does not fit it.
        """
        ...

    def read(self, name: str, rows: int | None = None) -> npt.NDArray[Any]:
        """Copy the first ``rows`` rows of an activation tensor to the host; all of its capacity where None.

        Raises:
            InvalidInputError: There is no such tensor, or it has fewer rows.
        """
        ...

    def close(self) -> None:
        """Free its memory. Further calls raise DeviceError; closing twice is allowed."""
        ...


@runtime_checkable
class Preparing(Protocol):
    """An executable that prepares something for each size of step, when it first runs one: an option of a device."""

    def prepare(self, step: Step, count: int = 1, *, stands_in: bool = False) -> None:
        """Make ready what a run of such a step needs, so that nothing is compiled or recorded then. Computes nothing.

        Args:
            stands_in: Whether this size also runs smaller steps, as long as their own sizes are not prepared.

        Raises:
            As :meth:`Executable.run`.
        """
        ...


@runtime_checkable
class GoesOn(Protocol):
    """An executable of a device that computes the next tokens before the host has the last (feature ``look-ahead``)."""

    def start(self, step: Step, count: int = 1) -> None:
        """Begin what :meth:`Executable.run` does, and do not wait for it.

        Raises:
            As :meth:`Executable.run`; an InvalidInputError also where tokens of a started step were not collected.
        """
        ...

    def go_on(self, count: int) -> None:
        """Begin ``count`` more decode steps after all that were started, each with the tokens sampled last as input.

        Their positions fit the blocks of the step that was started.

        Raises:
            As :meth:`start`; an InvalidInputError where no step was started.
        """
        ...

    def collect(self) -> npt.NDArray[np.int32]:
        """Wait for the oldest call of :meth:`start` or :meth:`go_on` whose tokens were not collected.

        Returns:
            As :meth:`Executable.run`. Log-probabilities that are read from now on are of these tokens.

        Raises:
            DeviceLostError, OutOfMemoryError, DeviceError: The device failed; the executable is unusable.
            InvalidInputError: There is nothing to collect.
        """
        ...


@runtime_checkable
class Adjusting(Protocol):
    """An executable of a device that adjusts logits (the feature ``penalties``)."""

    def fill_slot(self, slot: int, marks: npt.NDArray[np.int32], biases: npt.NDArray[np.float32]) -> None:
        """Say what a slot holds from now on; a step that names it counts the tokens it chooses there. At first: zeros.

        Args:
            slot: Below :attr:`~bitnet.core.hal.Limits.slots`.
            marks: ``int32[V]``: for each token 2 × how often it is in the output, plus 1 where it is in the prompt.
            biases: ``float32[V]``, added to the logits; ``-inf`` forbids a token.

        Raises:
            InvalidInputError: There is no such slot, the program has no ``Sample``, or an array is not as above.
            OutOfMemoryError, DeviceError: The device failed; the executable is unusable.
        """
        ...


class Logprobs(NamedTuple):
    """Natural log-probabilities of a run's passes, of the logits as they are before any adjustment.

    Attributes:
        chosen: ``float32[count, R]``, of the sampled tokens.
        tokens: ``int32[count, R, k]``: the likeliest first, of equals the lower; -1 past the vocabulary.
        values: ``float32[count, R, k]``, of those.
    """

    chosen: npt.NDArray[np.float32]
    tokens: npt.NDArray[np.int32]
    values: npt.NDArray[np.float32]

    @classmethod
    def of_words(cls, words: npt.NDArray[np.int32]) -> Logprobs:
        """From ``int32[count, R, 1 + 2 k]``: the chosen one's bits, the k tokens, and the bits of theirs."""
        k = words.shape[2] // 2
        floats = words.view(np.float32)
        return cls(floats[:, :, 0], words[:, :, 1 : 1 + k], floats[:, :, 1 + k :])


@runtime_checkable
class TellsLogprobs(Protocol):
    """An executable of a device that tells log-probabilities (the feature ``logprobs``)."""

    def logprobs(self) -> Logprobs:
        """Those of the last run.

        Raises:
            InvalidInputError: Its step did not ask for them, or nothing has run.
        """
        ...


@runtime_checkable
class Device(Protocol):
    """An open device."""

    @property
    def info(self) -> DeviceInfo: ...

    def compile(self, program: Program, *, keep: bool = False) -> Executable:
        """Load the program's weights into the layout this device reads best, and prepare its kernels.

        Args:
            keep: Every tensor holds after a run what the contract says, so that nothing may be fused or left out. Else
                only tensors that no operation reads do, and the logits that ``Sample`` reads where the step asks.

        Raises:
            InvalidInputError: The program is not well formed (:func:`bitnet.core.hal.check.check_program`).
            OutOfMemoryError: The weights, the cache or the activations do not fit.
            KernelCompileError: A kernel does not compile; the compiler's log is in the error.
        """
        ...

    def memory(self) -> MemoryInfo: ...

    def close(self) -> None:
        """Close every executable of this device and free all it holds. Closing twice is allowed."""
        ...
