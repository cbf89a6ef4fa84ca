"""Defects of the products of weights with scales of groups, which their tests must catch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bitnet.core.testing.mutant import Mutant
from bitnet.webgpu.backend import BACKEND

SUITE = Path(__file__).with_name("test_products_webgpu.py")
ONE, FEW, MANY, BATCH = "one_token", "few_tokens", "many_tokens", "several_sequences"
TAIL = "m < tokens && n < args.rows"
WAIT = "    workgroupBarrier();\n"
AFTER = "if (start > 0u) {\n"
ROWS = "if (n < args.rows && m < tokens) {\n#if GROUP"
UNITS = "{ units_of[lane] = next_unit; }\n#endif\n"
MUTANTS = (
    Mutant("one token: the last row of each workgroup", "g.lane < ROWS && n0", "g.lane + 1u < ROWS && n0", ONE),
    Mutant("one token: columns past the last", "i < 16u * VECS; i +=", "i < 0u; i +=", ONE),
    Mutant("one token: the next row's scale", "unit_of(n * COUNT + min(", "unit_of(n * COUNT + 1u + min(", ONE),
    Mutant("one token: a group past the last", "if (s < COUNT) {", "if (s <= COUNT) {", ONE),
    Mutant("one token: x that nobody waits for", f"take_x(g);\n{WAIT}", "take_x(g);\n", ONE),
    Mutant("one token: terms that nobody waits for", f"{WAIT}    if (g.lane < ROWS", "    if (g.lane < ROWS", ONE),
    Mutant("few tokens: a row too many", f"at < ROWS * u32(TOKENS) && {TAIL}", "m < tokens", FEW),
    Mutant("few tokens: another unit's scale", "min(unit * u32(SETS) + i, COUNT", "min(unit * u32(SETS), COUNT", FEW),
    Mutant("few tokens: x that nobody waits for", "#endif\n            workgroupBarrier();", "#endif", FEW),
    Mutant("few tokens: terms that nobody waits for", f"{AFTER}        {WAIT}", AFTER, FEW),
    Mutant("few tokens: the first tile's tokens", "let t0 = id.z * u32(TOKENS)", "let t0 = 0u", FEW),
    Mutant("many tokens: a row too many", ROWS, ROWS.replace("n < args.rows && ", ""), MANY),
    Mutant("many tokens: a group too early", "u32(RUNS) == 0u", "u32(RUNS) <= 1u", MANY),
    Mutant("many tokens: the first part's scale", "units_of[part * TILE_N + ", "units_of[", MANY),
    Mutant("many tokens: tiles that nobody waits for", f"{UNITS}    {WAIT}", UNITS, MANY),
    Mutant("batches: another token's parts", "let row = m * HEADS * u32(SPLITS);", "let row = 0u;", BATCH),
    Mutant("batches: another sequence", "let sequence = step[args.token_seq + i32(m)];", "let sequence = 0;", BATCH),
)  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.defect.replace(" ", "-"))
def test_a_defect_is_caught(mutant: Mutant, tmp_path: Path, require_device: Callable[[str, str | None], None]) -> None:
    found = BACKEND.probe()
    require_device("webgpu:0", None if found.devices else found.reason or "there is no WebGPU device")
    mutant.assert_caught(SUITE, environment={"BITNET_CACHE_DIR": str(tmp_path)})
