"""Errors of GPU drivers, with hints, worded once for all backends."""

from __future__ import annotations

from bitnet.core.errors import DeviceLostError, OutOfMemoryError
from bitnet.core.gpu.probing import SMALLER


def out_of_memory(what: str, device: str) -> OutOfMemoryError:
    """The error for a driver that is out of memory; ``what`` is its message."""
    return OutOfMemoryError(what, device=device, hint=SMALLER)


def buffer_too_large(nbytes: int, largest: int, device: str) -> OutOfMemoryError:
    """The error for a buffer that is larger than the device's largest allocation."""
    return out_of_memory(f"a buffer of {nbytes:,} bytes exceeds the device's largest, {largest:,}.", device)


def binding_too_large(kernel: str, nbytes: int, largest: int, device: str) -> OutOfMemoryError:
    """The error for a kernel that needs more of one buffer than the device can bind."""
    return out_of_memory(
        f"{kernel} needs {nbytes:,} bytes of one buffer; the device binds at most {largest:,}.", device
    )


def lost(what: str, device: str, hint: str = "Restart the program; see the system's log.") -> DeviceLostError:
    """The error for a lost device."""
    return DeviceLostError(what, device=device, hint=hint)
