"""Defects of the kernels for few tokens, recurrent layers, transforms, mixtures of experts, windows, norms after
rotations and models for embeddings, which the conformance suite must catch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bitnet.core.testing.mutant import Mutant
from bitnet.cuda.backend import BACKEND

SUITE = Path(__file__).with_name("test_conformance_cuda.py")
ROUTE, TIES, MIXTURE = "test_route and 33", "test_equal_logits", "test_a_whole_mixture and 33"
SAME, GROUPS = (f"test_all_rows_on_the_same_experts and {case}" for case in ("70", "256"))
TILES, ONE_TILE = "test_products_of_experts_on and 1030", "test_products_of_experts_on and 100"
NARROW, MANY = "test_window and 37", "test_windows_of_many and 300"
UP = "-at_most(-at_most(u, limit), limit)"
LAST, GONE = "min(count - begin, TILE);", "|| behind_window(p, position"
EXPERTS = (
    Mutant("a tie takes the higher expert", "max(first, ~(unsigned)(i", "max(first, (unsigned)(i", TIES),
    Mutant("an expert is taken twice", "== expert) keys[i] = 0;", "== expert) keys[i] = keys[i];", ROUTE),
    Mutant("shares that do not add up to one", "shares[(size_t)m * top + j] /= total;", "total += 0.0f;", ROUTE),
    Mutant("not a number is no choice", "logit != logit ? 0xFFFFFFFFu", "logit != logit ? 1u", "not_finite"),
    Mutant("the norm of another token", "warp_reduce<Sum>(sums[t])", "warp_reduce<Sum>(sums[0])", ROUTE),
    Mutant("the first expert's matrices", "* EXPERTS + expert) * rows", "* EXPERTS) * rows", SAME),
    Mutant("a tile's last pair is not there", LAST, LAST.replace("TILE", "TILE - 1"), SAME),
    Mutant("pairs of the first tile", "return order[begin + t]; };", "return order[t]; };", GROUPS),
    Mutant("the scale of the first group", "units)[of * COUNT + s]", "units)[of * COUNT]", GROUPS),
    Mutant("tensor cores: pairs of the first tile", "order[begin + min((int)", "order[min((int)", TILES),
    Mutant("tensor cores: a scale of another row", "units[matrix_row(n, expert, rows)]", "units[n]", ONE_TILE),
    Mutant("tensor cores: a row too many", "if (n >= total) continue;", "if (n >= total + 1) continue;", ONE_TILE),
    Mutant("shares of the first expert", "shares[pair]));", "shares[(size_t)m * top]));", TILES),
    Mutant("sums in place of the row", "*to = __fadd_rn(*to, sum);", "*to = sum;", TILES),
    Mutant("up is not limited", UP, "u", "test_glu_of_several and 0.5"),
    Mutant("few tokens: the next expert", "j <= blockIdx.y; j++", "j < blockIdx.y; j++", MIXTURE),
    Mutant(
        "few tokens: another token's row", "x + (size_t)m * COLS, threadIdx.x + i * THREADS", "x, threadIdx.x", MIXTURE
    ),
    Mutant("few tokens: shares not divided", "share /= total;", "share /= 1.0f;", MIXTURE),
    Mutant("few tokens: ups for gates", "gate + (size_t)EXPERTS * F", "gate", MIXTURE),
    Mutant("few tokens: sums in place of the row", "*to = __fadd_rn(old, sum);", "*to = sum;", MIXTURE),
    Mutant("a window of one more", "p < length - WINDOW;", "p < length - WINDOW - 1;", NARROW),
    Mutant("all tokens see the first one's window", GONE, "|| false && behind_window(p, position", MANY),
    Mutant(
        "decoding from the first position on", "p < end && !behind_window(p, length) ? sum", "p < end ? sum", NARROW
    ),
)

CONV, RULE, GATES, GATED = "causal_conv", "test_delta_rule", "test_delta_gates", "test_gated_quant"
CHUNKS = "test_delta_rule and most150"
NORM, ROWS = "test_norm_quant_of_a_transform", "test_norm_rows_of_a_transform"
KEYS = "test_attention_to_keys_with_a_rotated_part and f16"
PASSES, PAIRS = "test_passes_move_the_states", "test_rope_of_a_part"
WAIT, INNER = "\n            __syncthreads();", "half *= 2) {\n        __syncthreads();"
LATE = "half *= 2) {\n        if (threadIdx.x < 32) __nanosleep(9999);"  # warps that keep step would hide the defect
STRENGTHS = "strengths[t] = gate[HEADS + h];\n            }"
PARTS = "parts[t][2][warp] = strength;\n    }\n    __syncthreads();"
INPUTS, WIDE_GATES = "test_inputs_of_a and not 5120", "test_delta_gates_of_many"
UNITS, WIDE_CONV, FEW = "test_transforms_of_many", "test_causal_conv_of_many", "test_groups_in_small_tiles"
OWN_LARGEST = "if (lane == 0) parts[warp] = make_float2(sum, largest);\n    __syncthreads();"
OWN_DOTS = "parts[warp][t][r] = dot;\n        }\n    }\n    __syncthreads();"
SHARED = "wait_for_bytes(&all_here);\n    sum = largest = 0.0f;"
LARGEST = "make_float2(sum, largest);\n    __syncthreads();"
RING, MEET = "copies_wait<0>();\n        __syncthreads();\n        {", '"r"(warp / PARTS + 1), "n"(PARTS * WARP)'
DECAYED = "low.x * rest.x, low.y * rest.y, high.x * rest.x, high.y * rest.y"
SHARES = "copies_wait<STAGES - 2>();\n        __syncthreads();\n        fetch(i + STAGES - 1);"
READ = "test_products_of_transformed_rows and 128"
RECURRENT = (
    Mutant("conv: an early tail", "end - TAPS + 1); token < end;", "end - TAPS + 1); token < end - 1;", CONV),
    Mutant("conv: the first entry's state", "((size_t)from * (TAPS - 1) + j)", "((size_t)j)", CONV),
    Mutant("rule: the first entry's state", "(((size_t)entry * HEADS + h) * D_V", "((size_t)h * D_V", RULE),
    Mutant("the state that it writes", "STEP_DONE(step) ? to", "true ? to", RULE),
    Mutant("the state that it read first", "STEP_DONE(step) ? to", "false ? to", PASSES),
    Mutant("rule: a batch's last token", "int count = min(BATCH, end", "int count = min(BATCH - 1, end", "most70"),
    Mutant("rule: the first head's strength", STRENGTHS, STRENGTHS.replace(" + h", ""), RULE),
    Mutant("rule: tokens that nobody waits for", STRENGTHS + WAIT, STRENGTHS, RULE),
    Mutant("rule: no product of q and k", "decay * sums[0] + product * d", "decay * sums[0]", RULE),
    Mutant(
        "rule, one token: the first head's strength", "strength = gate[HEADS + h];", "strength = gate[HEADS];", RULE
    ),
    Mutant("chunks: a tail of zeros", "token(i, e) < count && has", "token(i, e) < count - 1 && has", CHUNKS),
    Mutant("chunks: tokens that nobody waits for", RING, "{", CHUNKS),
    Mutant("chunks: changes that nobody waits for", MEET, MEET.replace("PARTS * WARP", "WARP"), CHUNKS),
    Mutant("chunks: changes that do not decay", DECAYED, "low.x, low.y, high.x, high.y", CHUNKS),
    Mutant("chunks: a state that does not decay", "held[i][e] * decay +", "held[i][e] +", CHUNKS),
    Mutant("chunks: all shares of the state in one place", "D_K, part * OWN + i, half)", "D_K, i, half)", CHUNKS),
    Mutant("chunks: a tile of tokens too few", "k <= tiles[1]; k++", "k < tiles[1]; k++", CHUNKS),
    Mutant("chunks: the first head's strengths", "* 2 * HEADS + HEADS] : 0.0f", "* 2 * HEADS] : 0.0f", CHUNKS),
    Mutant(
        "gates: another token's", "(const float4 *)(x + (size_t)m * width), *gain", "(const float4 *)x, *gain", GATES
    ),
    Mutant("gates: another head's", "(alpha + (size_t)h * width)", "(alpha)", GATES),
    Mutant("gates: sums that nobody waits for", PARTS, PARTS[: PARTS.rindex("\n")], GATES),
    Mutant("gates: a tile's last row", "first + r < 2 * heads)", "first + r < 2 * heads - 1)", WIDE_GATES),
    Mutant("gates: the first head's rows", "beta) + (size_t)(row % heads) * width", "beta)", WIDE_GATES),
    Mutant("gates: dots that nobody waits for", OWN_DOTS, OWN_DOTS[: OWN_DOTS.rindex("\n")], WIDE_GATES),
    Mutant("gates: sums of the first share", "parts + ((size_t)split * most + m)", "parts + (size_t)m", WIDE_GATES),
    Mutant("gates: a share's last step", "min(all, begin + each);", "min(all, begin + each) - 1;", WIDE_GATES),
    Mutant("gates: steps that nobody waits for", SHARES, SHARES[SHARES.index("fetch") :], WIDE_GATES),
    Mutant("gates: the last of several rows", "if (r < 2 * heads) own", "if (r < 2 * heads - 1) own", WIDE_GATES),
    Mutant("conv: rows of the sequence before", "step[token_seq + last] == seq && ", "", WIDE_CONV),
    Mutant("conv: all rows one too late", "x[(size_t)(m0 - TAPS + 1 + j)", "x[(size_t)(m0 - TAPS + 2 + j)", WIDE_CONV),
    Mutant("conv: rows of another sequence", "there = false;\n        if", "if", WIDE_CONV),
    Mutant("conv: rows one too late", "x[(size_t)(m - TAPS + 1 + j)", "x[(size_t)(m - TAPS + 2 + j)", WIDE_CONV),
    Mutant("rows: the last codes", "if (first + i * 16 + 16 <= DIM)", "if (first + i * 16 + 16 < DIM)", UNITS),
    Mutant("rows: the first unit's signs", "signs[place(i)]", "signs[i * WARP + lane]", f"{UNITS} and 1024"),
    Mutant(
        "rows: a greatest that nobody waits for",
        OWN_LARGEST,
        OWN_LARGEST[: OWN_LARGEST.rindex("\n")],
        f"{UNITS} and 1024",
    ),
    Mutant("tiles: the last token", "if (m >= rows || n", "if (m >= rows - 1 || n", FEW),
    Mutant("tiles: the first row's scales", "min(n_low, rows - 1) * pitch", "0 * pitch", FEW),
    Mutant("tiles: results that nobody waits for", "barrier_wait(made + which, parity);", "", FEW),
    Mutant("pair: a state that stays", "TAPS ? rows[j + 1] : x;", "TAPS ? rows[j] : x;", INPUTS),
    Mutant("pair: the first sequence's state", "int seq = step[token_seq + m],", "int seq = step[token_seq],", INPUTS),
    Mutant("pair: scales of the first matrix", "w_scale, w_scale2)", "w_scale, w_scale)", INPUTS),
    Mutant("pair: the second matrix's last tile", "all += (rows2 + 15) / 16;", "all += rows2 / 16;", INPUTS),
    Mutant("norm and gates: the first tokens' gates", "gates + (size_t)first * 2 * heads,", "gates,", INPUTS),
    Mutant("norm and gates: the first token's row", "x + (size_t)(first + min(t, tokens - 1)) * DIM", "x", INPUTS),
    Mutant("bits: the next one's", "(unsigned)word >> bit &", "(unsigned)word >> (bit ^ 1) &", READ),
    Mutant("bits: of the first columns", "up = 6 - lane / 8 * 2", "up = 6", READ),
    Mutant("order: the first row's place", "WARP + m * 4 + quarter)", "WARP + quarter)", READ),
    Mutant("order: pairs of the first block", "(block * 2 + pair / 2)", "(pair / 2)", READ),
    Mutant("transform: pairs that nobody waits for", INNER, LATE, ROWS),
    Mutant("transform: signs of the first block", "signs + blockIdx.x * BLOCK;", "signs;", f"{ROWS} and block32"),
    Mutant("transform: the first vector's signs", "(signs, index(i), DIM)", "(signs, threadIdx.x % 8, DIM)", NORM),
    Mutant("quantisation: a greatest that nobody waits for", LARGEST, "make_float2(sum, largest);", NORM),
    Mutant(
        "quantisation: a row's last vector", "if (index(i) < DIM / 4) ((int", "if (index(i) < DIM / 4 - 1) ((int", NORM
    ),
    Mutant("quantisation: shares that nobody waits for", SHARED, SHARED[SHARED.index("sum") :], NORM),
    Mutant("heads that stay tiled", "return UNTILE ? place % turns", "return 0 ? place % turns", GATED),
    Mutant("rotation: of the whole head", "if (!value && i < 2 * PAIRS) {", "if (!value) {", KEYS),
    Mutant("rotation: pairs too far apart", "(second ? i - PAIRS : i + PAIRS)", "(DIM - 1 - i)", PAIRS),
)

WIDE_HEADS = "test_decoding_with_wide_heads and 24"
MEETING = """asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(SHARERS * WARP) : "memory");"""
WIDE = (
    Mutant("wide heads: values of the first half", "+ part + group * VALUE_EACH", "+ group * VALUE_EACH", WIDE_HEADS),
    Mutant("wide heads: keys of the first half", "+ part + quarter * KEY_EACH", "+ quarter * KEY_EACH", WIDE_HEADS),
    Mutant("wide heads: half of two scores", "score[0] += others.x, score[1] += others.y, ", "", WIDE_HEADS),
    Mutant("wide heads: scores that nobody waits for", MEETING, "", WIDE_HEADS),
    Mutant("wide heads: all sums in the first half", "[head][part + at] =", "[head][at] =", WIDE_HEADS),
    Mutant(
        "wide heads: totals of the first team", "weight += warp_total[w][h]", "weight += warp_total[0][h]", WIDE_HEADS
    ),
)

LAST_NORMS, PART_NORMS = "test_norms_after_the_rotation and f16", "test_norms_after_the_rotation_of_a_part"
NORMS_LAST = (
    Mutant("norms last: none", "if (NORMS_LAST && !value) normalise();", "", LAST_NORMS),
    Mutant("norms last: first, too", "if (NORMS && !NORMS_LAST && !value) n", "if (NORMS && !value) n", LAST_NORMS),
    Mutant("norms last, part: twice", "NORMS && !NORMS_LAST && !value ? row", "NORMS && !value ? row", PART_NORMS),
    Mutant("norms last, part: a lane's first weight", "*= inverse * norm[i];", "*= inverse * norm[lane];", PART_NORMS),
)

COLUMNS, GELU = "test_products_fill_some_columns", "test_gelu"
EMBEDDERS = (
    Mutant("columns: the first ones", "* width + first + i", "* width + i", COLUMNS),
    Mutant("columns: not the last", "i < cols; i += blockDim.x", "i < cols - 1; i += blockDim.x", COLUMNS),
    Mutant("columns: replaced", "ADD ? __fadd_rn(*to, value) : value;", "value;", COLUMNS),
    Mutant("norms of tokens: replaced", "#if ADD\n        float4 old", "#if 0\n        float4 old", "test_norm_tokens"),
    Mutant("norms of tokens: the first token's", "x + (size_t)m * dim);\n", "x);\n", "test_norm_tokens"),
    Mutant("GELU: no cube", "fmaf(0.044715f * g, g, 1.0f)", "1.0f", GELU),
    Mutant("GELU: by a simpler sigmoid", "1.5957691216f * g * fmaf", "1.702f * g * fmaf", GELU),
)


SLICES, MANY_ROWS = "test_products_in_slices", "test_head_without_logits and 52"
GROUPED = "test_groups_of_few_tokens"
FEW_TOKENS = (
    Mutant("groups: the last rows' scales", "rows - n0)) * PITCH;", "rows - n0) - 1) * PITCH;", GROUPED),
    Mutant("groups: scales of the group before", "high_scale += 4;", "high_scale += 0;", GROUPED),
    Mutant("groups: codes of the first rows", "u * 32, GLU ? n0 / 2 : n0,", "u * 32, GLU ? n0 / 2 : 0,", GROUPED),
    Mutant("groups: a place that is filled too soon", "barrier_wait(empty + slot, parity);", "", GROUPED),
    Mutant("groups: the first token's scale", "s = x_scale[m - m0], value", "s = x_scale[0], value", GROUPED),
    Mutant("groups: a token too few", "m >= tokens || (GLU", "m >= tokens - 1 || (GLU", GROUPED),
    Mutant("groups: bounds of the first token", "bounds[min(m0 + i, tokens - 1)]", "bounds[0]", GROUPED),
    Mutant("slices: a tail of codes", "&& c < count * 2;", "&& c < count * 2 - 1;", SLICES),
    Mutant("slices: the first slice's activations", "(first + u) * 128, m0", "u * 128, m0", SLICES),
    Mutant("slices: the first tokens' sums", "x_sum[m - m0], s, scale_low", "x_sum[0], s, scale_low", SLICES),
    Mutant(
        "slices: activations in the next place",
        "+ u % SLOTS * BN * 128, &x",
        "+ (u + 1) % SLOTS * BN * 128, &x",
        SLICES,
    ),
    Mutant("slices: sums that nobody waits for", "barrier_wait(&sent, 0);", "", SLICES),
    Mutant("slices: a part's last sums", "s < PARTS - 1; s++", "s < PARTS - 2; s++", SLICES),
    Mutant("slices: a token too few", "if (m >= tokens) continue;", "if (m >= tokens - 1) continue;", SLICES),
    Mutant("head: columns in their own order", "(WGMMA ? in_steps(k) : k)", "k", MANY_ROWS),
    Mutant("head: columns as they lie", "(at / 16 ^ c) % 8 * 16", "at / 16 % 8 * 16", MANY_ROWS),
    Mutant("head: low codes only", "w[j][2] = low[j] >> 4 & 0x0F0F0F0Fu", "w[j][2] = w[j][0]", MANY_ROWS),
)

ALL = *FEW_TOKENS, *RECURRENT, *WIDE, *EXPERTS, *NORMS_LAST, *EMBEDDERS


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.defect.replace(" ", "-"))
def test_a_defect_is_caught(mutant: Mutant, tmp_path: Path, require_device: Callable[[str, str | None], None]) -> None:
    found = BACKEND.probe()
    require_device("cuda:0", None if found.devices else found.reason or "there is no CUDA device")
    mutant.assert_caught(SUITE, environment={"BITNET_CACHE_DIR": str(tmp_path)})
