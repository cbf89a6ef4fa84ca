"""The Metal backend against the operations' contract on every device, and against the CPU's tokens on the first."""

from __future__ import annotations

from collections.abc import Callable
from random import randrange

from bitnet.core.testing import ConformanceSuite
from bitnet.core.testing.answers import assert_same_answers
from bitnet.metal.backend import BACKEND


class TestConformance(ConformanceSuite):
    backend = BACKEND
    size = "small"  # on a Mac run it with BITNET_CONFORMANCE=quick


def test_the_demo_model_answers_as_on_the_cpu(require_device: Callable[[str, str | None], None]) -> None:
    """A sample of 100 questions, all tokens of the answers."""
    result = BACKEND.probe()
    require_device("metal:0", None if result.devices else f"metal is {result.status.value}: {result.reason}")
    assert assert_same_answers("metal:0", 10, seed=randrange(1 << 30)) > 1000
