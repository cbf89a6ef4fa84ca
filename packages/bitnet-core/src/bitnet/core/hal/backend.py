"""What a backend is: probing and opening devices, without ever raising for hardware that is not there."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from bitnet.core.errors import InvalidInputError
from bitnet.core.hal.device import Device
from bitnet.core.hal.probe import DeviceInfo, ProbeResult

HAL_API = 2
"""Version of the contract in this package; a backend made for another is refused."""

MAX_THREADS = 1024
"""Most CPU threads a device can be asked to compute with."""


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """How to open a device. A backend gets its settings here alone: it reads no ``BITNET_*`` variable.

    Attributes:
        threads: CPU threads to compute with; None: the device's own choice. Devices that use none ignore it.
        strict: Only what was asked for will do: a backend that could merely pretend or stand in raises instead.
        graphs: Replay recorded launches. False: launch each kernel by itself, on devices whose drivers are known to
            replay wrongly (ROCm, Metal); others ignore it.

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
    """What an entry point in the group ``bitnet.backends`` names. Importing it opens no driver."""

    @property
    def name(self) -> str: ...

    @property
    def hal_api(self) -> int: ...

    def probe(self) -> ProbeResult:
        """Look for devices. Absence is a result; this does not raise for it."""
        ...

    def open(self, info: DeviceInfo, options: OpenOptions) -> Device:
        """Open a device that :meth:`probe` returned.

        Raises:
            DeviceError, DeviceUnavailableError: The device cannot be opened.
        """
        ...

    def kernels(self) -> Collection[str]:
        """Names of all kernels its devices may launch, as ``Executable.kernels`` records them. Opens no driver.

        Each ends in what it runs on: the backend (``embed_cuda``), or a level of the CPU (``embed_avx2``). A receipt
        that claims this backend and names another kernel does not verify.
        """
        ...
