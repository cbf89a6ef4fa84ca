"""Opening a device that takes the family's kernels, whichever driver reaches it."""

from __future__ import annotations

from bitnet.core.errors import DeviceError
from bitnet.core.gpu.clc.abilities import Abilities
from bitnet.core.gpu.clc.ops import ClcOps
from bitnet.core.gpu.clc.vendors import Vendor
from bitnet.core.gpu.device import GpuDevice
from bitnet.core.gpu.driver import Driver
from bitnet.core.gpu.self_check import wrong_products
from bitnet.core.hal import DeviceInfo


def open_device(
    info: DeviceInfo, driver: Driver, abilities: Abilities, *, self_check: bool = False, vendor: Vendor | None = None
) -> GpuDevice:
    """A device of the family. Where this raises, the driver is closed.

    Args:
        vendor: As for :class:`ClcOps`.
        self_check: Whether the device must compute a product right first, as one must that nobody has tried yet.

    Raises:
        DeviceError: It fails, or its product is wrong.
    """
    device = GpuDevice(info, driver, ClcOps(abilities, vendor).lowering())
    try:
        if self_check and (wrong := wrong_products(device)):
            hint = "Update the device's driver, or choose another device: bitnet devices."
            raise DeviceError(f"it does not compute: {wrong}.", device=info.name, hint=hint)
    except BaseException:
        device.close()
        raise
    return device
