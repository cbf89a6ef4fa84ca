"""Kernels changed so that they read past the end of a buffer: the suite notices each, though no result changes.

On CPUs, where an inaccessible page follows each buffer, such a read ends the process.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyopencl as cl
import pytest

from bitnet.core.testing.mutant import Mutant
from bitnet.opencl.backend import BACKEND

ROOT = Path(__file__).parents[3]
SUITE = Path(__file__).with_name("test_conformance_opencl.py")
ROWS_OF_X = Mutant(
    "groups: rows of x",
    "min(token + part + t, tokens - 1)",
    "token + part + t",
    "test_ternary_matmul_of_groups and m9-",
)
MUTANTS = [
    ROWS_OF_X,
    Mutant(
        "groups: scales of rows",
        "row_of(group, slot, r, rows) * COUNT",
        "(group * OUTS + slot + r) * COUNT",
        "test_ternary_matmul_of_groups and m3-",
    ),
    Mutant(
        "groups: codes of rows",
        "row = codes + (size_t)row_of(group, slot, r, rows)",
        "row = codes + (size_t)(group * OUTS + slot + r)",
        "test_ternary_matmul_of_groups and m1- and 7",
    ),
    Mutant("many tokens: rows of x", "min(m0 + at / 8, tokens - 1)", "m0 + at / 8", "test_ternary_matmul and m33-n580"),
    Mutant(
        "many tokens: codes of rows", "min(n0 + at / 2, rows - 1)", "(n0 + at / 2)", "test_ternary_matmul and m33-n580"
    ),
    Mutant(
        "few tokens: scales of rows", "min(first + slot, outs - 1)", "first + slot", "test_ternary_matmul and m1-n7-"
    ),
    Mutant(
        "head: rows of weights",
        "min(first_row + slot * EACH + e, rows - 1) * cols",
        "(first_row + slot * EACH + e) * cols",
        "test_dense_matmul and m5-n33",
    ),
    Mutant(
        "table: codes of rows",
        "min(first_row + slot * EACH + e, rows - 1) * (ROW_BYTES / 4)",
        "(first_row + slot * EACH + e) * (ROW_BYTES / 4)",
        "test_dense_matmul_of_a_ternary_table and m1-rows301",
    ),
    Mutant(
        "table: scales of rows",
        "size_t n = min(first_row + slot * EACH + e, rows - 1);",
        "size_t n = first_row + slot * EACH + e;",
        "test_dense_matmul_of_a_ternary_table and m1-rows301",
    ),
]
"""The first had survived: no result depends on such rows, and the suite left rows to spare behind the last."""


def absent() -> str | None:
    """Why there is no CPU among OpenCL's devices, if so."""
    found = BACKEND.probe()
    if not found.devices:
        return found.reason or "OpenCL has no device"
    kinds = [device.type for platform in cl.get_platforms() for device in platform.get_devices()]
    return None if any(kind & cl.device_type.CPU for kind in kinds) else "no device of OpenCL is a CPU"


NIGHT = pytest.mark.nightly(unless_changed=["kernels/opencl", "packages/bitnet-core/src/bitnet/core/testing"])


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(m, marks=[] if m is ROWS_OF_X else NIGHT, id=m.defect.replace(" ", "-")) for m in MUTANTS],
)
def test_a_stray_read_ends_the_process(mutant: Mutant, require_device: Callable[[str, str | None], None]) -> None:
    require_device("opencl:0", absent())
    command = [sys.executable, *mutant.command(SUITE)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode < 0, done.stdout + done.stderr
