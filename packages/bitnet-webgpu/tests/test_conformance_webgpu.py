"""The WebGPU backend against the operations' contract, on every device it finds, with and without its features."""

import pytest

from bitnet.core.testing import ConformanceSuite
from bitnet.core.testing.attention import AttentionTests
from bitnet.core.testing.base import DeviceTests
from bitnet.core.testing.whole_model import WholeModelTests
from bitnet.core.testing.windows import WindowTests
from bitnet.webgpu import ops
from bitnet.webgpu.backend import BACKEND, WebGPUBackend
from bitnet.webgpu.device import WebGPUDriver
from bitnet.webgpu.source import INT8_DOT, SUBGROUPS


class WithTails(DeviceTests):
    """Tests with poison behind each buffer."""

    def largest_binding(self, driver: WebGPUDriver) -> int:
        return driver.limits["max-storage-buffer-binding-size"]


class TestConformance(WithTails, ConformanceSuite):
    backend = BACKEND
    size = "small"  # Mesa compiles and runs on the processor; on a GPU run it with BITNET_CONFORMANCE=quick


class TestConformanceOfThePoorest(WithTails, ConformanceSuite):
    """A device that has WebGPU's defaults and nothing else."""

    backend = WebGPUBackend(without=(SUBGROUPS, INT8_DOT))
    size = "small"


class TestSplitAttention(WithTails, AttentionTests, WindowTests, WholeModelTests):
    """Decode attention in parts, as contexts too long for a small run have it."""

    backend = BACKEND
    size = "small"

    @pytest.fixture(autouse=True)
    def parts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ops, "SPLIT_CONTEXT", 8)


class TestTiledAttention(WithTails, AttentionTests, WindowTests, WholeModelTests):
    """Attention by tiles, whatever the step: prompts too short for it, and tokens of many sequences."""

    backend = BACKEND
    size = "small"

    @pytest.fixture(autouse=True, params=[(4, 4), (2, 8)], ids=["64-rows", "32-rows"])
    def tiles(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        each, depth = request.param
        monkeypatch.setattr(ops, "ATTENTION_EACH", each)
        monkeypatch.setattr(ops, "ATTENTION_DEPTHS", (depth,))
        monkeypatch.setattr(ops, "PREFILL_TOKENS", 2)
        monkeypatch.setattr(ops, "PREFILL_PER_ROW", 0)
