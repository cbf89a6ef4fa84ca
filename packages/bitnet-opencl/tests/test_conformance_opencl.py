"""The OpenCL backend against the operations' contract, on every device it finds."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyopencl as cl

from bitnet.core.testing import ConformanceSuite
from bitnet.opencl.backend import BACKEND
from bitnet.opencl.device import OpenCLBuffer


def in_host_memory(driver: Any, memory: npt.NDArray[np.uint8]) -> OpenCLBuffer | None:
    """A buffer in this memory, which CPUs use as it is."""
    if not driver._device.type & cl.device_type.CPU:
        return None
    flags = cl.mem_flags.READ_WRITE | cl.mem_flags.USE_HOST_PTR
    return OpenCLBuffer(cl.Buffer(driver._context, flags, hostbuf=memory), memory.nbytes)


class TestConformance(ConformanceSuite):
    backend = BACKEND
    size = "small"  # PoCL compiles for seconds; on a GPU run it with BITNET_CONFORMANCE=quick

    def hosted(self, driver: Any, memory: npt.NDArray[np.uint8]) -> OpenCLBuffer | None:
        return in_host_memory(driver, memory)
