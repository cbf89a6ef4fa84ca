"""Opens a device that runs the OpenCL C kernels, through any driver."""

from __future__ import annotations

from bitnet.core.errors import DeviceError
from bitnet.core.gpu.checks.self_check import wrong_products
from bitnet.core.gpu.checks.verified import remember
from bitnet.core.gpu.clc.abilities import Abilities
from bitnet.core.gpu.clc.ops import ClcOps
from bitnet.core.gpu.clc.products import DECODE_TOKENS
from bitnet.core.gpu.clc.vendors import Vendor
from bitnet.core.gpu.device import GpuDevice
from bitnet.core.gpu.drivers.interface import Driver
from bitnet.core.hal import DeviceInfo

CHECKED_TOKENS = 1, 2 * DECODE_TOKENS
"""Tokens of the self-check's products, to run the kernels for few and for many tokens."""


def open_device(
    info: DeviceInfo, driver: Driver, abilities: Abilities, *, self_check: bool = False, vendor: Vendor | None = None
) -> GpuDevice:
    """Open a device. If this raises, the driver is closed.

    Args:
        vendor: As for :class:`ClcOps`.
        self_check: Whether the device must first compute correct products, for backends untested on hardware. Success
            is remembered (:mod:`bitnet.core.gpu.checks.verified`).

    Raises:
        DeviceError: The device fails, or its product is wrong.
    """
    device = GpuDevice(info, driver, ClcOps(abilities, vendor).lowering())
    try:
        if self_check:
            if wrong := next(filter(None, (wrong_products(device, tokens=n) for n in CHECKED_TOKENS)), ""):
                hint = "Update the device's driver, or choose another device: bitnet devices."
                raise DeviceError(f"it does not compute correctly: {wrong}.", device=info.name, hint=hint)
            remember(info)
    except BaseException:
        device.close()
        raise
    return device
