"""What a GPU API must offer to serve programs: a handful of calls, which each backend's ``device.py`` implements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt


class Buffer(Protocol):
    """Device memory of ``nbytes`` bytes; what else it is, only its driver knows."""

    @property
    def nbytes(self) -> int: ...


Scalar: TypeAlias = np.int32 | np.uint32 | np.float32
Arg: TypeAlias = Buffer | Scalar
Size3: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """A kernel and how to compile it.

    Attributes:
        file: Source in the backend's kernel folder, without its ending: the operation's name.
        entry: Function in it; this is the name that receipts print.
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
        overlaps: The kernel itself waits for the one before it, where the API allows that, so it may start earlier.
    """

    kernel: KernelSpec
    grid: Size3
    block: Size3
    args: tuple[Arg, ...]
    shared: int = 0
    overlaps: bool = False

    @property
    def buffers(self) -> tuple[Any, ...]:
        """The arguments that are memory, in order. (``Any``: each driver knows its own.)"""
        return tuple(arg for arg in self.args if not isinstance(arg, np.generic))

    @property
    def scalars(self) -> bytes:
        """The other arguments' bytes, in order."""
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
    """An open device of one API. Every error is one of ``bitnet.core.errors``, with the device's name in it."""

    def alloc(self, nbytes: int) -> Buffer:
        """Uninitialised memory; raises OutOfMemoryError."""
        ...

    def free(self, buffer: Any) -> None:
        """Give back memory of :meth:`alloc`. (``Any``: each driver takes buffers of its own type only.)"""
        ...

    def upload(self, buffer: Any, array: npt.NDArray[Any], offset: int = 0) -> None:
        """Copy a C-contiguous array to ``offset`` bytes into the buffer. The array may be reused on return."""
        ...

    def download(self, buffer: Any, array: npt.NDArray[Any], offset: int = 0) -> None:
        """Fill a C-contiguous array once all submitted work is done."""
        ...

    def record(self, launches: Sequence[Launch]) -> object:
        """Compile what is not compiled yet; make the launches replayable in order, each seeing the writes before it."""
        ...

    def submit(self, recording: Any) -> None:
        """Start a recording after all that was submitted before. Does not wait."""
        ...

    def memory(self) -> tuple[int, int]:
        """Total and free bytes of the device; 0 where the API does not tell."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Fetching(Protocol):
    """A driver that copies to the host while work submitted later runs."""

    def fetch(self, buffer: Any, array: npt.NDArray[Any]) -> Callable[[], None]:
        """Begin to copy the buffer's start, as it is after all work submitted so far.

        Returns:
            A function that waits for the copy and then fills the C-contiguous array; to be called once.
        """
        ...


@runtime_checkable
class Adopter(Protocol):
    """A driver whose device may read the host's memory where it lies, as integrated ones do."""

    def adopt(self, array: npt.NDArray[Any]) -> Buffer | None:
        """A buffer on a C-contiguous array's own memory, which it keeps; kernels only read it.

        :meth:`Driver.free` gives it back. None where the device cannot read that memory.
        """
        ...
