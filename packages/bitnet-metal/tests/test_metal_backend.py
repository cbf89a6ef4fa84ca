"""The backend from probe to token on the test library (``objc_on_cpu``), its kernels run by the shim.

Every run ends with the library's own list of leaks, over-releases, messages to nil and faults of kernels: a run that
has any ends with status 3. Not run on hardware.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from random import randbytes, randrange
from typing import Any, TypeAlias

import pytest
from metal_steps import OWN

CORE = tuple(f"packages/bitnet-core/src/bitnet/core/{wing}" for wing in ("gpu", "hal", "testing"))
pytestmark = pytest.mark.nightly(unless_changed=OWN)  # the library takes a minute to build
of_the_core_too = pytest.mark.nightly(unless_changed=(*OWN, *CORE))
Run: TypeAlias = Callable[..., subprocess.CompletedProcess[str]]
HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]
PYTEST = ("-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", "-p", "metal_on_cpu")
PROBE = "import metal_on_cpu; from bitnet.metal.backend import BACKEND as b; r = b.probe(); "
SAY = PROBE + "print(r.status.value, '|', r.reason, r.hint, '|', [(d.type.value, d.vendor) for d in r.devices])"
OPEN = PROBE + "from bitnet.core.hal import OpenOptions; d = b.open(r.devices[0], OpenOptions()); "
ASK = OPEN + (
    "d.close(); from importlib.resources import files; from bitnet.core import load_model;"
    "m = load_model(str(files('bitnet.core') / 'data' / 'bitnet-demo.gguf'), device='metal:0', context=128)\n"
    "try: print(m.generate('What is 17 + 25?', max_tokens=24).text)\n"
    "finally: m.close()"
)
REPLAYS = OPEN + "print(d._driver.graphs); d.close()"
GEMM = OPEN + "print(*{k.spec.entry for k in d._driver._pipelines._pipelines if 'gemm' in k.spec.entry}); d.close()"
CLOSED = OPEN + "d.close()"
ARCHIVE = "metal:0: the archive of compiled pipelines"
RESIDENT = OPEN + (
    "b = d._driver; n = b.memory()[1]; x = b.alloc(1 << 20); kept = n - b.memory()[1]; b.free(x);"
    "print(kept, n - b.memory()[1], bool(b._resident._set)); d.close()"
)
WITHOUT = (
    "import metal_on_cpu; from bitnet.metal.objc import Objc; send = Objc.send\n"
    "Objc.send = lambda o, at, name, *a: None if name == {left_out!r} else send(o, at, name, *a)\n"
)
ADOPTED = """
import metal_on_cpu
from bitnet.core.testing.answers import assert_same_answers
from bitnet.metal.device import MetalDriver
adopt, found = MetalDriver.adopt, []
MetalDriver.adopt = lambda self, array: found.append((array.nbytes, adopt(self, array))) or found[-1][1]
assert_same_answers('metal:0', 1, seed={seed})
print(sum(n for n, one in found if one) * 100 // sum(n for n, _ in found))
"""
ADOPT = """
import mmap, numpy as np
driver = d._driver
with open({path!r}, 'rb') as file:
    mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
for array in (mapped[4112:], mapped[4112:][:32768], mapped[8:], mapped[16:][:100], mapped[16:].copy(), mapped):
    buffer = driver.adopt(array)
    if buffer:
        out = np.zeros_like(array)
        driver.download(buffer, out)
        assert buffer.nbytes == array.nbytes and (out == array).all()
        driver.free(buffer)
    print(buffer is not None)
d.close()
"""
MESSAGES = (
    OPEN
    + """
import numpy as np
from bitnet.core.gpu import KernelSpec, Launch
driver, objc, sent = d._driver, d._driver._objc, []
send, buffer = type(objc).send, driver.alloc(4096)
type(objc).send = lambda o, at, name, *a: sent.append(name) or send(o, at, name, *a)
kernels = [KernelSpec('row_sums', 'row_sums', (('WG', 64), ('COLS', n))) for n in (64, 128)]
for graphs in (False, True):
    driver.graphs = graphs
    for count in (2, 200):
        launches = [Launch(kernels[i % 2], (1, 1, 1), (64, 1, 1), (buffer, buffer, buffer)) for i in range(count)]
        recording = driver.record(launches)
        driver.submit(recording)  # makes what was allocated resident, once
        sent.clear()
        driver.submit(recording)
        print(len(sent))
driver.free(buffer)
d.close()
"""
)
CONFORMANCE, CONFORMANCE_CLASS = HERE / "test_conformance_metal.py", "TestConformance"
PLAIN = {"METAL_TEST_NAME": "Apple Paravirtual device"}
"""A device without matrices: the shim takes ten times as long for them as for plain kernels."""
SAMPLE = "test_layer_free_to_fuse and llama"
"""The part of the conformance suite that runs at every push."""
COMMAND = (
    "import sys, metal_on_cpu; from bitnet.core.support import helper; helper.possible = lambda: False; "
    "from bitnet.core.__main__ import main; sys.argv[1:] = {arguments!r}; sys.exit(main())"
)
"""The command line, which starts no child: that would know nothing of the library."""


@pytest.fixture
def run(require_device: Callable[..., None], tmp_path: Path) -> Run:
    """``run("-c", code, METAL_TEST_OS="11.0")`` runs Python on the test library; it must end with ``status``."""
    absent = "the test library is for Linux" if sys.platform != "linux" else None
    require_device("metal-test-library", absent or (None if find_spec("ziglang") else "ziglang is not installed"))

    def run(*arguments: str, status: int | None = 0, **environment: Any) -> subprocess.CompletedProcess[str]:
        clean = {n: v for n, v in os.environ.items() if not n.startswith(("BITNET_", "METAL_")) or n.endswith("_CACHE")}
        own = {"PYTHONPATH": HERE / "objc_on_cpu", "BITNET_CACHE_DIR": tmp_path}
        environ = clean | {name: str(value) for name, value in (own | environment).items()}
        command = [sys.executable, *arguments]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, cwd=REPOSITORY, check=False)
        assert status is None or done.returncode == status, done.stdout + done.stderr
        return done

    return run


@of_the_core_too
@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, r"ok \|   \| \[\('virtual', 'bitnet \(test driver\)'\)\]"),
        (PLAIN, r"ok \|   \| \[\('virtual', "),
        ({"METAL_TEST_NAME": "AMD Radeon Pro 5500M"}, r"unsupported \| AMD Radeon Pro 5500M: the kernels .* \| \[\]"),
        ({"METAL_TEST_NO_DEVICE": 1}, r"no-device \| Metal finds no GPU.* \| \[\]"),
        ({"METAL_TEST_OS": "11.7.10"}, r"driver-too-old \| This is macOS 11.7.10; the kernels need 12.0 or newer"),
    ],
)  # fmt: skip
def test_probe(run: Run, environment: dict[str, Any], said: str) -> None:
    assert re.match(said, run("-c", SAY, **environment).stdout)


def test_a_question_is_answered(run: Run) -> None:
    assert "42" in run("-c", ASK, METAL_TEST_UNCHECKED=1).stdout


@of_the_core_too
def test_a_sample_of_conformance(run: Run) -> None:
    """What the core plans for Metal fits its kernels."""
    fast = {"METAL_TEST_FAMILY": 1008, "METAL_TEST_UNCHECKED": 1, "BITNET_REQUIRE_DEVICES": "metal:0"}
    done = run(*PYTEST, str(CONFORMANCE), "-k", SAMPLE, **fast)
    assert re.match(r"1 passed, \d+ deselected in", done.stdout.strip().splitlines()[-1]), done.stdout


def test_conformance(run: Run) -> None:
    done = run(*PYTEST, str(CONFORMANCE), "-k", CONFORMANCE_CLASS, BITNET_REQUIRE_DEVICES="metal:0")
    lacking = re.findall(r"^skipped \d+: (.*)$", done.stdout, re.MULTILINE)
    assert {*lacking} == {"metal:0 has no look-ahead"}, done.stdout
    found = re.search(r"(\d+) passed", done.stdout.strip().splitlines()[-1])
    assert found, done.stdout
    assert int(found[1]) > 200


def test_the_demo_model_answers_as_on_the_cpu(run: Run) -> None:
    """With plain kernels, as on CI's virtual Mac; the conformance tests use matrices and check every access."""
    plain = {**PLAIN, "METAL_TEST_UNCHECKED": 1, "BITNET_REQUIRE_DEVICES": "metal:0"}
    done = run(*PYTEST, str(CONFORMANCE), "-k", f"not {CONFORMANCE_CLASS}", **plain)
    assert re.match(r"1 passed, \d+ deselected in", done.stdout.strip().splitlines()[-1]), done.stdout


@pytest.mark.parametrize(
    ("environment", "error"),
    [
        ({"MEMORY": 12_000_000}, "OutOfMemoryError: metal:0: Metal gives no buffer of"),
        ({"MAX_BUFFER": 100_000}, "OutOfMemoryError: metal:0: a buffer of .* exceeds the device's largest, 100,000."),
        ({"FAIL_AT": 9, "FAIL_CODE": 2}, "DeviceLostError: metal:0: a step failed with MTLCommandBufferErrorTimeout"),
        ({"FAIL_AT": 9, "FAIL_CODE": 11}, "DeviceLostError: .* failed with MTLCommandBufferErrorDeviceRemoved"),
        ({"FAIL_AT": 9, "FAIL_CODE": 8}, "OutOfMemoryError: .* failed with MTLCommandBufferErrorOutOfMemory"),
        ({"FAIL_AT": 9, "FAIL_CODE": 9}, "DeviceError: .* failed with MTLCommandBufferErrorInvalidResource"),
        ({"NO_PIPELINE": "embed"}, "KernelCompileError: metal:0: embed makes no pipeline"),
        ({"WIDTH": 64}, "KernelCompileError: metal:0: .* does not fit this GPU"),
        ({"LEAVE_OUT": "ternary_decode"}, "DeviceError: metal:0: it does not compute correctly"),
    ],
)
def test_faults(run: Run, environment: dict[str, object], error: str) -> None:
    """A traceback of the error's type ends the process, and everything was given back."""
    done = run("-c", ASK, status=1, **{f"METAL_TEST_{name}": value for name, value in environment.items()})
    assert re.search(rf"^(?:[\w.]+\.)?{error}", done.stderr, re.MULTILINE), done.stderr


@pytest.mark.parametrize(
    ("environment", "kernel", "said"),
    [
        ({}, "ternary_gemm_matrix", ""),
        ({"NAME": "Apple Paravirtual device"}, "ternary_gemm", ""),
        ({"NO_PIPELINE": "ternary_gemm_matrix"}, "ternary_gemm", "metal:0: ternary_gemm_matrix makes no pipeline"),
        ({"NO_PIPELINE": "dense_matmul_matrix"}, "ternary_gemm", "metal:0: dense_matmul_matrix makes no pipeline"),
        ({"LEAVE_OUT": "ternary_gemm_matrix"}, "ternary_gemm", "metal:0: it does not compute correctly"),
    ],
)
def test_prompts_take_matrices_where_they_compute(
    run: Run, environment: dict[str, object], kernel: str, said: str
) -> None:
    """Without matrices the device opens all the same, and a warning says why; a virtual one does not try them."""
    done = run("-c", GEMM, METAL_TEST_FAMILY=1008, **{f"METAL_TEST_{name}": v for name, v in environment.items()})
    assert done.stdout == f"{kernel}\n"
    assert done.stderr.startswith(f"Simdgroup matrices are not used: {said}" if said else ""), done.stderr
    assert bool(done.stderr) == bool(said)


@pytest.mark.parametrize(
    ("environment", "replays", "said"),
    [
        ({}, True, ""),
        ({"FAMILY": 1008}, False, ""),
        ({"NO_INDIRECT": 1}, False, "metal:0: it makes no indirect command buffer"),
        ({"INDIRECT_FAIL": 9}, False, "metal:0: a step failed with MTLCommandBufferErrorInvalidResource"),
        ({"INDIRECT_FAIL": 3}, False, "metal:0: a step failed with MTLCommandBufferErrorPageFault"),
        ({"INDIRECT_LEAVE_OUT": "ternary_decode"}, False, "metal:0: a replayed step differs"),
    ],
)
def test_indirect_commands_are_used_where_they_compute_the_same(
    run: Run, environment: dict[str, object], replays: bool, said: str
) -> None:
    """Else the device opens all the same, and a warning says why."""
    done = run("-c", REPLAYS, **{f"METAL_TEST_{name}": value for name, value in environment.items()})
    assert done.stdout == f"{replays}\n"
    assert done.stderr.startswith(f"Indirect command buffers are not used: {said}" if said else ""), done.stderr
    assert bool(done.stderr) == bool(said)


@pytest.mark.parametrize(
    ("left_out", "status", "said"),
    [
        ("setBarrier", 0, "a replayed step differs from the same step"),
        ("useResources:count:usage:", 3, "has a buffer that is gone, or not resident"),
        ("setSupportIndirectCommandBuffers:", 3, "has a pipeline that does not support it"),
        ("setInheritBuffers:", 3, "indirect commands that inherit"),
    ],
)
def test_what_indirect_commands_need_is_missed(run: Run, left_out: str, status: int, said: str) -> None:
    """Faults put in on purpose: what no barrier orders runs the other way round, and the library looks at the rest."""
    assert said in run("-c", WITHOUT.format(left_out=left_out) + REPLAYS, status=status).stderr


def test_a_step_is_as_many_messages_however_many_launches_it_has(run: Run) -> None:
    plain, plain_of_many, indirect, indirect_of_many = map(int, run("-c", MESSAGES).stdout.split())
    assert plain == plain_of_many <= 7
    assert indirect == indirect_of_many <= 8


def test_compiled_pipelines_are_kept(run: Run) -> None:
    """The next process compiles none, on the same build of macOS; on another it compiles all of them."""
    only_kept = {"METAL_TEST_ONLY_KEPT": 1}
    assert "a pipeline was compiled" in run("-c", CLOSED, status=1, **only_kept).stderr
    assert run("-c", CLOSED).stderr == ""
    assert run("-c", CLOSED, **only_kept).stderr == ""
    assert "a pipeline was compiled" in run("-c", CLOSED, status=1, METAL_TEST_BUILD="24B83", **only_kept).stderr
    assert run("-c", CLOSED, METAL_TEST_BUILD="24B83").stderr == ""


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("NO_ARCHIVE", "cannot be made: a fault put in on purpose"),
        ("NO_ADD", "takes no pipeline: MTLBinaryArchiveErrorCompilationFailure"),
        ("NO_SERIALIZE", "cannot be written: MTLBinaryArchiveErrorInternalError"),
    ],
)
def test_pipelines_that_cannot_be_kept(run: Run, tmp_path: Path, fault: str, said: str) -> None:
    """One line says so, nothing is left on disk, and the device works."""
    done = run("-c", CLOSED, TMPDIR=tmp_path, **{f"METAL_TEST_{fault}": 1})
    assert done.stderr == f"{ARCHIVE} {said}\n"
    left = {*tmp_path.rglob("*.kernel"), *tmp_path.rglob("bitnet-metal-*")}
    assert left <= {tmp_path / "bitnet-metal-shim"}, "the test library's own folder"


@pytest.mark.parametrize("damage", ["on the disk", "as Metal sees it"])
def test_a_damaged_archive_is_made_again(run: Run, tmp_path: Path, damage: str) -> None:
    """What the cache finds damaged is as if it were not there; what Metal refuses, a line tells."""
    run("-c", CLOSED, METAL_TEST_CUT_OFF=int(damage != "on the disk"))
    (entry,) = tmp_path.rglob("*.kernel")
    if damage == "on the disk":
        entry.write_bytes(entry.read_bytes()[:-9])
    said = "" if damage == "on the disk" else f"{ARCHIVE} is not used: MTLBinaryArchiveErrorInvalidFile\n"
    assert run("-c", CLOSED).stderr == said
    assert run("-c", CLOSED, METAL_TEST_ONLY_KEPT=1).stderr == ""
    assert list(tmp_path.rglob("*.kernel")) == [entry]


@pytest.mark.parametrize(
    ("environment", "left_out", "status", "said"),
    [
        ({}, "", 0, ""),
        ({"OS": "14.5"}, "", 0, ""),
        ({"NO_RESIDENCY": 1}, "", 0, "metal:0: buffers are not kept resident: a fault put in on purpose"),
        ({}, "addAllocation:", 3, "has a buffer that the queue's residency set has not"),
        ({}, "requestResidency", 3, "residency was not requested before"),
    ],
)
def test_buffers_are_resident(run: Run, environment: dict[str, object], left_out: str, status: int, said: str) -> None:
    """On macOS 15, and given back when they are freed; an older one is sent nothing of it."""
    settings = {f"METAL_TEST_{name}": value for name, value in environment.items()}
    done = run("-c", WITHOUT.format(left_out=left_out) + RESIDENT, status=status, METAL_TEST_FAMILY=1008, **settings)
    assert said in done.stderr
    if status == 0:
        assert bool(done.stderr) == bool(said)
        assert done.stdout == f"1048576 0 {not environment}\n"


def test_a_freed_buffer_that_stays_in_the_set_is_seen(run: Run) -> None:
    """A fault put in on purpose: the set is what still owns it."""
    done = run("-c", WITHOUT.format(left_out="removeAllocation:") + RESIDENT, METAL_TEST_FAMILY=1008)
    assert done.stdout == "1048576 1048576 True\n"


@pytest.mark.parametrize(("variables", "least", "most"), [({}, 60, 99), ({"METAL_TEST_NO_ADOPT": 1}, 0, 0)])
def test_weights_stay_where_they_are(run: Run, variables: dict[str, int], least: int, most: int) -> None:
    """Metal reads mapped weights without a copy, or copies them where it makes no such buffer. The tokens agree."""
    done = run("-c", ADOPTED.format(seed=randrange(1 << 30)), METAL_TEST_UNCHECKED=1, **PLAIN, **variables)
    assert least <= int(done.stdout) <= most


def test_what_is_adopted(run: Run, tmp_path: Path) -> None:
    """Mapped arrays, from any 16 bytes on, of at least a page; and no more than a buffer may have."""
    path = tmp_path / "bytes"
    path.write_bytes(randbytes(100_001))
    code = OPEN + ADOPT.format(path=str(path))
    answers = run("-c", code, METAL_TEST_MAX_BUFFER=100_000, METAL_TEST_FAMILY=1008).stdout.split()
    assert answers == ["False" if wrong else "True" for wrong in (0, 0, 1, 1, 1, 1)]


def test_a_source_that_does_not_compile(run: Run) -> None:
    code = OPEN + (
        "from bitnet.core.gpu import KernelSpec; from bitnet.metal.compiler import Kernel\n"
        "k = KernelSpec('row_sums', 'row_sums', (('WG', 64), ('COLS', 'no_number')))\n"
        "try: d._driver._pipelines.prepare([Kernel(k, 64, False)])\n"
        "finally: d.close()"
    )
    error = run("-c", code, status=1).stderr
    assert "KernelCompileError: metal:0: row_sums.metal does not compile." in error
    assert "no_number" in error


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("o.release(b.alloc(64).handle); b._queue = None", "never released: 1 MTLCommandQueue"),
        ("x = b.alloc(64); b.free(x); o.send(x.handle, 'release')", "release was sent to a MTLBuffer that is gone"),
        ("b.alloc(64)", "never released: 1 MTLBuffer"),
        ("f, s = o._messages['commit']; f(None, s)", "commit was sent to nil"),
        ("o.string('x')", "autoreleased without a pool"),
        ("o.send(b._queue, 'contents')", "a MTLCommandQueue knows no contents"),
    ],
)
def test_the_library_finds_what_is_done_wrong(run: Run, code: str, found: str) -> None:
    """Faults put in on purpose: without them the same run is clean."""
    start = OPEN + "b = d._driver; o = b._objc; "
    assert run("-c", f"{start}d.close()", METAL_TEST_FAMILY=1008).stderr == ""
    assert found in run("-c", f"{start}{code}; d.close()", status=3, METAL_TEST_FAMILY=1008).stderr


def test_devices_and_receipts_say_what_it_is(run: Run, tmp_path: Path) -> None:
    def bitnet(*arguments: str, status: int | None = 0) -> subprocess.CompletedProcess[str]:
        return run("-c", COMMAND.format(arguments=list(arguments)), status=status, **PLAIN)

    listed = json.loads(bitnet("devices", "--json").stdout)
    (backend,) = [b for b in listed["backends"] if b["name"] == "metal"]
    (device,) = backend["devices"]
    assert device["type"] == "virtual"
    assert "test driver" in device["details"]["note"]
    assert not listed["selected"].startswith("metal")
    receipt = str(tmp_path / "receipt.json")
    bitnet("run", "--device", "metal:0", "--receipt", receipt, "What is 17 + 25?")
    assert "head_score_metal" in Path(receipt).read_text()  # as nobody reads the logits
    done = bitnet("receipt", "verify", receipt, status=None)
    assert done.returncode != 0
    assert "it was made with a test driver" in done.stdout + done.stderr
