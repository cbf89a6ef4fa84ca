"""Defects of the kernels for recurrent layers, transforms, mixtures of experts, windows, embedders and norms of heads
after their rotation, which the conformance suite must catch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bitnet.core.testing.mutant import Mutant
from bitnet.vulkan.backend import BACKEND

SUITE = Path(__file__).with_name("test_conformance_vulkan.py")
CONV, RULE, GATES, GATED = "causal_conv", "test_delta_rule", "test_delta_gates", "test_gated_quant"
NORM, GLU = "test_norm_quant_of_a_transform", "test_glu_norm_quant_of_a_transform"
BLOCKS = f"{NORM} and m2-blocks3-block32"
KEYS = "test_attention_to_keys_with_a_rotated_part and f16"
PASSES, PAIRS = "test_passes_move_the_states", "test_rope_of_a_part"
NEXT = "\n        barrier();"
INNER = "\n            barrier();"
KEYED = "if (column == 0) norms[part] = squares;"
SQUARES = "squares += dot(x[row + i], x[row + i]);\n        inverse"
FIRST = "step_data[state_to + seq] * HEADS"
RECURRENT = (
    Mutant("conv: an early tail", "row_of(tokens - TAPS + 1 + r,", "row_of(tokens - TAPS + r,", CONV),
    Mutant("conv: no tail of a short step", "TAPS - 1 + row) * channels", "TAPS - 2) * channels", CONV),
    Mutant("conv: a column too many", "m >= STEP_TOKENS || c >= channels", "m >= STEP_TOKENS", CONV),
    Mutant("rule: the first sequence's state", FIRST, FIRST.replace(" + seq", ""), RULE),
    Mutant("rule: columns past the last", "bool inside = c < D_V;", "bool inside = true;", RULE),
    Mutant("rule: rows past the last", "row < D_K ? qkv[keys + row] : 0.0", "qkv[keys + row]", RULE),
    Mutant("rule: sums that nobody waits for", KEYED + NEXT, KEYED, RULE),
    Mutant("rule: results that nobody waits for", f"queried[lane] = sum;{NEXT}", "queried[lane] = sum;", RULE),
    Mutant("the state that it writes", "STEP_DONE != 0 ? state_to", "true ? state_to", RULE),
    Mutant("the state that it read first", "STEP_DONE != 0 ? state_to", "false ? state_to", PASSES),
    Mutant("gates: another token's", "x[m * quads + i], y", "x[i], y", GATES),
    Mutant("gates: another head's", "alpha[h * quads + i]", "alpha[i]", GATES),
    Mutant("transform: pairs that nobody waits for", f"stride *= 2) {{{INNER}", "stride *= 2) {", BLOCKS),
    Mutant("transform: signs of the first block", "signs[sign_from + from + i]", "signs[from + i]", BLOCKS),
    Mutant("heads that stay tiled", "if (UNTILE != 0) to =", "if (false) to =", GATED),
    Mutant("heads: their last element", "i < HEAD; i += WG) squares", "i < HEAD - 1; i += WG) squares", GATED),
    Mutant("gate and up: another token's", "gate_up[2 * m * quads + i]", "gate_up[m * quads + i]", GLU),
    Mutant("norm: a row's first columns", SQUARES, SQUARES.replace("squares", "if (i > 0) squares", 1), NORM),
    Mutant("rotation: of the whole head", "if (d >= 2 * TURNED) return qkv[row + d];", "", KEYS),
    Mutant("rotation: pairs too far apart", "NEOX != 0 ? TURNED : 1", "NEOX != 0 ? DIM / 2 : 1", PAIRS),
)

SAME, GROUPS = (f"test_all_rows_on_the_same_experts and {case}" for case in ("70", "256"))
SUMS = "test_expert_matmul_adds"
ROUTE, TIES = "test_route and 33", "test_equal_logits"
PROMPT, DECODE = "test_window and 37", "test_window and f32 and 130"
LANES = "for (uint i = 1; i < LANES; i++) sum += part[item + i];"
SUM = "+ t) * COUNT + s], found[t]);"
LAST, SEEN = "begin < count; begin += TOKENS", "&& from + p >= WINDOW_BEGIN(start + 4 * band + t + 1);"
EXPERTS = (
    Mutant("a tie takes the higher expert", "uvec2(keys[e], ~e)", "uvec2(keys[e], e)", TIES),
    Mutant("an expert is taken twice", "keys[chosen] = TAKEN;", "keys[0] = TAKEN;", ROUTE),
    Mutant("shares that do not add up to one", "shares[m * top + j] /= total;", "total += 0.0;", ROUTE),
    Mutant("a share of the lanes' products", LANES, "", ROUTE),
    Mutant("not a number is no choice", "? NOT_A_NUMBER :", "? 1u :", "not_finite"),
    Mutant("the first expert's matrices", "(n / rows * experts + expert) * rows", "n / rows * experts * rows", SAME),
    Mutant("the last tile is not there", LAST, LAST.replace("begin <", "begin + TOKENS <="), SAME),
    Mutant("pairs of the first tile", "uint at = begin + min(t, count - 1);", "uint at = min(t, count - 1);", SAME),
    Mutant("the first pair's result", "chosen[begin + t] : begin, of", "chosen[begin] : begin, of", SAME),
    Mutant("sums of a second pair", SUM, SUM.replace("+ s", "+ s * uint(t == 0)"), GROUPS),
    Mutant("the scale of the first group", "uint place = row * COUNT + s;", "uint place = row * COUNT;", GROUPS),
    Mutant("shares of the first expert", "* shares[m * top + j];", "* shares[m * top];", SUMS),
    Mutant("sums in place of the row", "sums[m * columns + n] + sum_from_zero(sum)", "sum", SUMS),
    Mutant("a window of one more", "(length) - WINDOW)", "(length) - WINDOW - 1)", PROMPT),
    Mutant("all tokens see the first one's window", SEEN, ";", PROMPT),
    Mutant("decoding from the first position on", "begin = seen + part * PART;", "begin = part * PART;", DECODE),
    Mutant("up is not limited", "-at_most(-at_most(up, limit), limit)", "up", "test_glu_of_several and 0.5"),
)


NORM_TOKENS, COLUMNS, GELU = "test_norm_tokens and added", "test_products_fill_some_columns and 33", "test_gelu"
LAST, TAIL = (
    "test_norms_after_the_rotation and i8 and not part",
    "test_norms_after_the_rotation_of_a_part and f16 and 12",
)
ROW, TURNED = "m * uint(width) + first + i", "dot(pair, pair)"
UNTURNED = "qkv[row + 2 * i] * qkv[row + 2 * i] + qkv[row + 2 * i + 1] * qkv[row + 2 * i + 1]"
EMBEDDERS = (
    Mutant("norms of tokens: replaced", "vec4 sum = result[row + i] + v;", "vec4 sum = v;", NORM_TOKENS),
    Mutant("columns: from 0 on", ROW, ROW.replace(" + first", ""), COLUMNS),
    Mutant("columns: the last is not there", "i < cols;", "i < cols - 1;", COLUMNS),
    Mutant("columns: replaced", "result[to] + value : value", "value : value", f"{COLUMNS} and added"),
    Mutant("GELU as SiLU", "GELU != 0 ?", "false ?", GELU),
    Mutant("norms last: of keys by q's weights", "(head < heads ? q_norm[d] : k_norm[d])", "q_norm[d]", LAST),
    Mutant("norms last: none of q", "= normed(pair.y, first + APART, head);", "= pair.y;", LAST),
    Mutant("norms last: none of keys", "normed(rotated(row, i, angles), i, head)", "rotated(row, i, angles)", LAST),
    Mutant("norms last: before it turns", TURNED, UNTURNED, TAIL),
    Mutant("norms last: of a part", "i < DIM; i += WG) squares += q", "false; i++) squares += q", TAIL),
    Mutant("norms last: q's tail is left out", "qkv[row + i] = normed(qkv[row + i], i, head);", ";", TAIL),
)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "mutant", [*RECURRENT, *EXPERTS, *EMBEDDERS], ids=lambda mutant: mutant.defect.replace(" ", "-")
)
def test_a_defect_is_caught(mutant: Mutant, tmp_path: Path, require_device: Callable[[str, str | None], None]) -> None:
    found = BACKEND.probe()
    require_device("vulkan:0", None if found.devices else found.reason or "there is no Vulkan device")
    mutant.assert_caught(SUITE, environment={"BITNET_CACHE_DIR": str(tmp_path)})
