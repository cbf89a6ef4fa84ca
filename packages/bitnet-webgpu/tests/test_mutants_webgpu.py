"""Defects of the kernels for recurrent layers, transforms, mixtures of experts, windows, embedders and norms of heads
after their rotation, which the conformance suite must catch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bitnet.core.testing.mutant import Mutant
from bitnet.webgpu.backend import BACKEND

SUITE = Path(__file__).with_name("test_conformance_webgpu.py")
CONV, RULE, GATES, GATED = "causal_conv", "test_delta_rule", "test_delta_gates", "test_gated_quant"
NORM, GLU = "test_norm_quant_of_a_transform", "test_glu_norm_quant_of_a_transform"
BLOCKS = f"{NORM} and m2-blocks3-block32"
PASSES, PAIRS = "test_passes_move_the_states", "test_rope_of_a_part"
KEYS = "test_attention_to_keys_with_a_rotated_part and f16"
NEXT = "\n        workgroupBarrier();"
INNER = "\n            workgroupBarrier();"
KEYED = "if (column == 0u) { norms[part] = squares; }"
FIRST = "step[args.state_to + sequence] * HEADS"
HEADS = "i < u32(HEAD); i += u32(WG)) { squares"
SOURCE = "step[STEP_DONE] != 0)"
SQUARES = "squares += dot(x[row + i], x[row + i]); }\n    let inverse"
RECURRENT = (
    Mutant("conv: an early tail", "row_of(tokens - BEFORE + r,", "row_of(tokens - BEFORE + r - 1,", CONV),
    Mutant("conv: no tail of a short step", "BEFORE + row) * u32", "BEFORE - 1) * u32", CONV),
    Mutant("conv: a column too many", "step[STEP_TOKENS] || c >= args.channels", "step[STEP_TOKENS]", CONV),
    Mutant("rule: the first sequence's state", FIRST, FIRST.replace(" + sequence", ""), RULE),
    Mutant("rule: columns past the last", "let inside = c < u32(D_V);", "let inside = true;", RULE),
    Mutant("rule: rows past the last", "let there = row < u32(D_K);", "let there = true;", RULE),
    Mutant("rule: sums that nobody waits for", KEYED + NEXT, KEYED, RULE),
    Mutant("rule: results that nobody waits for", f"queried[g.lane] = sum;{NEXT}", "queried[g.lane] = sum;", RULE),
    Mutant("the state that it writes", SOURCE, "true)", RULE),
    Mutant("the state that it read first", SOURCE, "false)", PASSES),
    Mutant("gates: another token's", "let v = x[m * quads + i];", "let v = x[i];", GATES),
    Mutant("gates: another head's", "alpha[h * quads + i]", "alpha[i]", GATES),
    Mutant("transform: pairs that nobody waits for", f"stride *= 2) {{{INNER}", "stride *= 2) {", BLOCKS),
    Mutant("transform: signs of the first block", "signs[first + start + i]", "signs[start + i]", BLOCKS),
    Mutant("heads that stay tiled", "grid.id.x % u32(UNTILE) * (", "grid.id.x + 0u * (", GATED),
    Mutant("heads: their last element", HEADS, HEADS.replace("HEAD", "HEAD - 1"), GATED),
    Mutant("gate and up: another token's", "gate_up[2u * m * quads + i]", "gate_up[m * quads + i]", GLU),
    Mutant("norm: a row's first columns", SQUARES, f"if (i > 0u) {{ {SQUARES.replace(' }', ' } }', 1)}", NORM),
    Mutant("rotation: of the whole head", "if (d >= 2 * TURNED) { return qkv[row + d]; }", "", KEYS),
    Mutant("rotation: pairs too far apart", "const APART = TURNED;", "const APART = DIM / 2;", PAIRS),
)

SAME, GROUPS = (f"test_all_rows_on_the_same_experts and {case}" for case in ("70", "256"))
SUMS = "test_expert_matmul_adds"
ROUTE, TIES = "test_route and 33", "test_equal_logits"
NARROW, PARTS = "test_window and 37", "TestSplit and test_window and 37"
LANES = "for (var i = 1u; i < u32(LANES); i++) { sum += part[g.lane + i]; }"
SUM = "+ t) * COUNT + s], found[t]);"
LAST, SEEN = "begin < count; begin += u32(TOKENS)", " && start + c >= window_begin(visible);"
BEGIN, PART = "let begin = window_begin(length);", "let begin = window_begin(length) + grid.id.z"
KEY = "select(float_key(logit), 0xFFFFFFFFu,"
UP = "-at_most(-at_most(gate_up[gates + args.dim / 4u + i]))"
EXPERTS = (
    Mutant("a tie takes the higher expert", "a.x == b.x && a.y < b.y", "a.x == b.x && a.y > b.y", TIES),
    Mutant("an expert is taken twice", "j == 0u || before(last, found)", "true", ROUTE),
    Mutant("shares that do not add up to one", "shares[m * args.top + j] /= total;", "total += 0.0;", ROUTE),
    Mutant("a share of the lanes' products", LANES, "", ROUTE),
    Mutant("not a number is no choice", KEY, KEY.replace("0xFFFFFFFFu", "1u"), "not_finite"),
    Mutant("the first expert's matrices", "args.experts + expert) * args.rows", "args.experts) * args.rows", SAME),
    Mutant("the last tile is not there", LAST, LAST.replace("begin <", "begin + u32(TOKENS) <="), SAME),
    Mutant("counts of an earlier launch", "atomicStore(&next[e], 0u);", "", SAME),
    Mutant("pairs of the first tile", "let at = begin + min(t, count - 1u);", "let at = min(t, count - 1u);", SAME),
    Mutant("the first pair's result", "let pair = chosen[begin + t];", "let pair = chosen[begin];", SAME),
    Mutant("a row too many", "row_of_n - args.begin_row < args.bound_rows", "true", SAME),
    Mutant("sums of a second pair", SUM, SUM.replace("+ s", "+ s * u32(t == 0u)"), GROUPS),
    Mutant("the scale of the first group", "let place = row * COUNT + s;", "let place = row * COUNT;", GROUPS),
    Mutant("shares of the first expert", "* shares[pair], zero)", "* shares[m * args.top], zero)", SUMS),
    Mutant("sums in place of the row", "sums[m * args.columns + n] += ", "sums[m * args.columns + n] = ", SUMS),
    Mutant("a window of one more", "- u32(WINDOW), WINDOW > 0", "- u32(WINDOW + 1), WINDOW > 0", NARROW),
    Mutant("all tokens see the first one's window", SEEN, ";", NARROW),
    Mutant("decoding from the first position on", BEGIN, "let begin = 0u;", NARROW),
    Mutant("parts from the first position on", PART, "let begin = grid.id.z", PARTS),
    Mutant("up is not limited", UP, UP[UP.index("gate_up") : -2], "test_glu_of_several and 0.5"),
)


NORM_TOKENS, COLUMNS, GELU = "test_norm_tokens and added", "test_products_fill_some_columns and 33", "test_gelu"
LAST, TAIL = (
    "test_norms_after_the_rotation and i8 and not part",
    "test_norms_after_the_rotation_of_a_part and f16 and 12",
)
ROW, TURNED = "m * args.width + args.first + i", "dot(pair, pair)"
UNTURNED = "(qkv[row + 2 * i] * qkv[row + 2 * i] + qkv[row + 2 * i + 1] * qkv[row + 2 * i + 1])"
GAIN, REST = (
    "select(k_norm[d], q_norm[d], head < args.heads)",
    "{ qkv[row + i] = normed(qkv[row + i], i, head, root); }",
)
EMBEDDERS = (
    Mutant("norms of tokens: replaced", "out[row + i] += bitcast", "out[row + i] = bitcast", NORM_TOKENS),
    Mutant("columns: from 0 on", ROW, ROW.replace(" + args.first", ""), COLUMNS),
    Mutant("columns: the last is not there", "i < args.columns; i += WG", "i < args.columns - 1; i += WG", COLUMNS),
    Mutant("columns: replaced", "out[to] += value;", "out[to] = value;", f"{COLUMNS} and added"),
    Mutant("GELU as SiLU", "-1.5957691216 * gate * (1.0 + 0.044715 * gate * gate)", "-gate", GELU),
    Mutant("norms last: of keys by q's weights", GAIN, "q_norm[d]", LAST),
    Mutant("norms last: none of q", "= normed(pair.y, first + APART, head, root);", "= pair.y;", LAST),
    Mutant(
        "norms last: none of keys", "normed(rotated(row, d, angles), d, head, root)", "rotated(row, d, angles)", LAST
    ),
    Mutant("norms last: before it turns", TURNED, UNTURNED, TAIL),
    Mutant("norms last: of a part", "i < DIM; i += WG) { squares += q", "false; i++) { squares += q", TAIL),
    Mutant("norms last: q's tail is left out", REST, "{}", TAIL),
)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "mutant", [*RECURRENT, *EXPERTS, *EMBEDDERS], ids=lambda mutant: mutant.defect.replace(" ", "-")
)
def test_a_defect_is_caught(mutant: Mutant, tmp_path: Path, require_device: Callable[[str, str | None], None]) -> None:
    found = BACKEND.probe()
    require_device("webgpu:0", None if found.devices else found.reason or "there is no WebGPU device")
    mutant.assert_caught(SUITE, environment={"BITNET_CACHE_DIR": str(tmp_path)})
