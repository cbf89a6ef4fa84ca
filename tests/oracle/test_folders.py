"""Random folders of Qwen3.5's kind through ``bitnet convert``, against Hugging Face transformers on the same weights.

The golden file is made by ``tools/make_golden_folders.py``. Where transformers is (``tox -e oracle``), new tokens are
tried, too.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bitnet.core.hal import Limits, SequenceStep, Step, StepLayout, run
from bitnet.core.model.convert import convert_model
from bitnet.core.model.file import open_model
from bitnet.core.model.program import BLOCK_SIZE, build_program
from bitnet.core.reference import ReferenceDevice
from make_golden_folders import CASES, PATH, ROWS, TOKENS, digest, drawn_tokens, theirs
from random_qwen35 import write_folder

SAME = 0.04
"""Bound on the median difference of a row of logits, as a share of the greatest. An int8 code that is rounded to the
other side makes 0.02; value heads in the other order make 0.7 and more."""


def ours(path: Path, tokens: np.ndarray) -> np.ndarray:
    file, width = open_model(path), -(-len(tokens) // BLOCK_SIZE)
    limits = Limits(len(tokens), 1, len(tokens), width)
    program = build_program(file.config, file.weights, limits=limits, num_blocks=width, kv_dtype="f32")
    executable = ReferenceDevice().compile(program)
    whole = SequenceStep(tokens.astype(np.int32), len(tokens), list(range(width)), list(range(len(tokens))))
    run(executable, Step(StepLayout(limits), [whole]))
    return np.array(executable.read("logits", len(tokens)))


def converted(case: str, folder: Path) -> Path:
    """The case's folder, and beside it the GGUF file."""
    kind, shape = CASES[case]
    write_folder(folder / "model", shape, 0, kind)  # type: ignore[arg-type]
    convert_model(folder / "model", folder / "model.gguf", dtype="pq2_0")
    return folder / "model"


def check(found: np.ndarray, expected: np.ndarray) -> None:
    errors = abs(found - expected).max(axis=1) / abs(expected).max(axis=1)
    assert np.median(errors) < SAME, errors


@pytest.mark.parametrize("case", CASES)
def test_golden_logits(case: str, tmp_path: Path) -> None:
    folder = converted(case, tmp_path)
    with np.load(PATH) as golden:
        assert golden[f"{case}.weights"] == digest(folder), "the file was made from other weights"
        expected = golden[f"{case}.logits"]
    check(ours(tmp_path / "model.gguf", drawn_tokens(case))[list(ROWS)], expected)


@pytest.mark.parametrize("case", CASES)
def test_live_logits(case: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed; tox -e oracle has it")
    folder = converted(case, tmp_path)
    tokens = np.random.default_rng().integers(0, 256, TOKENS)
    check(ours(tmp_path / "model.gguf", tokens), theirs(folder, CASES[case][1], tokens))
