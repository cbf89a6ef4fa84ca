"""Defects of the kernels for recurrent layers, transforms, mixtures of experts, windows and models for embeddings,
which the conformance suite must catch on the test library (``objc_on_cpu``)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from bitnet.core.testing.mutant import UNUSED, Mutant

HERE = Path(__file__).resolve().parent
SUITE = HERE / "test_conformance_metal.py"
FAULTS = 3
"""Status of a process in which the library has found faults of kernels, such as an access outside of a buffer."""
CONV, RULE, GATES, GATED = "causal_conv", "test_delta_rule", "test_delta_gates", "test_gated_quant"
NORM, GLU = "test_norm_quant_of_a_transform", "test_glu_norm_quant_of_a_transform"
BLOCKS = f"{NORM} and m2-blocks3-block32"
PASSES, PAIRS = "test_passes_move_the_states", "test_rope_of_a_part"
KEYS = "test_attention_to_keys_with_a_rotated_part and f16"
NEXT = "\n        GROUP_BARRIER;"
INNER = "\n            GROUP_BARRIER;"
KEYED = "if (column == 0) norms[part] = squares;"
FIRST = "step[state_to + seq]) * HEADS"
HEADS = "NORM && i < HEAD; i += WG"
SOURCE, APART = "(STEP_DONE(step) ? (state_to) : (state_from))", "second = NEOX ? i + PAIRS"
SQUARES = "squares += dot(x[row + ulong(k)], x[row + ulong(k)]);"
RECURRENT = (
    Mutant("conv: an early tail", "int row = tokens - TAPS + 1 + r;", "int row = tokens - TAPS + r;", CONV),
    Mutant("conv: no tail of a short step", "before[ulong(TAPS - 1 + row)", "before[ulong(TAPS - 2)", CONV),
    Mutant("conv: a column too many", "STEP_TOKENS(step) || c >= channels", "STEP_TOKENS(step)", CONV),
    Mutant("rule: the first sequence's state", FIRST, FIRST.replace(" + seq", ""), RULE),
    Mutant("rule: columns past the last", "bool inside = c < D_V;", "bool inside = true;", RULE),
    Mutant("rule: rows past the last", "k[i] = row < D_K ? keys[row] : 0.0f;", "k[i] = keys[row];", RULE),
    Mutant("rule: sums that nobody waits for", KEYED + NEXT, KEYED, RULE),
    Mutant("rule: results that nobody waits for", f"[column] = sum;{NEXT}\n        if", "[column] = sum; if", RULE),
    Mutant("the state that it writes", SOURCE, "(state_to)", RULE),
    Mutant("the state that it read first", SOURCE, "(state_from)", PASSES),
    Mutant("gates: another token's", "ulong row = ulong(m) * ulong(dim / 4), own", "ulong row = 0, own", GATES),
    Mutant("gates: another head's", "dot(y, alpha[own + ulong(k)])", "dot(y, alpha[ulong(k)])", GATES),
    Mutant("transform: pairs that nobody waits for", f"stride *= 2) {{{INNER}", "stride *= 2) {", BLOCKS),
    Mutant("transform: signs of the first block", "signs[from_sign + from + i]", "signs[from + i]", BLOCKS),
    Mutant("heads that stay tiled", "int to = UNTILE ? h", "int to = 0 ? h", GATED),
    Mutant("heads: their last element", HEADS, HEADS.replace("HEAD;", "HEAD - 1;"), GATED),
    Mutant("gate and up: another token's", "gate_up + ulong(m) * 2 *", "gate_up + ulong(m) *", GLU),
    Mutant("norm: a row's first columns", SQUARES, f"if (k > 0) {SQUARES}", NORM),
    Mutant("rotation: a head's rest is not kept", "for (int i = 2 * PAIRS + int(index);", "for (int i = DIM;", KEYS),
    Mutant("rotation: pairs too far apart", APART, APART.replace("PAIRS", "DIM / 2"), PAIRS),
)
SAME, GROUPS = (f"test_all_rows_on_the_same_experts and {case}" for case in ("70", "256"))
SUMS, SPARSE = "test_expert_matmul_adds", "test_a_mixture_of_experts and groups"
ROUTE, TIES = "test_route and 33", "test_equal_logits"
PROMPT, DECODE = "test_window and 37", "test_window and f32 and 130"
LANES = "for (ushort apart = LANES / 2; apart > 0; apart /= 2) sum += simd_shuffle_xor(sum, apart);"
LOWEST = "simd_min(greatest == of_simdgroup ? lowest : uint(EXPERTS))"
LAST, SUM = "begin < own; begin += TOKENS", "* COUNT + s], sum, memory"
SEEN, IN_TILE = " && p >= WINDOW_BEGIN(offset + m + 1);", " && start + at >= WINDOW_BEGIN(seen + 1)"
EXPERTS = (
    Mutant("a tie takes the higher expert", LOWEST, "simd_max(greatest == of_simdgroup ? lowest : 0u)", TIES),
    Mutant("a tie of simdgroups, too", "other.y < found.y", "other.y > found.y", TIES),
    Mutant("an expert is taken twice", "key[chosen] = TAKEN;", "key[0] = TAKEN;", ROUTE),
    Mutant("shares that do not add up to one", "chosen_shares[j] /= total;", "total += 0.0f;", ROUTE),
    Mutant("a share of the lanes' products", LANES, "", ROUTE),
    Mutant("not a number is no choice", "? NOT_A_NUMBER :", "? 1u :", "not_finite"),
    Mutant("the first expert's matrices", "* ulong(experts) + ulong(expert))", "* ulong(experts))", SAME),
    Mutant("rows past the last", "row(min(here + slot, total - 1)", "row(here + slot", SAME),
    Mutant("results past the last", "if (t >= count || n >= total) continue;", "if (t >= count) continue;", SAME),
    Mutant("the last tile is not there", LAST, LAST.replace("begin <", "begin + TOKENS <="), SAME),
    Mutant("tiles that are not needed", "tiles[3 * tile + 2] = 0;", "", SPARSE),
    Mutant("pairs of the first tile", "order[begin + t] : begin) / per", "order[t] : begin) / per", SAME),
    Mutant("the first pair's result", "order[begin + t] : begin;", "order[begin] : begin;", SAME),
    Mutant("sums of a second pair", SUM, SUM.replace("+ s]", "+ s * int(t == 0)]"), GROUPS),
    Mutant("the scale of the first group", "float(factors[s])", "float(factors[0])", GROUPS),
    Mutant("shares of the first expert", "* shares[pair];", "* shares[ulong(m) * ulong(top)];", SUMS),
    Mutant("sums in place of the row", "out[at] = before + sum;", "out[at] = sum;", SUMS),
    Mutant("a window of one more", "(length) - (WINDOW))", "(length) - (WINDOW) - 1)", PROMPT),
    Mutant("all tokens see the first one's window", SEEN, ";", "test_positions_behind and i8"),
    Mutant("all tokens of a matrix see it", IN_TILE, "", PROMPT),
    Mutant("decoding from the first position on", "begin = seen + split * span;", "begin = split * span;", DECODE),
    Mutant("up is not limited", "up > limit ? limit : up < -limit ? -limit : up", "up", "test_glu_of_several and 0.5"),
)
LATE, PART = "test_norms_after_the_rotation and f16", "test_norms_after_the_rotation_of_a_part and 12 and f16"
TAIL, REST = "squares += row[i] * row[i];", "row[i] = NORMED(row[i], i);"
COLUMNS, TOKENS, GELU = "test_products_fill and added", "test_norm_tokens and added", "test_gelu"
EMBEDDERS = (
    Mutant("norms last: those of q for keys", "head < heads ? q_norm : k_norm;", "q_norm;", LATE),
    Mutant("norms last: a pair's second element", "squares += dot(pair, pair);", "squares += pair.x * pair.x;", LATE),
    Mutant("norms last: what is not rotated counts, too", TAIL, "", PART),
    Mutant("norms last: what is not rotated is normed, too", REST, "", PART),
    Mutant("columns: from the first on", "ulong(first + i);", "ulong(i);", COLUMNS),
    Mutant("columns: results in place of sums", "out[to] = before + value;", "out[to] = value;", COLUMNS),
    Mutant("norm_tokens: rows in place of sums", "(k)] = before + value;", "(k)] = value;", TOKENS),
    Mutant("GELU: without the cube", "0.044715f", "0.0f", GELU),
)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "mutant", [*RECURRENT, *EXPERTS, *EMBEDDERS], ids=lambda mutant: mutant.defect.replace(" ", "-")
)
def test_a_defect_is_caught(mutant: Mutant, tmp_path: Path, require_device: Callable[[str, str | None], None]) -> None:
    absent = "the test library is for Linux" if sys.platform != "linux" else None
    require_device("metal-test-library", absent or (None if find_spec("ziglang") else "ziglang is not installed"))
    environment = {**os.environ, "PYTHONPATH": str(HERE / "objc_on_cpu"), "BITNET_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, *mutant.command(SUITE, "-p", "metal_on_cpu")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != UNUSED, f"no kernel has {mutant.old!r}"
    assert done.returncode in (1, FAULTS), done.stdout + done.stderr
    assert "failed" in done.stdout, done.stdout + done.stderr
