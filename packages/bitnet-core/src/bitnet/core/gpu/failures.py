"""The errors of GPU drivers with what to do about them, worded once for every backend."""

from __future__ import annotations

from bitnet.core.errors import DeviceLostError, OutOfMemoryError
from bitnet.core.gpu.probing import SMALLER


def out_of_memory(what: str, device: str) -> OutOfMemoryError:
    """The error of a driver that has no memory left; ``what`` is its message."""
    return OutOfMemoryError(what, device=device, hint=SMALLER)


def buffer_too_large(nbytes: int, largest: int, device: str) -> OutOfMemoryError:
    """The error of a buffer that no memory of the device may hold in one piece."""
    return out_of_memory(f"a buffer of {nbytes:,} bytes exceeds the device's largest, {largest:,}.", device)


def binding_too_large(kernel: str, nbytes: int, largest: int, device: str) -> OutOfMemoryError:
    """The error of a kernel that would have to see more of one buffer than the device binds."""
    return out_of_memory(
        f"{kernel} needs {nbytes:,} bytes of one buffer; the device binds at most {largest:,}.", device
    )


def lost(what: str, device: str, look: str = "the system's log") -> DeviceLostError:
    """The error of a device that does no more; ``look`` names where its reason may be found."""
    return DeviceLostError(what, device=device, hint=f"Start again; see {look}.")
