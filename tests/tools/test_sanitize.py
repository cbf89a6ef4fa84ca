"""What sanitize.py reads in logs, and which programs it selects."""

from __future__ import annotations

from collections import Counter

import pytest

from bitnet.core.gpu import KernelSpec
from kernel_forms import Ran, alone, cover, form
from sanitize import STOPPED, Part, Result, Tool, of_compute_sanitizer, of_oclgrind, parts_of, with_others

MEMCHECK = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at ternary_few+0x1a80
=========     by thread (0,0,0) in block (125,0,0)
=========     Access to 0x7f2ce2ac3c28 is out of bounds
=========
========= ERROR SUMMARY: 1 error
"""
RACECHECK = """========= COMPUTE-SANITIZER
========= Error: Race reported between Read access at ternary_group_tiles+0x60f0
=========     and Write access at ternary_group_tiles+0x4b00 [136 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
OVERFLOW = """========= COMPUTE-SANITIZER
========= Target application returned an error
========= ERROR SUMMARY: 1 error
"""
CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
OCLGRIND = """
Invalid read of size 4 at global memory address 0x1000000000190
\tKernel: embed
\tEntity: Global(100,0,0) Local(0,0,0) Group(25,0,0)
"""


@pytest.mark.parametrize(
    ("log", "found"),
    [
        (MEMCHECK, {"Invalid __global__ read in ternary_few": 1}),
        (RACECHECK, {"Error: Race in ternary_group_tiles": 1}),
        (OVERFLOW, {"unlisted": 1}),
        (CLEAN, {}),
    ],
)
def test_findings_of_compute_sanitizer(log: str, found: dict[str, int]) -> None:
    assert of_compute_sanitizer(log) == found


def test_findings_of_oclgrind() -> None:
    assert list(of_oclgrind(OCLGRIND).values()) == [1]
    assert "embed" in next(iter(of_oclgrind(OCLGRIND)))


def test_a_selection_runs_every_form_and_prefers_what_is_quick() -> None:
    programs = [Ran("slow", 90, ["a", "b", "c"]), Ran("quick", 1, ["a", "b"]), Ran("other", 2, ["c"])]
    assert cover(programs) == ["quick", "other"]
    assert cover([]) == []


def test_a_tool_that_watches_a_kernel_a_process_gets_each_with_the_fewest_others() -> None:
    programs = [Ran("slow", 90, ["a X=1"]), Ran("quick", 1, ["a X=2"]), Ran("model, small", 1, ["b", "c X=1", "c X=2"])]
    assert alone(programs) == {"c": "model, small", "b": "model, small", "a": "quick"}
    tool = Tool("racecheck", (), of_compute_sanitizer, 1, alone=("{kernel}",))
    assert parts_of(tool, programs, "quick") == [Part(tool, 0, ["quick"], "a")]
    assert {(part.kernel, *part.programs) for part in parts_of(tool, programs, "")} == set(alone(programs).items())


def test_a_program_runs_again_with_all_kernels_watched_where_the_tool_failed_with_one() -> None:
    tool = Tool("racecheck", (), of_compute_sanitizer, 1, alone=("{kernel}",))
    ended = {"a": ("one", ""), "b": ("two", "ended with 1"), "c": ("two", "ended with 1"), "d": ("three", STOPPED)}
    results = [Result(Part(tool, 0, [p], kernel), Counter(), how, 1.0) for kernel, (p, how) in ended.items()]
    assert with_others(results) == [Part(tool, 0, ["two"])]
    assert with_others([Result(with_others(results)[0], Counter(), "ended with 1", 1.0)]) == []


def test_forms_tell_parts_of_kernels_apart_and_not_sizes() -> None:
    def of(**defines: int) -> str:
        return form(KernelSpec("file", "kernel", tuple(defines.items())))

    assert of(COLS=512, ADD=1) == of(ADD=1, COLS=2560)
    assert of(COLS=512, ADD=1) != of(COLS=512, ADD=0)
    assert of(GROUP=64) != of(GROUP=128)
