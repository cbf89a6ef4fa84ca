"""The WebGPU backend held to the operations' contract, on every device it finds, with and without its features."""

from bitnet.core.testing import ConformanceSuite
from bitnet.webgpu.backend import BACKEND, WebGPUBackend
from bitnet.webgpu.compiler import INT8_DOT, SUBGROUPS


class TestConformance(ConformanceSuite):
    backend = BACKEND
    size = "small"  # Mesa compiles and runs on the processor; on a GPU run it with BITNET_CONFORMANCE=quick


class TestConformanceOfThePoorest(ConformanceSuite):
    """A device that has WebGPU's defaults and nothing else."""

    backend = WebGPUBackend(without=(SUBGROUPS, INT8_DOT))
    size = "small"
