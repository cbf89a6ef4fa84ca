"""The backend from probe to token on the test driver (``hip_on_opencl``): its own code, and AMD's kernels as OpenCL C.

Executed by Intel's OpenCL for CPUs; not run on hardware.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from random import randrange
from typing import TypeAlias

import pytest

from bitnet.core.testing.mutant import Mutant

Run: TypeAlias = Callable[..., subprocess.CompletedProcess[str]]
SUITE = str(Path(__file__).with_name("test_conformance_rocm.py"))
ATTENTION = str(Path(__file__).with_name("test_attention_rocm.py"))
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
OPEN = (
    "import logging; logging.basicConfig(format='%(message)s');"
    "from bitnet.rocm.backend import BACKEND as b; from bitnet.core.devices.options import open_options;"
    "i, = b.probe().devices; d = b.open(i, open_options());"
)
ASK = OPEN + (
    "d.close(); from importlib.resources import files; from bitnet.core import load_model;"
    "m = load_model(str(files('bitnet.core') / 'data' / 'bitnet-demo.gguf'), device='rocm:0');"
    "print(m.generate('What is 17 + 25?', max_tokens=24).text); m.close()"
)
ANSWER = "42"
ANSWERS = (
    "from bitnet.core.testing.answers import assert_same_answers;"
    "print(assert_same_answers({device!r}, 10, seed={seed}))"
)
FAMILY = ("kernels/opencl", "packages/bitnet-core/src/bitnet/core/gpu", "packages/bitnet-rocm")
GUARDED = (*FAMILY, "packages/bitnet-core/src/bitnet/core/testing")


def passed(done: subprocess.CompletedProcess[str]) -> int:
    """How many tests passed; none may have been skipped."""
    summary = done.stdout.strip().splitlines()[-1]
    assert "skipped" not in summary, done.stdout
    found = re.search(r"(\d+) passed", summary)
    assert found, done.stdout
    return int(found[1])


@pytest.mark.nightly(unless_changed=FAMILY)
def test_conformance(run: Run) -> None:
    assert passed(run(*PYTEST, SUITE, BITNET_REQUIRE_DEVICES="rocm:0")) > 200


def test_conformance_of_another_kind(run: Run) -> None:
    """Waves of 64, dot products of signed bytes, and the older compiler's numbers."""
    some = "test_ternary_matmul_of_stacked or test_norm_quant_rounds or test_greedy"
    other = {"HIP_TEST_ARCH": "gfx906:sramecc+:xnack-", "HIP_TEST_COMGR": 2, "HIP_TEST_VERSION": 60443482}
    assert passed(run(*PYTEST, SUITE, "-k", some, BITNET_REQUIRE_DEVICES="rocm:0", **other)) > 10


@pytest.mark.nightly(unless_changed=FAMILY)
def test_gates_of_another_row_are_found(run: Run) -> None:
    """Decays and strengths beside the norm, which only GPUs have in one launch."""
    first = Mutant("the first row's", "gates + (size_t)token * 2 * heads", "gates", "inputs_of_a_recurrent and 1536")
    done = run(*first.command(Path(SUITE)), status=None, BITNET_REQUIRE_DEVICES="rocm:0")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "gates" in done.stdout


@pytest.mark.nightly(unless_changed=GUARDED)
def test_a_kernel_that_reads_past_a_buffer_ends_the_process(run: Run) -> None:
    """The guards behind each buffer: no result depends on what it finds there."""
    rows = Mutant("scales of rows", "min(first + slot, outs - 1)", "first + slot", "test_ternary_matmul and m1-n7-")
    done = run(*rows.command(Path(SUITE)), status=None, BITNET_REQUIRE_DEVICES="rocm:0")
    assert done.returncode < 0, done.stdout + done.stderr


@pytest.mark.nightly(unless_changed=FAMILY)
@pytest.mark.parametrize("name", ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"])
def test_products_on_matrix_units(run: Run, name: str) -> None:
    """Each kind of them, emulated to AMD's register layouts, with tiles of every size."""
    printed = run(str(Path(__file__).with_name("matrix_products.py")), HIP_TEST_ARCH=name).stdout
    print(printed)
    assert "5 tiles, 0 wrong" in printed


@pytest.mark.nightly(unless_changed=FAMILY)
@pytest.mark.parametrize("name", ["gfx90a", "gfx1100", "gfx1201"])
def test_attention_on_matrix_units(run: Run, name: str) -> None:
    """Each register layout of halves; gfx942 and gfx950 have gfx90a's."""
    assert passed(run(*PYTEST, ATTENTION, BITNET_REQUIRE_DEVICES="rocm:0", HIP_TEST_ARCH=name)) == 4


@pytest.mark.nightly(unless_changed=FAMILY)
def test_the_demo_model_answers_as_on_the_cpu(run: Run) -> None:
    """A sample of 100 questions, all tokens of the answers."""
    assert int(run("-c", ANSWERS.format(device="rocm:0", seed=randrange(1 << 30))).stdout) > 1000


@pytest.mark.parametrize("how", ["wrong", "refused"])
def test_graphs_that_go_wrong_are_not_used(run: Run, how: str) -> None:
    done = run("-c", ASK, HIP_TEST_GRAPHS=how)
    assert ANSWER in done.stdout
    why = (
        "a replayed step differs"
        if how == "wrong"
        else "hipStreamEndCapture failed with hipErrorStreamCaptureInvalidated"
    )
    assert f"rocm:0: {why}" in done.stderr
    assert "HIP graphs are not used" in done.stderr


def test_graphs_are_used_unless_switched_off(run: Run) -> None:
    code = OPEN + "print(d._driver.graphs); d.close()"
    for value, expected in ((None, "True"), ("1", "True"), ("0", "False")):
        given = (
            {} if value is None else {"BITNET_ROCM_GRAPHS": value, "HIP_TEST_GRAPHS": "" if value == "1" else "wrong"}
        )
        done = run("-c", code, **given)
        assert done.stdout.strip() == expected
        assert "not used" not in done.stderr
    done = run("-c", code, status=1, BITNET_ROCM_GRAPHS="perhaps")
    assert "BITNET_ROCM_GRAPHS is 'perhaps'; it must be 1 or 0." in done.stderr


def test_a_wrong_product_closes_the_device(run: Run) -> None:
    done = run("-c", OPEN, status=1, HIP_TEST_LEAVE_OUT="ternary_decode")
    assert "DeviceError: rocm:0: it does not compute correctly" in done.stderr


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("MEMORY", 12_000_000, "OutOfMemoryError: rocm:0: hipMalloc failed with hipErrorOutOfMemory"),
        ("FAULT", "hipGraphLaunch:20:719", "DeviceLostError: rocm:0: hipGraphLaunch failed with hipErrorLaunchFailure"),
        ("FAULT", "hipStreamSynchronize:70:700", "DeviceLostError: rocm:0: hipStreamSynchronize failed"),
        ("FAULT", "hipModuleLoadData:1:200", "DeviceError: rocm:0: hipModuleLoadData failed with hipErrorInvalidImage"),
    ],
)
def test_faults(run: Run, name: str, value: object, error: str) -> None:
    """A traceback of the error's type ends the process, which does not hang on its way out."""
    assert error in run("-c", ASK, status=1, **{f"HIP_TEST_{name}": value}).stderr


def test_a_device_is_verified_once_its_self_check_has_passed(
    run: Run, build_driver: Callable[..., Path], tmp_path: Path
) -> None:
    """A wrong product verifies nothing. The driver here does not say what it is."""
    environment = {"ROCM_PATH": build_driver(tmp_path / "rocm", "-DUNNAMED"), "BITNET_CACHE_DIR": tmp_path / "cache"}

    said = "from bitnet.rocm.backend import BACKEND as b; print(b.probe().devices[0].details.get('verified', ''))"
    assert run("-c", said, **environment).stdout == "not verified on this hardware\n"
    run("-c", OPEN, status=1, HIP_TEST_LEAVE_OUT="ternary_decode", **environment)
    assert run("-c", said, **environment).stdout == "not verified on this hardware\n"
    run("-c", OPEN + "d.close()", **environment)
    assert run("-c", said, **environment).stdout == "\n"


def test_a_source_that_does_not_compile(run: Run) -> None:
    code = (
        OPEN + "from bitnet.core.gpu import KernelSpec;"
        "d._driver._programs.prepare([KernelSpec('row_sums', 'row_sums', (('WG', 64), ('COLS', 'no_number')))])"
    )
    error = run("-c", code, status=1).stderr
    assert "KernelCompileError: rocm:0: row_sums.cl does not compile." in error
    assert "no_number" in error


def test_a_compiler_that_ends_its_process(run: Run, tmp_path: Path) -> None:
    error = run("-c", OPEN, status=1, HIP_TEST_ABORT=1, BITNET_CACHE_DIR=tmp_path).stderr
    assert "KernelCompileError: rocm:0" in error
    assert "does not compile" in error
    assert "libamd_comgr crashed (SIGABRT: Aborted)" in error


def test_matrix_units_that_the_compiler_does_not_take(run: Run, tmp_path: Path) -> None:
    """The others serve, and the self-check multiplies by them."""
    done = run("-c", OPEN + "d.close()", HIP_TEST_REFUSE="void waves(", BITNET_CACHE_DIR=tmp_path)
    assert "rocm:0: amd/waves does not build, so the feature it tests is not used. refused" in done.stderr
    done = run("-c", OPEN, status=1, HIP_TEST_REFUSE="void ternary_gemm_matrix(", BITNET_CACHE_DIR=tmp_path)
    assert "amd/ternary_gemm_matrix.cl does not compile" in done.stderr  # which the self-check asked for


def test_memory_is_given_back(run: Run) -> None:
    code = OPEN + "b = d._driver; b.free(b.alloc(2**20)); print(b.memory()[0] - b.memory()[1]); d.close()"
    assert run("-c", code).stdout.strip() == "0"


def test_devices_and_receipts_say_what_it_is(run: Run, tmp_path: Path) -> None:
    listed = json.loads(run("-m", "bitnet.core", "devices", "--json").stdout)
    (backend,) = [b for b in listed["backends"] if b["name"] == "rocm"]
    (device,) = backend["devices"]
    assert device["type"] == "virtual"
    assert "test driver" in device["details"]["note"]
    assert not listed["selected"].startswith("rocm")
    receipt = str(tmp_path / "receipt.json")
    run("-m", "bitnet.core", "run", "--device", "rocm:0", "--receipt", receipt, "What is 17 + 25?")
    done = run("-m", "bitnet.core", "receipt", "verify", receipt, status=None)
    assert done.returncode != 0
    assert "it was made with a test driver" in done.stdout + done.stderr
