"""Defects of the kernels for recurrent layers and transforms, which the conformance suite must catch."""

from __future__ import annotations

from pathlib import Path

import pytest

from bitnet.core.testing.mutant import Mutant

SUITE = Path(__file__).with_name("test_conformance_opencl.py")
BLOCKS = "test_norm_rows_of_a_transform and m2-blocks3-block32"
QUANTISED = "test_norm_quant_of_a_transform and m2-blocks3-block32"
PASSES = "test_long_rows_of_a_transform and 17"
INPUTS = "test_inputs_of_a_recurrent_layer and 1536"
ROTATED = "test_attention_to_keys_with_a_rotated_part and i8"
MUTANTS = (
    Mutant("an early tail", "int row = tokens - TAPS + 1 + r;", "int row = tokens - TAPS + r;", "causal_conv"),
    Mutant("no tail of a short step", "(TAPS - 1 + row) * channels]", "(TAPS - 2) * channels]", "causal_conv"),
    Mutant("the first sequence's state", "(size_t)step[state_to + seq]", "(size_t)step[state_to]", "test_delta_rule"),
    Mutant("the state that it writes", "STEP_DONE(step) ? (state_to)", "1 ? (state_to)", "test_delta_rule"),
    Mutant(
        "the state that it read first", "STEP_DONE(step) ? (state_to)", "0 ? (state_to)", "test_passes_move_the_states"
    ),
    Mutant(
        "sums that nobody waits for",
        "result[part][column] = sum;\n        barrier(CLK_LOCAL_MEM_FENCE);",
        "result[part][column] = sum;",
        "test_delta_rule",
    ),
    Mutant(
        "pairs that nobody waits for",
        "stride *= 2) {\n            barrier(CLK_LOCAL_MEM_FENCE);",
        "stride *= 2) {",
        BLOCKS,
    ),
    Mutant("signs of the first block", "signs += SIGNS ? get_group_id(0) * BLOCK : 0;", "", BLOCKS),
    Mutant("heads that stay tiled", "if (UNTILE) to =", "if (0) to =", "test_gated_quant"),
    Mutant(
        "elements that nobody waits for",
        "if (stage) {\n                barrier(CLK_LOCAL_MEM_FENCE);",
        "if (stage) {",
        QUANTISED,
    ),
    Mutant("elements of the next row", "if (e < DIM) {", "if (1) {", f"{QUANTISED} and norm"),
    Mutant("the first pass's signs", "y *= signs[e];", "y *= signs[e - pass * TILE];", PASSES),
    Mutant("heads that a transform finds tiled", "(UNTILE ? (to)", "(0 ? (to)", "test_gated_quant and 12"),
    Mutant("the second matrix's later rows", "group -= (rows + OUTS - 1) / OUTS, ", "", INPUTS),
    Mutant("a tail that stays", "if (j) after[(size_t)(j - 1) * channels] = before[j];", "", INPUTS),
    Mutant("the whole head rotated", "if (i >= 2 * PAIRS) return head[i];", "", ROTATED),
)


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.defect.replace(" ", "-"))
def test_a_defect_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    mutant.assert_caught(SUITE, environment={"BITNET_CACHE_DIR": str(tmp_path)})
