"""wgpu's errors as ours."""

from __future__ import annotations

import wgpu

from bitnet.core.errors import DeviceError, DeviceLostError, OutOfMemoryError
from bitnet.core.gpu.probing import SMALLER

RAISED = (wgpu.GPUError, RuntimeError)
"""What wgpu-py raises; the latter where it gets no device, or maps no buffer."""


def failure(error: Exception, device: str) -> DeviceError:
    """The error that one of :data:`RAISED` stands for: of its own type where the device is lost or has no memory."""
    text = " ".join(str(error).split()).removesuffix(".") + "."
    if "device is lost" in text:
        return DeviceLostError(text, device=device, hint="Start again; see the system's log.")
    if isinstance(error, wgpu.GPUOutOfMemoryError) or "Not enough memory" in text:  # often a validation error
        return OutOfMemoryError(text, device=device, hint=SMALLER)
    return DeviceError(text, device=device)
