"""The whole backend, probe to token, through the system's loader and validation layer on the test driver.

It takes the wheel's SPIR-V and runs it on Intel's OpenCL for CPUs; what may run in any order, it runs in reverse.
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

Run: TypeAlias = Callable[..., subprocess.CompletedProcess[str]]

FAMILY = ("kernels/opencl", "packages/bitnet-core/src/bitnet/core/gpu", "packages/bitnet-level-zero")
GUARDED = (*FAMILY, "packages/bitnet-core/src/bitnet/core/testing")
SUITE = str(Path(__file__).with_name("test_conformance_level_zero.py"))
PROBE = """
import json
from bitnet.level_zero.backend import BACKEND
r = BACKEND.probe()
print(json.dumps([r.status.value, r.reason, r.hint, [[d.type.value, d.id, d.features] for d in r.devices]]))
"""
# Rows of several tokens are quantised by one launch and multiplied by the next: the second needs what the first wrote.
PRODUCT = """
import numpy as np
from bitnet.core.arrays import TernaryMatrix
from bitnet.core.hal import OpenOptions
from bitnet.level_zero.backend import BACKEND
{before}
rng = np.random.default_rng()
codes = rng.integers(-1, 2, (96, 768), np.int8)
info, *_ = BACKEND.probe().devices
device = BACKEND.open(info, OpenOptions())
wrong = 0
with TernaryMatrix(codes, device=device, rows=5) as matrix:
    for _ in range(3):
        x = rng.integers(-127, 128, (5, 768)).astype(np.float32)
        x[:, 0] = 127  # so that quantising keeps every number as it is
        wrong += int(np.count_nonzero(np.rint(matrix(x)) != x @ codes.T.astype(np.float32)))
print(wrong)
device.close()
"""


def product(on_driver: Run, before: str = "", **environment: str) -> tuple[int, str, str]:
    """Exit status, output and errors of a product of five rows."""
    done = on_driver("-c", PRODUCT.format(before=before), **environment)
    return done.returncode, done.stdout.strip(), done.stderr


@pytest.mark.parametrize("devices", ["cpu", "shared"])
def test_a_product(on_driver: Run, devices: str) -> None:
    """With memory of the device's own, and with memory that the host shares; nothing is left behind."""
    assert product(on_driver, BITNET_TEST_DRIVER_DEVICES=devices) == (0, "0", "")


def test_a_product_without_the_integer_dot_product(on_driver: Run) -> None:
    assert product(on_driver, BITNET_TEST_DRIVER_NO_DOT="1") == (0, "0", "")


def test_the_layer_checks_parameters(on_driver: Run) -> None:
    """A pointer that is missing is the layer's to refuse: without it the driver writes there."""
    code = """
from bitnet.level_zero.loader import LevelZero, loader
level_zero = LevelZero(loader())
(driver,) = level_zero.drivers()
print(hex(level_zero.status("zeDriverGetApiVersion", driver, None)))
"""
    assert on_driver("-c", code).stdout == "0x78000007\n"  # ZE_RESULT_ERROR_INVALID_NULL_POINTER
    assert on_driver("-c", code, ZE_ENABLE_VALIDATION_LAYER="0").returncode < 0


def test_a_missing_barrier_is_found(on_driver: Run) -> None:
    """The driver runs launches between two barriers in reverse: without any, a product comes before its input."""
    without = """
from bitnet.level_zero.loader import LevelZero
call = LevelZero.call
LevelZero.call = lambda self, name, *rest: None if name == "zeCommandListAppendBarrier" else call(self, name, *rest)
"""
    status, _, errors = product(on_driver, without)
    assert status == 1
    assert re.search(r"it does not compute correctly: \d+ of 48 products are wrong", errors), errors


@pytest.mark.nightly(unless_changed=GUARDED)
def test_a_kernel_that_is_told_a_row_more_ends_the_process(on_driver: Run) -> None:
    """It reads and writes past the end of buffers, where the guards are."""
    one_more = """
from bitnet.core.gpu import Launch
from bitnet.level_zero import device
plain = device.values
def values(launch, address):
    args = tuple(np.int32(97) if isinstance(arg, np.int32) and arg == 96 else arg for arg in launch.args)
    return plain(Launch(launch.kernel, launch.grid, launch.block, args), address)
device.values = values
"""
    status, said, errors = product(on_driver, one_more)
    assert status < 0, said + errors


@pytest.mark.nightly(unless_changed=FAMILY)
def test_the_conformance_suite(on_driver: Run) -> None:
    done = on_driver("-m", "pytest", "-q", "-p", "no:cacheprovider", SUITE, BITNET_REQUIRE_DEVICES="level-zero:0")
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "skipped 3: level-zero:0 has no look-ahead\n" in said
    found = re.search(r"(\d+) passed, (\d+) skipped(?:, \d+ xfailed)? in", said)
    assert found, said
    assert int(found[2]) == 3  # and nothing else is
    assert int(found[1]) > 200
    assert "deselected" not in said, said
    assert done.stderr == ""  # neither the layers nor the driver has a word to say


@pytest.mark.nightly(unless_changed=FAMILY)
def test_groups_of_columns_without_the_integer_dot_product(on_driver: Run) -> None:
    """Their products take one token after another there."""
    arguments = ("-n0", "-q", "-p", "no:cacheprovider", SUITE, "-k", "test_ternary_matmul_of_groups")
    wanted = {"BITNET_REQUIRE_DEVICES": "level-zero:0", "BITNET_TEST_DRIVER_NO_DOT": "1"}
    done = on_driver("-m", "pytest", *arguments, **wanted)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout), done.stdout
    assert "skipped" not in done.stdout, done.stdout


@pytest.mark.nightly(unless_changed=FAMILY)
def test_the_demo_model_answers_as_on_the_cpu(on_driver: Run) -> None:
    """A sample of 100 questions, all tokens of the answers."""
    code = (
        "from bitnet.core.testing.answers import assert_same_answers;"
        f"print(assert_same_answers('level-zero:0', 10, seed={randrange(1 << 30)}))"
    )
    done = on_driver("-c", code)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 1000


# The demo model's answers with weights that stay where they are and with copies of all, and how many weights stayed.
ADOPTING = """
from random import Random
from bitnet.core import load_model
from bitnet.core.testing.answers import FORMS
from bitnet.level_zero.device import LevelZeroDriver

def answers():
    rng = Random({seed})
    asked = [form.format(rng.randint(2, 999), rng.randint(2, 999)) for form in FORMS for _ in range(2)]
    with load_model(device="level-zero:0", context=128) as model:
        prompts = [model.chat_tokens([dict(role="user", content=question)]) for question in asked]
        return [answer.tokens for answer in model.generate_batch(prompts, max_tokens=40, temperature=0)]

adopt, found = LevelZeroDriver.adopt, []
LevelZeroDriver.adopt = lambda self, array: found.append(adopt(self, array)) or found[-1]
stayed = answers()
LevelZeroDriver.adopt = lambda self, array: None
copied = answers()
assert stayed == copied, [pair for pair in zip(stayed, copied) if pair[0] != pair[1]]
print(sum(one is not None for one in found) * 100 // len(found))
"""


@pytest.mark.nightly(unless_changed=FAMILY)
@pytest.mark.parametrize(
    ("devices", "host_memory", "most"),
    [("shared", "read", 100), ("shared", "import", 100), ("shared", "", 0), ("cpu", "read", 0)],
)
def test_weights_that_stay_where_they_are(on_driver: Run, devices: str, host_memory: str, most: int) -> None:
    """A device that shares memory reads mapped weights without a copy; one of its own copies them. Tokens are equal."""
    variables = {"BITNET_TEST_DRIVER_DEVICES": devices, "BITNET_TEST_DRIVER_HOST_MEMORY": host_memory}
    seed = randrange(1 << 30)
    done = on_driver("-c", ADOPTING.format(seed=seed), **variables)
    assert (done.returncode, done.stderr) == (0, ""), (seed, done.stderr)
    assert most // 2 <= int(done.stdout) <= most, seed


def test_a_device_is_verified_once_its_self_check_has_passed(on_driver: Run, tmp_path: Path) -> None:
    details = (
        "from bitnet.level_zero.backend import BACKEND; print(BACKEND.probe().devices[0].details.get('verified', ''))"
    )
    assert on_driver("-c", details, BITNET_TEST_DRIVER_FAULT="unnamed").stdout == "not verified on this hardware\n"
    assert product(on_driver, BITNET_TEST_DRIVER_FAULT="unnamed") == (0, "0", "")
    assert on_driver("-c", details, BITNET_TEST_DRIVER_FAULT="unnamed").stdout == "\n"


def test_the_receipt_of_a_test_driver(on_driver: Run, tmp_path: Path) -> None:
    """The demo model answers, and its receipt says what computed it, and does not verify."""
    receipt = tmp_path / "receipt.json"
    model = ["-m", "bitnet.core", "run", "--device", "level-zero:0", "--receipt", str(receipt), "What is 17 + 25?"]
    done = on_driver(*model)
    assert done.returncode == 0, done.stderr
    assert "42" in done.stdout
    made = json.loads(receipt.read_text(encoding="utf-8"))
    assert {"ternary_decode_level-zero", "attention_decode_level-zero"} <= set(made["kernels"])
    verified = on_driver("-m", "bitnet.core", "receipt", "verify", str(receipt))
    assert verified.returncode == 6
    assert "made with a test driver" in verified.stderr


@pytest.mark.parametrize(
    ("fault", "status", "reason", "hint"),
    [
        ("", "ok", "", ""),
        ("uninitialized", "no-device|driver-missing", "ZE_RESULT_ERROR_UNINITIALIZED", "lspci|Install"),
        ("permission", "no-device|driver-missing", "ZE_RESULT_ERROR_(INSUFFICIENT|UNINIT)", "lspci|Install"),
        ("old", "driver-too-old", r"Level Zero 1\.3 is needed; the driver has 1\.0", "Update"),
        ("no-device", "no-device", "offers no GPU", "lspci"),
        ("no-half", "no-device", "half precision", "lspci"),
    ],
)
def test_what_a_probe_finds(on_driver: Run, fault: str, status: str, reason: str, hint: str) -> None:
    done = on_driver("-c", PROBE, BITNET_TEST_DRIVER_FAULT=fault)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for pattern, text in zip((status, reason, hint), found, strict=False):
        assert re.search(pattern, text), found
    assert bool(found[3]) == (fault == "")


def test_discrete_devices_come_first(on_driver: Run) -> None:
    done = on_driver("-c", PROBE, BITNET_TEST_DRIVER_DEVICES="integrated,discrete,cpu")
    found = json.loads(done.stdout)[3]
    assert [kind for kind, _, _ in found] == ["discrete", "integrated", "cpu"]
    assert len({made for _, made, _ in found}) == 3
    assert "shared-memory" in found[1][2]
    assert "shared-memory" not in found[0][2]


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (
            "build",
            r"KernelCompileError: level-zero:0: .*\(ZE_RESULT_ERROR_MODULE_BUILD_FAILURE\)\.\nerror: the fault",
        ),
        ("wrong", r"DeviceError: level-zero:0: it does not compute correctly: \d+ of 48 products are wrong"),
        ("lost", r"DeviceLostError: level-zero:0: ze\w+ failed with ZE_RESULT_ERROR_DEVICE_LOST"),
        ("hung", r"DeviceLostError: level-zero:0: ze\w+ failed with ZE_RESULT_ERROR_DEVICE_LOST"),
    ],
)
def test_faults_are_errors_that_name_them(on_driver: Run, fault: str, error: str) -> None:
    status, _, errors = product(on_driver, BITNET_TEST_DRIVER_FAULT=fault)
    assert status == 1
    assert re.search(error, errors), errors


def test_exhausted_memory(on_driver: Run) -> None:
    """A model that does not fit is an error that says so, and what was taken for it is given back."""
    code = """
import numpy as np
from bitnet.core.arrays import TernaryMatrix
from bitnet.core.errors import OutOfMemoryError
from bitnet.core.hal import OpenOptions
from bitnet.level_zero.backend import BACKEND
info, *_ = BACKEND.probe().devices
device = BACKEND.open(info, OpenOptions())
try:
    TernaryMatrix(np.ones((4096, 4096), np.int8), device=device)
except OutOfMemoryError as error:
    print(error)
device.close()
"""
    done = on_driver("-c", code, BITNET_TEST_DRIVER_FAULT="memory")
    assert (done.returncode, done.stderr) == (0, "")
    assert "zeMemAllocDevice failed with ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY" in done.stdout


def test_native_binaries_are_kept_and_one_the_driver_refuses_is_built_again(on_driver: Run) -> None:
    labels = "from bitnet.core.support import cache; cache.listeners.append(lambda label, _: print(label))"
    status, first, errors = product(on_driver, labels)
    assert status == 0, errors
    assert "norm_quant" in first
    assert product(on_driver, labels) == (0, "0", "")
    status, again, errors = product(on_driver, labels, BITNET_TEST_DRIVER_FAULT="native")
    assert status == 0, errors
    assert sorted(again.split()) == sorted(first.split())


def test_drivers_of_newer_loaders(on_driver: Run, driver_library: Path) -> None:
    """Debian 12's loader has no zeInitDrivers; the driver taken for a loader has."""
    code = f"""
from bitnet.level_zero import loader
from bitnet.core.support.dynlib import open_library
level_zero = loader.LevelZero(open_library({str(driver_library)!r}))
level_zero._functions["zeInit"] = None
print(len(level_zero.drivers()))
"""
    done = on_driver("-c", code)
    assert done.stdout.strip() == "1", done.stderr
