"""The Metal backend held to the operations' contract, on every device it finds."""

from bitnet.core.testing import ConformanceSuite
from bitnet.metal.backend import BACKEND


class TestConformance(ConformanceSuite):
    backend = BACKEND
    size = "small"  # on a Mac run it with BITNET_CONFORMANCE=quick
