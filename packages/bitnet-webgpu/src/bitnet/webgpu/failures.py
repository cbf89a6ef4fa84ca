"""wgpu's errors as ours."""

from __future__ import annotations

import wgpu

from bitnet.core.errors import DeviceError
from bitnet.core.gpu.failures import lost, out_of_memory

RAISED = (wgpu.GPUError, RuntimeError)
"""What wgpu-py raises; the latter where it gets no device, or maps no buffer."""


def failure(error: Exception, device: str) -> DeviceError:
    """The error that one of :data:`RAISED` stands for: of its own type where the device is lost or has no memory."""
    text = " ".join(str(error).split()).removesuffix(".") + "."
    if "device is lost" in text:
        return lost(text, device)
    if isinstance(error, wgpu.GPUOutOfMemoryError) or "Not enough memory" in text:  # often a validation error
        return out_of_memory(text, device)
    return DeviceError(text, device=device)
