"""The conformance suite on every level of the CPU device that this processor runs, numpy among them."""

from __future__ import annotations

from bitnet.core.cpu.backend import BACKEND
from bitnet.core.testing import ConformanceSuite


class TestCpu(ConformanceSuite):
    backend = BACKEND
