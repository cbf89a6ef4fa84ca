"""Defects of the kernels for scales of groups, which the tests of the kernels for matrix units must catch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bitnet.core.testing.mutant import Mutant

HERE = Path(__file__).parent
INTEL = Path(sys.prefix) / "lib" / "libintelocl.so"
PRODUCTS = "test_products_of_groups"
TABLES = "test_dense_matmul_of_a_ternary_table"
WAIT = "if ((i + 1) % SPAN && i + 1 < ITERS) continue;\n"
MUTANTS = (
    Mutant("a scale too far", "from / PER + min(step,", "from / PER + min(step + 1,", PRODUCTS),
    Mutant("terms that nobody waits for", f"{WAIT}            barrier(CLK_LOCAL_MEM_FENCE);", WAIT, PRODUCTS),
    Mutant("rows past the last", "if (to.y < rows) row[to.y] = value_high;", "row[to.y] = value_high;", PRODUCTS),
    Mutant(
        "the other rows' scale", "low = units[plane * SETS / 4][t][0]", "low = units[plane * SETS / 4][t][1]", PRODUCTS
    ),
    Mutant("a group that ends too early", "block % SPAN == 0", "1", PRODUCTS),
    Mutant("a head of half its elements", "squares += shuffle_xor(squares, 2);", "", "test_a_model_of_groups"),
    Mutant("a middle digit", "quarter == 1 ? 128.0f", "quarter == 1 ? 127.0f", TABLES),
    Mutant("the first row's unit", "scale[(size_t)(first_row + n) * COUNT", "scale[(size_t)first_row * COUNT", TABLES),
)

PLAIN = "test_ternary_matmul_of_groups"
PLAIN_MUTANTS = (
    Mutant(
        "the next group's scale",
        "rows) * COUNT + s, w_scale)",
        "rows) * COUNT + min(s + 1, COUNT - 1), w_scale)",
        PLAIN,
    ),
    Mutant(
        "sums that nobody waits for",
        "barrier(CLK_LOCAL_MEM_FENCE);\n    for (int i = item; i < OUTS",
        "for (int i = item; i < OUTS",
        PLAIN,
    ),
    Mutant("results past the last", "if (m >= tokens || to >= outs) continue;", "if (m >= tokens) continue;", PLAIN),
    Mutant(
        "activations that nobody waits for",
        "barrier(CLK_LOCAL_MEM_FENCE);  // other items' words\n",
        "",
        f"{PLAIN}_that_quantises",
    ),
    Mutant("codes of another piece", "held[r][i][2 * b + 1]", "held[r][i][2 * b]", f"{PLAIN}_that_quantises"),
)
"""Defects of the kernel that every device runs."""


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", PLAIN_MUTANTS, ids=lambda mutant: mutant.defect.replace(" ", "-"))
def test_a_defect_of_the_plain_kernel_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    mutant.assert_caught(HERE / "test_conformance_opencl.py", environment={"BITNET_CACHE_DIR": str(tmp_path)})


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.defect.replace(" ", "-"))
def test_a_defect_is_caught(mutant: Mutant, require_device: Callable[[str, str | None], None], tmp_path: Path) -> None:
    reason = None if INTEL.exists() else f"{INTEL} is not there (pip install intel-opencl-rt intel-cmplr-lib-rt)."
    require_device("opencl-intel", reason)
    (tmp_path / "one.icd").write_text(f"{INTEL}\n")
    environment = {"OCL_ICD_VENDORS": str(tmp_path), "BITNET_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(HERE)}
    file = "test_conformance_opencl.py" if "ternary_table" in mutant.tests else "test_matrix_units.py"
    mutant.assert_caught(HERE / file, "-p", "by_sub_groups", environment=environment)
