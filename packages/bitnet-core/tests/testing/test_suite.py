"""The suite's treatment of missing devices, tests known to fail, and backends that override a test."""

from __future__ import annotations

from typing import Any

import pytest

from bitnet.core.testing import ConformanceSuite

ABSENT = """
from bitnet.core.hal import HAL_API, ProbeResult, ProbeStatus
from bitnet.core.testing import ConformanceSuite

class Nothing:
    name, hal_api = "cuda", HAL_API
    def probe(self):
        return ProbeResult(ProbeStatus.DRIVER_MISSING, reason="libcuda.so.1 is not there")

class TestNothing(ConformanceSuite):
    backend = Nothing()
"""


def test_absent_device_is_skipped_with_the_reason(run_suite: Any) -> None:
    outcome = run_suite("test_embed", source=ABSENT)
    assert outcome.skipped
    assert not outcome.passed
    assert not outcome.failed
    assert "cuda is driver-missing: libcuda.so.1 is not there" in outcome.text


def test_absent_device_that_is_required_fails(run_suite: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BITNET_REQUIRE_DEVICES", "cpu:numpy, cuda:0")
    outcome = run_suite("test_embed", source=ABSENT)
    assert outcome.failed
    assert all("[cuda:0-" in name for name in outcome.failed)
    assert not outcome.passed
    assert "libcuda.so.1 is not there" in outcome.text


def test_a_named_device_that_is_not_there_is_skipped(run_suite: Any, suite_source: str) -> None:
    outcome = run_suite("test_embed", source=suite_source + '    devices = ("cpu:numpy", "cpu:other")\n')
    assert all("[cpu:other-" in name for name in outcome.skipped)
    assert all("[cpu:numpy-" in name for name in outcome.passed)
    assert outcome.skipped
    assert outcome.passed


EXPECTED = """
    def expected_failures(self, info):
        return {%r: "its compiler is broken"}
"""


def test_expected_failure_carries_its_reason(
    run_suite: Any, suite_source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bitnet.core.reference.ops.rotate", lambda x, *_: x)
    source = suite_source + EXPECTED % "test_a_prefix_is_read_in_the_step_that_writes_it"
    outcome = run_suite("test_a_prefix_is_read", source=source)
    assert outcome.skipped  # how pytest reports what failed as expected
    assert not outcome.failed


def test_expected_failure_that_passes_fails(run_suite: Any, suite_source: str) -> None:
    outcome = run_suite("test_quantize_of_zeros", source=suite_source + EXPECTED % "test_quantize_of_zeros")
    assert outcome.failed
    assert "its compiler is broken" in outcome.text


def test_one_case_may_be_expected_to_fail(run_suite: Any, suite_source: str) -> None:
    outcome = run_suite("test_greedy", source=suite_source + EXPECTED % "test_greedy[127]")
    assert outcome.failed == ["test_greedy[cpu:numpy-127]"]
    assert len(outcome.passed) > 3


EXCLUDED = """
    def exclusions(self, info):
        return {%r: "it has no f64"}
"""


def test_an_exclusion_is_reported_and_not_run(
    run_suite: Any, suite_source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[object] = []
    monkeypatch.setattr("bitnet.core.reference.ops.absmean_ternary", ran.append)
    outcome = run_suite("test_quantize_of_zeros", source=suite_source + EXCLUDED % "test_quantize_of_zeros")
    assert outcome.skipped == ["test_quantize_of_zeros[cpu:numpy]"]
    assert not outcome.failed
    assert not ran
    assert "cpu:numpy can never do this: it has no f64" in outcome.text


def test_one_case_may_be_excluded(run_suite: Any, suite_source: str) -> None:
    outcome = run_suite("test_greedy", source=suite_source + EXCLUDED % "test_greedy[127]")
    assert outcome.skipped == ["test_greedy[cpu:numpy-127]"]
    assert len(outcome.passed) > 3


@pytest.mark.parametrize("source", [EXCLUDED, EXPECTED], ids=["excluded", "expected to fail"])
def test_a_name_of_no_test_is_an_error(run_suite: Any, suite_source: str, source: str) -> None:
    outcome = run_suite("test_greedy", source=suite_source + source % "test_gredy[127]")
    assert not outcome.passed
    assert "TestNumpy names test_gredy[127], which is no test of it" in outcome.text


NEEDS = """
    @needs("f16")
    def test_with_f16(self, device):
        pass

    @needs("f16", "int8-dot")
    def test_with_more(self, device):
        pass
"""


def test_a_test_runs_where_the_probe_tells_of_what_it_needs(run_suite: Any, suite_source: str) -> None:
    source = suite_source.replace("[NUMPY_INFO]", "[replace(NUMPY_INFO, features=('f16',))]") + NEEDS
    source = "from dataclasses import replace\nfrom bitnet.core.testing import needs\n" + source
    outcome = run_suite("test_with", source=source)
    assert (outcome.passed, outcome.skipped) == (["test_with_f16[cpu:numpy]"], ["test_with_more[cpu:numpy]"])
    assert "cpu:numpy has no int8-dot" in outcome.text


def test_a_test_cannot_be_replaced() -> None:
    with pytest.raises(TypeError, match="replaces test_embed"):
        type("Lazy", (ConformanceSuite,), {"test_embed": lambda self: None})


def test_a_failure_prints_the_seed_that_repeats_it(run_suite: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bitnet.core.reference.ops.rotate", lambda x, *_: x)
    monkeypatch.setenv("BITNET_CONFORMANCE_SEED", "1234")
    outcome = run_suite("test_a_prefix_is_read")
    assert "BITNET_CONFORMANCE_SEED=1234 repeats this test" in outcome.text


def test_size_comes_from_the_environment(run_suite: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    small = run_suite("test_norm_rows")
    monkeypatch.setenv("BITNET_CONFORMANCE", "quick")
    assert len(run_suite("test_norm_rows").passed) > len(small.passed)
