"""The result of a probe: devices, or the reason why there are none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

TEST_DRIVER = "bitnet (test driver)"
"""Vendor name of a test driver's device, which computes on the CPU. Its receipts do not verify."""
NOT_VERIFIED = "not verified on this hardware"
"""Value of the detail ``verified`` for a backend never tried on real hardware, until the self-check passes here."""


class ProbeStatus(str, Enum):
    """Outcome of a probe."""

    OK = "ok"
    LIBRARY_MISSING = "library-missing"  # the Python binding or the run-time compiler
    DRIVER_MISSING = "driver-missing"
    DRIVER_TOO_OLD = "driver-too-old"
    NO_PERMISSION = "no-permission"
    NO_DEVICE = "no-device"
    UNSUPPORTED = "unsupported"
    BROKEN = "broken"


class DeviceType(str, Enum):
    """Kind of device. A GPU backend's ``CPU`` and ``VIRTUAL`` devices are never selected automatically."""

    DISCRETE = "discrete"
    INTEGRATED = "integrated"
    CPU = "cpu"
    VIRTUAL = "virtual"


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One device found by a probe.

    Attributes:
        backend: Name of the backend, such as ``cuda``.
        index: The part of the device's name after the colon: ``0`` in ``cuda:0``, ``avx2`` in ``cpu:avx2``.
        id: Stable identity (UUID or PCI address) if the driver reports one, else the name.
        memory: Bytes of memory the device can use; 0 if unknown.
        features: Optional features that kernels and programs may use, such as ``("int8-dot", "f16")``.
        details: Further facts for ``bitnet devices --json``.
        step_tokens: Number of prompt tokens per step that is fastest, as measured on such a device; 0: unknown.
    """

    backend: str
    index: str
    id: str
    description: str
    vendor: str
    type: DeviceType
    memory: int = 0
    driver_version: str = ""
    features: tuple[str, ...] = ()
    details: Mapping[str, str] = field(default_factory=dict)
    step_tokens: int = 0

    @property
    def name(self) -> str:
        """The name that ``--device`` accepts and receipts print, such as ``cuda:0``."""
        return f"{self.backend}:{self.index}"


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """A backend's findings about this machine.

    Attributes:
        reason: Explains the status to a user; for ``ok``, says what is missing besides, usually nothing.
        hint: The one command or step that fixes it; empty if there is none.
        tried: Libraries tried, each mapped to the loader's message (``""`` for the one that opened).
        versions: Versions found and needed, such as ``{"driver": "12.2", "driver-needed": "12.0"}``.
    """

    status: ProbeStatus
    devices: Sequence[DeviceInfo] = ()
    reason: str = ""
    hint: str = ""
    tried: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
