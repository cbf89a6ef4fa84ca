"""The OpenCL backend against the operations' contract, on every device it finds."""

from bitnet.core.testing import ConformanceSuite
from bitnet.opencl.backend import BACKEND


class TestConformance(ConformanceSuite):
    backend = BACKEND
    size = "small"  # PoCL compiles for seconds; on a GPU run it with BITNET_CONFORMANCE=quick
