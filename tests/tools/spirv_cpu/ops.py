"""What the OpenCL C kernels may use of a device."""

from __future__ import annotations

from bitnet.core.gpu import Driver, GpuDevice, clc
from bitnet.core.hal import DeviceInfo
from bitnet.spirv_cpu import api

SOURCES = clc.sources("bitnet.spirv_cpu", "spirv-cpu", vendors=())
WRITTEN = True


def unwritten() -> list[str]:
    """What is not written; the probe says `unsupported` while there is anything."""
    return [] if WRITTEN else ["find_devices", "build", "load", "the driver", "abilities"]


def abilities(info: DeviceInfo) -> clc.Abilities:
    """What the kernels may use of a device."""
    device = api.devices()[int(info.index)]
    return clc.Abilities(
        compute_units=api.number(device, api.MAX_COMPUTE_UNITS),
        group=api.number(device, api.MAX_WORK_GROUP_SIZE),
        local_bytes=api.number(device, api.LOCAL_MEM_SIZE),
        gpu=False,
        f16="f16" in info.features,
        dot4="khr" if "int8-dot" in info.features else "none",
        subgroups="subgroups" in info.features,
    )


def options(info: DeviceInfo) -> tuple[str, ...]:
    """The compiler options of every kernel for a device."""
    return abilities(info).options("3.0")


def open_device(info: DeviceInfo, driver: Driver) -> GpuDevice:
    """A device that has computed a product right."""
    return clc.open_device(info, driver, abilities(info), self_check=True)
