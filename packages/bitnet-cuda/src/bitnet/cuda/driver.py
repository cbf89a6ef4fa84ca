"""Converts errors of the driver API to bitnet's, with CUDA's names."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver

from bitnet.core.errors import DeviceError
from bitnet.core.gpu.drivers.failures import lost, out_of_memory

OUT_OF_MEMORY = driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
LOST = {
    driver.CUresult.CUDA_ERROR_DEVICE_UNAVAILABLE,
    driver.CUresult.CUDA_ERROR_ECC_UNCORRECTABLE,
    driver.CUresult.CUDA_ERROR_HARDWARE_STACK_ERROR,
    driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,
    driver.CUresult.CUDA_ERROR_ILLEGAL_INSTRUCTION,
    driver.CUresult.CUDA_ERROR_INVALID_ADDRESS_SPACE,
    driver.CUresult.CUDA_ERROR_INVALID_PC,
    driver.CUresult.CUDA_ERROR_LAUNCH_FAILED,
    driver.CUresult.CUDA_ERROR_LAUNCH_TIMEOUT,
    driver.CUresult.CUDA_ERROR_MISALIGNED_ADDRESS,
    driver.CUresult.CUDA_ERROR_NVLINK_UNCORRECTABLE,
    driver.CUresult.CUDA_ERROR_SYSTEM_NOT_READY,
    driver.CUresult.CUDA_ERROR_UNKNOWN,
}
"""After these, every call fails until the process ends, according to the driver's manual. The last is also returned
once a device no longer answers on its bus."""


def check(device: str, result: tuple[Any, ...]) -> Any:
    """Check the status of a call of ``cuda.bindings.driver`` and return the rest of its result.

    Raises:
        OutOfMemoryError, DeviceLostError, DeviceError: The status is not success.
    """
    status, *values = result
    if status == driver.CUresult.CUDA_SUCCESS:
        return values[0] if len(values) == 1 else tuple(values)
    _, text = driver.cuGetErrorString(status)
    what = f"{status.name}: {text.decode() if text else 'no description'}."
    if status == OUT_OF_MEMORY:
        raise out_of_memory(what, device)
    if status in LOST:
        raise lost(what, device, "Restart the program; see nvidia-smi and the system's log.")
    raise DeviceError(what, device=device)
