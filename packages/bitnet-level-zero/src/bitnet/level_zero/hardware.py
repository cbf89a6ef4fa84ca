"""What Level Zero reports about a device, and the device's abilities for kernels."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from ctypes import c_uint32, c_void_p
from dataclasses import dataclass
from typing import cast

from bitnet.core.gpu.clc import Abilities
from bitnet.core.gpu.clc.abilities import XMX
from bitnet.core.hal import FAMILY_FEATURES, KERNEL_FEATURES, PREPARES, DeviceInfo, DeviceType
from bitnet.core.hal.probe import TEST_DRIVER
from bitnet.level_zero.loader import LevelZero
from bitnet.level_zero.structures import (
    ComputeProperties,
    DeviceProperties,
    DriverProperties,
    ExtensionProperties,
    MemoryAccessProperties,
    MemoryProperties,
    ModuleProperties,
    QueueGroupProperties,
)

NEEDED = (1, 3)
"""Minimum API version of a driver: that of Debian 12's driver of 2022, the oldest tested."""
GPU, CPU = 1, 2
"""Values of ``ze_device_type_t``."""
INTEGRATED = 1
FP16, DP4A = 1, 8
"""Flags of ``ze_device_module_flags_t``."""
MIN_GROUP = 256
"""Work-group size that every Intel GPU supports, for drivers that do not report it."""
READ_WRITE = 1
"""Flag of ``ze_memory_access_cap_flags_t``."""
COMPUTE = 1
"""Flag of a group of queues that run kernels."""
VENDORS = {0x8086: "Intel"}
TEST_NAME = "bitnet test driver"
"""Prefix of the name of a test driver's device."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device of a driver.

    Attributes:
        api: Version of the API that the driver has.
        ordinal: Group of queues that run kernels.
        reads_host: Whether kernels may read any memory of the process.
    """

    driver: c_void_p
    device: c_void_p
    api: tuple[int, int]
    driver_version: int
    extensions: frozenset[str]
    properties: DeviceProperties
    compute: ComputeProperties
    modules: ModuleProperties
    memory: int
    ordinal: int
    reads_host: bool

    @property
    def name(self) -> str:
        return str(self.properties.name.decode(errors="replace"))

    @property
    def integrated(self) -> bool:
        """Whether it shares the processor's memory."""
        return bool(self.properties.flags & INTEGRATED)

    @property
    def sub_groups(self) -> tuple[int, ...]:
        """Sizes a sub-group may have."""
        return tuple(self.compute.sub_group_sizes[: self.compute.sub_group_count])

    @property
    def abilities(self) -> Abilities:
        """The abilities to try; whether there is XMX shows only when the driver builds a kernel, as no property
        says."""
        p = self.properties
        return Abilities(  # whether bytes are multiplied by the integer dot product, the compiler finds out
            compute_units=max(1, p.eus_per_subslice * p.subslices_per_slice * p.slices),
            group=self.compute.group or MIN_GROUP,
            local_bytes=self.compute.local_bytes,
            gpu=p.kind == GPU,
            subgroups=True,
            f16=True,
            matrix=XMX.get(min(self.sub_groups, default=0), "none"),
        )

    @property
    def features(self) -> tuple[str, ...]:
        """What ``bitnet devices`` lists: ``f16``, ``int8-dot``, ``subgroups``, ``shared-memory``, ``penalties``, …"""
        listed = {
            "f16": self.modules.flags & FP16,
            "int8-dot": self.modules.flags & DP4A,
            "subgroups": bool(self.sub_groups),
            "shared-memory": self.integrated,
        }
        return (
            *(name for name, has in listed.items() if has),
            *KERNEL_FEATURES,
            *FAMILY_FEATURES,
            PREPARES,
        )

    def info(self, index: int) -> DeviceInfo:
        """As the probe reports it."""
        p = self.properties
        kind = DeviceType.INTEGRATED if self.integrated else DeviceType.DISCRETE
        vendor = TEST_DRIVER if self.name.startswith(TEST_NAME) else VENDORS.get(p.vendor, f"{p.vendor:#06x}")
        major, minor = self.modules.spirv_version >> 16, self.modules.spirv_version & 0xFFFF
        return DeviceInfo(
            backend="level-zero",
            index=str(index),
            id=str(uuid.UUID(bytes=bytes(p.uuid))),
            description=self.name,
            vendor=vendor,
            type=kind if p.kind == GPU else DeviceType.CPU,
            memory=self.memory,
            driver_version=f"{self.driver_version:#x}",
            features=self.features,
            details={
                "level-zero": ".".join(map(str, self.api)),
                "spirv": f"{major}.{minor}",
                "sub_group_sizes": ",".join(map(str, self.sub_groups)),
                "compute_units": str(self.abilities.compute_units),
            },
        )


def api_version(level_zero: LevelZero, driver: c_void_p) -> tuple[int, int]:
    """Version of the API that a driver has."""
    version = c_uint32()
    level_zero.call("zeDriverGetApiVersion", driver, version)
    return version.value >> 16, version.value & 0xFFFF


def devices(level_zero: LevelZero) -> Iterator[Hardware]:
    """Every GPU of every driver that is new enough, discrete ones first; test drivers' CPUs last."""
    found = [one for driver in level_zero.drivers() for one in _of_driver(level_zero, driver)]
    yield from sorted(found, key=lambda one: (one.properties.kind != GPU, one.integrated))


def _of_driver(level_zero: LevelZero, driver: c_void_p) -> Iterator[Hardware]:
    api = api_version(level_zero, driver)
    if api < NEEDED:
        return
    about = level_zero.filled("zeDriverGetProperties", driver, DriverProperties)
    extensions = level_zero.every("zeDriverGetExtensionProperties", driver, ExtensionProperties)
    for device in level_zero.handles("zeDeviceGet", driver):
        properties = level_zero.filled("zeDeviceGetProperties", device, DeviceProperties)
        groups = level_zero.every("zeDeviceGetCommandQueueGroupProperties", device, QueueGroupProperties)
        ordinal = next((i for i, group in enumerate(groups) if group.flags & COMPUTE), None)
        modules = level_zero.filled("zeDeviceGetModuleProperties", device, ModuleProperties)
        if properties.kind not in (GPU, CPU) or ordinal is None or not modules.flags & FP16:
            continue
        memories = level_zero.every("zeDeviceGetMemoryProperties", device, MemoryProperties)
        access = level_zero.filled("zeDeviceGetMemoryAccessProperties", device, MemoryAccessProperties)
        yield Hardware(
            driver=driver,
            device=device,
            api=api,
            driver_version=cast(int, about.version),
            extensions=frozenset(one.name.decode(errors="replace") for one in extensions),
            properties=properties,
            compute=level_zero.filled("zeDeviceGetComputeProperties", device, ComputeProperties),
            modules=modules,
            memory=sum(one.total for one in memories),
            ordinal=ordinal,
            reads_host=bool(access.shared_system & READ_WRITE),
        )
