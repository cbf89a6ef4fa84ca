"""The ROCm backend against the operations' contract, on every device it finds."""

from bitnet.core.testing import ConformanceSuite
from bitnet.rocm.backend import BACKEND


class TestConformance(ConformanceSuite):
    backend = BACKEND
    size = "small"  # on a GPU run it with BITNET_CONFORMANCE=quick
