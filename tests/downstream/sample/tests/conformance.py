"""The conformance suite on this backend: ``pytest`` in this repository, where the package is installed."""

from __future__ import annotations

from bitnet_sample.backend import BACKEND

from bitnet.core.testing import ConformanceSuite


class TestSample(ConformanceSuite):
    backend = BACKEND
    size = "small"
