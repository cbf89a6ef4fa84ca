"""Defects of the kernels for embedders, and for norms of heads after their rotation, which the suite must catch."""

from __future__ import annotations

from pathlib import Path

import pytest

from bitnet.core.testing.mutant import Mutant

SUITE = Path(__file__).with_name("test_conformance_opencl.py")
NORM_TOKENS, COLUMNS, GELU = "test_norm_tokens and added", "test_products_fill_some_columns and 33", "test_gelu"
LAST, TAIL = (
    "test_norms_after_the_rotation and i8 and not part",
    "test_norms_after_the_rotation_of_a_part and f16 and 12",
)
ROW, TURNED = "(size_t)m * width + first + i", "pair.x * pair.x + pair.y * pair.y"
UNTURNED = "row[2 * i] * row[2 * i] + row[2 * i + 1] * row[2 * i + 1]"
REST, KEY = "row[i] = NORMED(row[i], i);", "#define KEY(i) rotated(row, cosines, sines, position, i)"
MUTANTS = (
    Mutant("norms of tokens: replaced", "v = out[row + k] + v;", "", NORM_TOKENS),
    Mutant("columns: from 0 on", ROW, ROW.replace(" + first", ""), COLUMNS),
    Mutant("columns: the last is not there", "i < cols; i += WG", "i < cols - 1; i += WG", COLUMNS),
    Mutant("columns: replaced", "ADD ? out[to] + value : value", "value", f"{COLUMNS} and added"),
    Mutant("GELU as SiLU", "exp(-1.5957691216f * g * (1.0f + 0.044715f * g * g))", "exp(-g)", GELU),
    Mutant("norms last: of keys by q's weights", "*norm = head < heads ? q_norm : k_norm", "*norm = q_norm", LAST),
    Mutant("norms last: none of q", "row[second] = NORMED(pair.y, second);", "row[second] = pair.y;", LAST),
    Mutant(
        "norms last: none of keys", "#define KEY(i) NORMED(rotated(row, cosines, sines, position, i), i)", KEY, LAST
    ),
    Mutant("norms last: before it turns", TURNED, UNTURNED, TAIL),
    Mutant("norms last: of a part", "squares += row[i] * row[i];\n    float root", ";\n    float root", TAIL),
    Mutant("norms last: q's tail is left out", REST, ";", TAIL),
    Mutant("norms last: keys' tail", "STORE_KV(NORMED(row[i], i), keys", "STORE_KV(row[i], keys", TAIL),
)


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.defect.replace(" ", "-"))
def test_a_defect_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    mutant.assert_caught(SUITE, environment={"BITNET_CACHE_DIR": str(tmp_path)})
