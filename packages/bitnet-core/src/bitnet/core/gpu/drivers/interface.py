"""The interface to a GPU API: a handful of calls, which each backend's ``device.py`` implements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt


class Buffer(Protocol):
    """Device memory of ``nbytes`` bytes; otherwise opaque except to its driver."""

    @property
    def nbytes(self) -> int: ...


Scalar: TypeAlias = np.int32 | np.uint32 | np.float32
Arg: TypeAlias = Buffer | Scalar
Size3: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """A kernel and how to compile it.

    Attributes:
        file: Source in the backend's kernel folder, without extension: the operation's name.
        entry: Function in it; receipts print this name.
        defines: Preprocessor constants, in a fixed order.
    """

    file: str
    entry: str
    defines: tuple[tuple[str, int | str], ...] = ()


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: ``grid`` counts work-groups (blocks), ``block`` their work-items (threads).

    Attributes:
        shared: Bytes of work-group memory beyond what the kernel declares.
        overlaps: Whether the kernel may start early because it waits for the previous one itself, if the API allows
            that.
    """

    kernel: KernelSpec
    grid: Size3
    block: Size3
    args: tuple[Arg, ...]
    shared: int = 0
    overlaps: bool = False

    @property
    def buffers(self) -> tuple[Any, ...]:
        """The buffer arguments, in order. (``Any``: each driver has its own type.)"""
        return tuple(arg for arg in self.args if not isinstance(arg, np.generic))

    @property
    def scalars(self) -> bytes:
        """The bytes of the other arguments, in order."""
        return b"".join(arg.tobytes() for arg in self.args if isinstance(arg, np.generic))


def launch(
    file: str,
    grid: Size3,
    group: int,
    args: tuple[Arg, ...],
    defines: Mapping[str, int] = MappingProxyType({}),
    *,
    entry: str | None = None,
) -> Launch:
    """A launch of ``entry`` (default: named as its file) by ``grid`` work-groups of ``group`` work-items."""
    return Launch(KernelSpec(file, entry or file, tuple(defines.items())), grid, (group, 1, 1), args)


class Driver(Protocol):
    """An open device of one API. All errors are from ``bitnet.core.errors`` and name the device."""

    def alloc(self, nbytes: int) -> Buffer:
        """Uninitialised memory; raises OutOfMemoryError."""
        ...

    def free(self, buffer: Any) -> None:
        """Free memory of :meth:`alloc`. (``Any``: each driver accepts only buffers of its own type.)"""
        ...

    def upload(self, buffer: Any, array: npt.NDArray[Any], offset: int = 0) -> None:
        """Copy a C-contiguous array to ``offset`` bytes into the buffer. The array may be reused on return."""
        ...

    def download(self, buffer: Any, array: npt.NDArray[Any], offset: int = 0) -> None:
        """Wait for all submitted work, then fill a C-contiguous array."""
        ...

    def record(self, launches: Sequence[Launch]) -> object:
        """Compile missing kernels, and make the launches replayable in order, each seeing the writes of earlier
        ones."""
        ...

    def submit(self, recording: Any) -> None:
        """Start a recording after all earlier submissions. Does not wait."""
        ...

    def memory(self) -> tuple[int, int]:
        """Total and free bytes of the device; 0 if the API does not report them."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Fetching(Protocol):
    """A driver that copies to the host while work submitted later runs: one of a device with
    :data:`~bitnet.core.hal.LOOK_AHEAD`."""

    def fetch(self, buffer: Any, array: npt.NDArray[Any]) -> Callable[[], None]:
        """Begin to copy the start of the buffer, in its state after all work submitted so far.

        Returns:
            A function that waits for the copy and fills the C-contiguous array. Call it exactly once.
        """
        ...


@runtime_checkable
class Arriving(Protocol):
    """A :class:`Fetching` driver whose copies arrive only while an event loop runs, as in a browser."""

    async def arrival(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Wait for all kernels that are being compiled, and for all copies that have begun; raises DeviceError.

        Args:
            progress: As for :meth:`bitnet.core.hal.Executable.arrival`.
        """
        ...


@runtime_checkable
class Adopter(Protocol):
    """A driver whose device may read host memory in place, as integrated GPUs do."""

    def adopt(self, array: npt.NDArray[Any]) -> Buffer | None:
        """A buffer that uses a C-contiguous array's own memory and keeps the array alive. Kernels only read it.

        Released by :meth:`Driver.free`. None if the device cannot read that memory.
        """
        ...
