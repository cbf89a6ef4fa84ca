"""The words of a step's header: every kernel family has them where the contract puts them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from bitnet.core.errors import InvalidInputError
from bitnet.core.hal import Adjustment, HeaderWord, Limits, SequenceStep, Step, StepLayout

KERNELS = Path(__file__).parents[2] / "kernels"
COMMON = {
    "cuda": ("common.cuh", r"#define STEP_(\w+)\(step\) \(\(step\)\[(\d+)\]\)"),
    "metal": ("common.metal", r"#define STEP_(\w+)\(step\) \(\(step\)\[(\d+)\]\)"),
    "opencl": ("common.clh", r"#define STEP_(\w+)\(step\) \(\(step\)\[(\d+)\]\)"),
    "vulkan": ("common.glsl", r"#define STEP_(\w+) step_data\[(\d+)\]"),
    "webgpu": ("common.wgsl", r"const STEP_(\w+) = (\d+);"),
}
"""The file that all of a family's kernels share, and how it gives a word of the header its name."""
BY_NUMBER = re.compile(r"\b(?:step|step_data)\)?\[\d+\]")
"""A word of the header that is read by its number."""


def numbers(family: str) -> dict[str, int]:
    """The words that a family's kernels have names for."""
    file, pattern = COMMON[family]
    return {name: int(number) for name, number in re.findall(pattern, (KERNELS / family / file).read_text("utf-8"))}


@pytest.mark.parametrize("family", COMMON)
def test_kernels_have_the_words_of_the_contract(family: str) -> None:
    hosts = HeaderWord.LOGITS, HeaderWord.ADJUST  # the host looks at those
    used = {word.name: word.value for word in HeaderWord if word not in hosts}
    assert numbers(family) == used


def test_the_native_library_has_the_words_of_the_contract() -> None:
    (names,) = re.findall(r"enum \{ (STEP_[^}]*) \};", (KERNELS / "cpu" / "program.h").read_text("utf-8"))
    assert names.split(", ") == [f"STEP_{word.name}" for word in sorted(HeaderWord)]
    assert sorted(HeaderWord) == list(range(len(HeaderWord)))


@pytest.mark.parametrize("family", ["cpu", *COMMON])
def test_no_kernel_reads_a_word_by_its_number(family: str) -> None:
    common = COMMON.get(family, ("", ""))[0]
    files = [file for file in (KERNELS / family).rglob("*.*") if file.name != common and file.suffix != ".toml"]
    assert files
    assert {file.name: found for file in files if (found := BY_NUMBER.findall(file.read_text("utf-8")))} == {}


@pytest.mark.parametrize("logits", [False, True])
def test_a_step_has_its_words_there(logits: bool) -> None:
    limits = Limits(max_tokens=9, max_seqs=3, max_rows=4)
    step = Step(StepLayout(limits), [SequenceStep([1, 2], 2, rows=[0]), SequenceStep([3], 3, rows=[0])], logits=logits)
    assert [step.data[word] for word in HeaderWord] == [3, 2, 2, 0, logits, 0, 0]
    adjusted = SequenceStep([3], 3, rows=[0], adjustment=Adjustment(2, 1.25, 0.5, -1.0))
    step = Step(StepLayout(limits), [SequenceStep([1], 2, rows=[0]), adjusted], logits=logits)
    assert [step.data[word] for word in HeaderWord] == [2, 2, 2, 0, logits, 1, 0]
    at = step.layout.offsets
    assert step.data[at["slot"] : at["slot"] + 2].tolist() == [0, 3]
    for name, wanted in (("repetition", 1.25), ("presence", 0.5), ("frequency", -1.0)):
        assert step.data.view(np.float32)[at[name] + 1] == wanted


def test_a_sequence_with_a_slot_has_one_row() -> None:
    parts = [SequenceStep([1, 2], 2, rows=[0, 1], adjustment=Adjustment(0))]
    with pytest.raises(InvalidInputError, match="with a slot it must have one"):
        Step(StepLayout(Limits(max_tokens=4, max_rows=4)), parts)
