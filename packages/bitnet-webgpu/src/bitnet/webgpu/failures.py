"""Converts wgpu's errors to bitnet's."""

from __future__ import annotations

import wgpu

from bitnet.core.errors import DeviceError
from bitnet.core.gpu.drivers.failures import lost, out_of_memory

RAISED = (wgpu.GPUError, RuntimeError)
"""Exceptions that wgpu-py raises; the latter if it gets no device or cannot map a buffer."""


def failure(error: Exception, device: str) -> DeviceError:
    """Convert one of :data:`RAISED`; lost devices and lack of memory have error types of their own."""
    text = " ".join(str(error).split()).removesuffix(".") + "."
    if "device is lost" in text:
        return lost(text, device)
    if isinstance(error, wgpu.GPUOutOfMemoryError) or "Not enough memory" in text:  # often a validation error
        return out_of_memory(text, device)
    return DeviceError(text, device=device)
