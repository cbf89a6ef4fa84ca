"""The conformance suite on drivers that have what PoCL 3.1 lacks, each in a process of its own.

Intel's OpenCL for CPUs has sub-groups, integer dot products and f16. Oclgrind interprets kernels and logs what PoCL and
processors let pass: reads and writes beyond a buffer, and calls that OpenCL does not allow.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pytest

REPOSITORY = Path(__file__).parents[3]
OCLGRIND = Path("/usr/lib/oclgrind/liboclgrind-rt-icd.so")
"""Where Debian and Ubuntu have it."""
INTEL = Path(sys.prefix) / "lib" / "libintelocl.so"
"""Where the wheel intel-opencl-rt puts it."""
HERE = Path(__file__).parent
SUITE = str(HERE / "test_conformance_opencl.py")
Require: TypeAlias = Callable[[str, str | None], None]
Run: TypeAlias = Callable[..., subprocess.CompletedProcess[str]]
SMALL = (
    "test_embed or test_ternary_matmul_of_stacked or test_norm_quant_rounds or test_glu_norm_quant_beyond "
    "or test_quantize_of_zeros or (test_huge_scores and f16) or test_greedy"
)
"""Tests of few work-items: oclgrind interprets every instruction."""
OTHER_MODELS = (
    "test_equal_logits_take or test_route_of or test_expert_matmul or (test_glu_of_several and 7.0) "
    "or test_causal_conv or test_delta_rule or of_a_table_in_blocks "
    "or (test_ternary_matmul_of_binary and k128) or test_rope_of_a_part "
    "or (some_columns and 7) or norm_tokens_uses or (test_gelu and 132) or (rotation_of_a_part and 12 and neox)"
)
"""The same for operations of mixtures, hybrid models and embedders, weights of one bit and packed tables."""

UNITS = (
    "test_ternary_matmul_of_stacked or test_matrix_units or (test_heads and d64) or test_inputs_of_a_recurrent_layer"
)
"""Tests that reach each of the kernels for matrix units."""

XMX_UNITS = "test_ternary_matmul_of_stacked or test_attention_of_many_tokens or (test_a_model_of_such_heads and whole)"
FAMILY = ("kernels/opencl", "packages/bitnet-core/src/bitnet/core/gpu/clc", "packages/bitnet-opencl")


@pytest.fixture
def run_on(tmp_path: Path) -> Run:
    """``run_on(library, arguments, environment)`` runs Python with that driver as the only one."""

    def run(
        library: Path, arguments: list[str], environment: Mapping[str, str] = {}, *, check: bool = False, **more: Any
    ) -> subprocess.CompletedProcess[str]:
        vendors = tmp_path / "vendors"
        vendors.mkdir(exist_ok=True)
        (vendors / "one.icd").write_text(f"{library}\n")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("BITNET_", "OCL_"))}
        own = {"OCL_ICD_VENDORS": str(vendors), "BITNET_CACHE_DIR": str(tmp_path / "cache")}
        command = [sys.executable, *arguments]
        environ = {**clean, **own, **environment}
        return subprocess.run(command, check=check, env=environ, capture_output=True, text=True, cwd=REPOSITORY, **more)

    return run


def absent(library: Path, how: str) -> str | None:
    return None if library.exists() else f"{library} is not there ({how})."


def passed(done: subprocess.CompletedProcess[str]) -> int:
    """How many tests passed; none may have failed, or been skipped."""
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    summary = said.strip().splitlines()[-1]
    found = re.search(r"(\d+) passed", summary)
    assert found, said
    assert "skipped" not in summary, said
    return int(found[1])


def test_intel(require_device: Require, run_on: Run) -> None:
    require_device("opencl-intel", absent(INTEL, "pip install intel-opencl-rt intel-cmplr-lib-rt"))
    code = (
        "import json; from bitnet.opencl.backend import BACKEND;"
        "print(json.dumps([[d.description, d.features] for d in BACKEND.probe().devices]))"
    )
    ((description, features),) = json.loads(run_on(INTEL, ["-c", code], check=True).stdout)
    assert "Intel" in description
    assert {"f16", "int8-dot", "subgroups", "command-buffer"} <= set(features)
    only = {"BITNET_REQUIRE_DEVICES": "opencl:0"}
    done = run_on(INTEL, ["-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", SUITE], only)
    assert passed(done) > 100
    assert "is built without the device's features" not in done.stdout + done.stderr


def test_intel_with_matrix_units(require_device: Require, run_on: Run) -> None:
    """The kernels that NVIDIA's devices get, made of sub-groups: all of each, on few shapes, as this is slow."""
    require_device("opencl-intel", absent(INTEL, "pip install intel-opencl-rt intel-cmplr-lib-rt"))
    environment = {"BITNET_REQUIRE_DEVICES": "opencl:0", "PYTHONPATH": str(HERE)}
    tests = [SUITE, str(HERE / "test_matrix_units.py"), "-k", UNITS]
    done = run_on(
        INTEL, ["-m", "pytest", "-n0", "-q", "-p", "by_sub_groups", "-p", "no:cacheprovider", *tests], environment
    )
    assert passed(done) > 10
    assert "does not build" not in done.stdout + done.stderr


@pytest.mark.nightly(unless_changed=FAMILY)
@pytest.mark.parametrize("width", [8, 16])
def test_intel_with_xmx(require_device: Require, run_on: Run, width: int) -> None:
    """The kernels that Intel's GPUs get, with the matrix unit's built-ins made of sub-groups."""
    require_device("opencl-intel", absent(INTEL, "pip install intel-opencl-rt intel-cmplr-lib-rt"))
    environment = {"BITNET_REQUIRE_DEVICES": "opencl:0", "PYTHONPATH": str(HERE), "BITNET_TEST_XMX": str(width)}
    tests = [SUITE, str(HERE / "test_attention_tiles.py"), str(HERE / "test_matrix_units.py"), "-k", XMX_UNITS]
    done = run_on(INTEL, ["-m", "pytest", "-n0", "-q", "-p", "by_xmx", "-p", "no:cacheprovider", *tests], environment)
    assert passed(done) > 5
    assert "by XMX: intel/attention_prefill_xmx, intel/sub_groups, intel/ternary_gemm_sg" in done.stdout


@pytest.mark.parametrize(
    "tests",
    [SMALL, pytest.param(OTHER_MODELS, marks=pytest.mark.nightly(unless_changed=FAMILY))],
    ids=["small", "other-models"],
)
def test_oclgrind(require_device: Require, run_on: Run, tmp_path: Path, tests: str) -> None:
    """Its log must be empty; its exit status says nothing."""
    require_device("oclgrind", absent(OCLGRIND, "Debian: apt install oclgrind"))
    log = tmp_path / "oclgrind.log"
    environment = {"BITNET_REQUIRE_DEVICES": "opencl:0", "OCLGRIND_LOG": str(log), "OCLGRIND_CHECK_API": "1"}
    one = {min(os.sched_getaffinity(0))}
    done = run_on(
        OCLGRIND,
        ["-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", SUITE, "-k", tests],
        environment,
        preexec_fn=lambda: os.sched_setaffinity(0, one),  # it crashes where two threads compile
    )
    assert passed(done) > 10
    assert not log.exists() or not log.read_text().strip(), log.read_text()


def test_oclgrind_would_tell(require_device: Require, run_on: Run, tmp_path: Path) -> None:
    """A kernel that writes past its buffer comes into the log."""
    require_device("oclgrind", absent(OCLGRIND, "Debian: apt install oclgrind"))
    log = tmp_path / "oclgrind.log"
    code = (
        "import numpy as np, pyopencl as cl; d = cl.get_platforms()[0].get_devices()[0]; c = cl.Context([d]);"
        "q = cl.CommandQueue(c); b = cl.Buffer(c, cl.mem_flags.READ_WRITE, 16);"
        "k = cl.Kernel(cl.Program(c, 'kernel void f(global int *x) { x[get_global_id(0)] = 1; }').build(), 'f');"
        "k.set_args(b); cl.enqueue_nd_range_kernel(q, k, (5,), None); q.finish()"
    )
    run_on(OCLGRIND, ["-W", "ignore", "-c", code], {"OCLGRIND_LOG": str(log), "PYOPENCL_NO_CACHE": "1"}, check=True)
    assert "Invalid write" in log.read_text()
