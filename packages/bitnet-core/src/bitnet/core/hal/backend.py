"""The interface of a backend: probing and opening devices. Missing hardware is a result, never an exception."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from bitnet.core.errors import InvalidInputError
from bitnet.core.hal.device import Device
from bitnet.core.hal.probe import DeviceInfo, ProbeResult

HAL_API = 3
"""Version of the contract in this package; a backend made for another version is refused."""

MAX_THREADS = 1024
"""Maximum number of CPU threads that a device can be asked to use."""


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """How to open a device. These are a backend's only settings: it reads no ``BITNET_*`` variables.

    Attributes:
        threads: CPU threads to compute with; None: the device decides. Devices that use no CPU threads ignore it.
        strict: Accept only the requested device: a backend that would emulate or replace it must raise instead.
        graphs: Whether to replay recorded launches. False: launch each kernel by itself, for backends whose drivers may
            replay wrongly (ROCm, Metal). Other backends ignore it.

    Raises:
        InvalidInputError: ``threads`` is out of range.
    """

    threads: int | None = None
    strict: bool = False
    graphs: bool = True

    def __post_init__(self) -> None:
        threads = self.threads
        if threads is not None and not (isinstance(threads, int) and 1 <= threads <= MAX_THREADS):
            raise InvalidInputError(f"threads is {threads!r}; it must be a number from 1 to {MAX_THREADS}.")


@runtime_checkable
class Backend(Protocol):
    """A backend, as an entry point in the group ``bitnet.backends`` names it. Importing it must not open a driver."""

    @property
    def name(self) -> str: ...

    @property
    def hal_api(self) -> int:
        """The version of the contract that it was written for: a literal, not the installed core's :data:`HAL_API`."""
        ...

    def probe(self) -> ProbeResult:
        """Look for devices. Does not raise if there are none: that is a result."""
        ...

    def open(self, info: DeviceInfo, options: OpenOptions) -> Device:
        """Open a device that :meth:`probe` returned.

        Raises:
            DeviceError, DeviceUnavailableError: The device cannot be opened.
        """
        ...

    def kernels(self) -> Collection[str]:
        """Names of all kernels that its devices may launch, as recorded by ``Executable.kernels``. Opens no driver.

        Each name ends in the backend (``embed_cuda``) or the CPU level (``embed_avx2``) it runs on. A receipt that
        claims this backend but names any other kernel does not verify.
        """
        ...


@runtime_checkable
class AskingBackend(Protocol):
    """A backend that must ask for its devices in an event loop's task before it can probe, as in a browser."""

    async def request(self) -> None:
        """Ask. What is missing is in the result of the next :meth:`Backend.probe`."""
        ...
