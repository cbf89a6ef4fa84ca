"""Opening a device that takes the family's kernels, whichever driver reaches it."""

from __future__ import annotations

from bitnet.core.errors import DeviceError
from bitnet.core.gpu.clc.abilities import Abilities
from bitnet.core.gpu.clc.ops import ClcOps
from bitnet.core.gpu.clc.products import DECODE_TOKENS
from bitnet.core.gpu.clc.vendors import Vendor
from bitnet.core.gpu.device import GpuDevice
from bitnet.core.gpu.driver import Driver
from bitnet.core.gpu.self_check import wrong_products
from bitnet.core.gpu.verified import remember
from bitnet.core.hal import DeviceInfo

CHECKED_TOKENS = 1, 2 * DECODE_TOKENS
"""Tokens of the self-check's products: kernels for few and for many."""


def open_device(
    info: DeviceInfo, driver: Driver, abilities: Abilities, *, self_check: bool = False, vendor: Vendor | None = None
) -> GpuDevice:
    """A device of the family. Where this raises, the driver is closed.

    Args:
        vendor: As for :class:`ClcOps`.
        self_check: Whether the device must compute products right first, as one must that nobody has tried yet. That
            it has is remembered (:mod:`bitnet.core.gpu.verified`).

    Raises:
        DeviceError: It fails, or its product is wrong.
    """
    device = GpuDevice(info, driver, ClcOps(abilities, vendor).lowering())
    try:
        if self_check:
            if wrong := next(filter(None, (wrong_products(device, tokens=n) for n in CHECKED_TOKENS)), ""):
                hint = "Update the device's driver, or choose another device: bitnet devices."
                raise DeviceError(f"it does not compute: {wrong}.", device=info.name, hint=hint)
            remember(info)
    except BaseException:
        device.close()
        raise
    return device
