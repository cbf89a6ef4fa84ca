"""The OpenCL backend against the operations' contract, on every device it finds."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyopencl as cl
import pytest

from bitnet.core.hal import STATES, Device
from bitnet.core.testing import ConformanceSuite, needs
from bitnet.core.testing.transforms import Blocks
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

    @needs(STATES)
    @pytest.mark.parametrize("shape", [Blocks(2, 17, 1024), Blocks(3, 6, 1024), Blocks(2, 3, 4096)], ids=str)
    def test_long_rows_of_a_transform(self, device: Device, rng: np.random.Generator, shape: Blocks) -> None:
        """Rows that fill a work-group several times, or in part, and blocks of as many elements as it takes at once."""
        self.test_norm_quant_of_a_transform(device, rng, shape, normed=True)

    def hosted(self, driver: Any, memory: npt.NDArray[np.uint8]) -> OpenCLBuffer | None:
        return in_host_memory(driver, memory)
