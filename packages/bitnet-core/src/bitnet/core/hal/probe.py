"""What a probe finds: devices, or why there are none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

TEST_DRIVER = "bitnet (test driver)"
"""Vendor of a device that a test driver stands in for, which computes on the CPU: receipts of it do not verify."""
NOT_VERIFIED = "not verified on this hardware"
"""The detail ``verified`` of a device whose self-check has not passed here, and whose backend nobody has tried."""


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
    """Kind of device. ``CPU`` and ``VIRTUAL`` ones of a GPU backend are never selected by themselves."""

    DISCRETE = "discrete"
    INTEGRATED = "integrated"
    CPU = "cpu"
    VIRTUAL = "virtual"


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One device, as a probe found it.

    Attributes:
        backend: Name of the backend, such as ``cuda``.
        index: What follows the colon in the device's name: ``0`` in ``cuda:0``, ``avx2`` in ``cpu:avx2``.
        id: Stable identity (UUID or PCI address) where the driver gives one, else the name.
        memory: Bytes of memory the device can use; 0 where unknown.
        features: What the kernels may use, such as ``("int8-dot", "f16")``.
        details: Further facts for ``bitnet devices --json``.
        step_tokens: Tokens of a prompt that it computes best together, as measured on such a device; 0: unknown.
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
        """What ``--device`` takes and receipts print: ``cuda:0``."""
        return f"{self.backend}:{self.index}"


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a backend found out about this machine.

    Attributes:
        reason: Why the status is what it is, for a person; with ``ok``, what is missing besides, mostly nothing.
        hint: The one command or step that fixes it; empty when there is none.
        tried: Libraries tried, each with the loader's message (``""`` for the one that opened).
        versions: Versions found and needed, such as ``{"driver": "12.2", "driver-needed": "12.0"}``.
    """

    status: ProbeStatus
    devices: Sequence[DeviceInfo] = ()
    reason: str = ""
    hint: str = ""
    tried: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
