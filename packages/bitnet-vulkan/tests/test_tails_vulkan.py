"""A kernel changed so that it writes past the end of a buffer: the poison behind it shows it.

Without the poison the suite passes with it, as the device drops such writes.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bitnet.core.testing.mutant import Mutant
from bitnet.vulkan.backend import BACKEND

SUITE = Path(__file__).with_name("test_conformance_vulkan.py")
ONE_ROW = "test_dense_matmul and m1-n321 and float16"
ROWS = Mutant("rows of weights", "n < min(from + TURNS, rows)", "n < from + TURNS", ONE_ROW)


@pytest.mark.nightly(unless_changed=["kernels/vulkan", "packages/bitnet-core/src/bitnet/core/testing"])
def test_a_write_past_the_end_is_told(require_device: Callable[[str, str | None], None]) -> None:
    found = BACKEND.probe()
    require_device("vulkan:0", None if found.devices else found.reason or "there is no Vulkan device")
    command = [sys.executable, *ROWS.command(SUITE)]
    done = subprocess.run(command, cwd=SUITE.parents[3], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "a kernel wrote 12 bytes behind a buffer of 1,284" in done.stdout, done.stdout
