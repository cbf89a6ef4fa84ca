"""Intel's own driver takes every module of the wheel. It needs no GPU for that: debug keys take the place of one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bitnet.core.support.dynlib import open_library
from bitnet.level_zero.loader import DRIVER
from bitnet.level_zero.variants import all_modules

SCRIPT = str(Path(__file__).with_name("intel_modules.py"))
DOT_PRODUCTS = {"skl": False, "tgllp": True}
"""Products of Gen9 and Gen12, and whether they have the integer dot product."""
SPILLS = {
    "attention_decode": 4096,  # arrays by query head that the driver of 2022 keeps in memory
    "ternary_gemm": 16384,  # as its sums, in loops that it does not unroll
}
"""Bytes of registers that a thread of a kernel may spill, of the kernels that do with the driver of Debian 12."""
GEN9_SPILLS = {"ternary_decode GLU=1": 4096}
"""The same where bytes are multiplied one by one: the codes of a gate and its up."""

# A kernel `k` that calls a function which nobody defines.
UNRESOLVED = "int nowhere(int); kernel void k(global int *o) { o[0] = nowhere(o[1]); }"


@pytest.fixture
def on_product(require_device: Any, run_python: Any, tmp_path: Path) -> Any:
    """``on_product(product, *arguments)`` runs the script on Intel's driver for that product."""
    found = open_library(DRIVER)
    require_device("level-zero-compiler", None if found else f"{DRIVER[0]} is not there (apt: intel-opencl-icd).")

    def run(product: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        keys = {"NEOReadDebugKeys": "1", "SetCommandStreamReceiver": "1", "ProductFamilyOverride": product}
        done: subprocess.CompletedProcess[str] = run_python((SCRIPT, *arguments), keys, tmp_path)
        return done

    return run


def allowed(kernel: str, product: str) -> int:
    """Bytes that a kernel may spill."""
    table = {**SPILLS, **({} if DOT_PRODUCTS[product] else GEN9_SPILLS)}
    return max((most for name, most in table.items() if all(word in kernel for word in name.split())), default=0)


@pytest.mark.parametrize("product", [pytest.param("skl", marks=pytest.mark.nightly), "tgllp"])
def test_every_module_is_built(on_product: Any, product: str) -> None:
    done = on_product(product)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    found.pop("name")
    if not DOT_PRODUCTS[product]:  # the device is found not to take these, and is given the others
        found = {kernel: made for kernel, made in found.items() if " dot" not in kernel}
    modules = sum(DOT_PRODUCTS[product] or not dot for *_, dot in all_modules())
    assert len(found) >= modules
    assert {kernel: made for kernel, made in found.items() if isinstance(made, str)} == {}
    assert {kernel: made for kernel, made in found.items() if made > allowed(kernel, product)} == {}


def test_an_unresolved_function_is_noticed(on_product: Any, tmp_path: Path) -> None:
    """The driver builds such a module all the same; its kernels it does not make."""
    source, made = tmp_path / "unresolved.cl", tmp_path / "unresolved.spv"
    source.write_text(UNRESOLVED)
    options = ["-x", "cl", "-cl-std=CL3.0", "-cl-no-stdinc", "-target", "spirv64v1.2", "-O0", "-c"]
    command = [sys.executable, "-m", "ziglang", "clang", *options, str(source), "-o", str(made)]
    subprocess.run(command, check=True, capture_output=True)
    done = on_product("tgllp", str(made))
    assert done.returncode == 1
    assert "zeKernelCreate failed with ZE_RESULT_ERROR_INVALID_MODULE_UNLINKED" in done.stderr
