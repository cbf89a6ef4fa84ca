"""The vulkan backend held to the operations' contract, on every device it finds."""

from bitnet.core.testing import ConformanceSuite
from bitnet.vulkan.backend import BACKEND


class TestConformance(ConformanceSuite):
    backend = BACKEND
