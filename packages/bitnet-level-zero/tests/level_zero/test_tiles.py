"""Products of many rows through the loader, by each kernel that a device may get: exact integers.

Intel's OpenCL for CPUs has no XMX. In its place stands what the extension says that it computes
(cl_intel_subgroup_matrix_multiply_accumulate: which work-item holds which elements), compiled into the kernel.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from random import randrange
from types import ModuleType
from typing import TypeAlias

import pytest

from bitnet.level_zero.specialise import MODULES
from bitnet.level_zero.variants import FAMILIES, module_name

Run: TypeAlias = Callable[..., subprocess.CompletedProcess[str]]

FAMILY = ("kernels/opencl", "packages/bitnet-core/src/bitnet/core/gpu", "packages/bitnet-level-zero")
BUILT_IN = "#define intel_sub_group_i8_i8_matrix_mad_k32"
# Element [m, k] of A: component m of work-item k / (32 / sub-group size), whose bytes are neighbours of K.
# Element [k, n] of B: byte k % 4 of component k / 4 of work-item n. Element [m, n] of the result: component m of
# work-item n.
EMULATION = """
inline int matrix_word(int a, int8 b, int sum, int bytes) {
    int words[8];
    vstore8(b, 0, words);
#pragma clang loop unroll(disable)
    for (int k = 0; k < 32; k++) {
        int x = (char)(sub_group_broadcast(a, k / bytes) >> (8 * (k % bytes)));
        int w = (char)(words[k / 4] >> (8 * (k % 4)));
        sum += x * w;
    }
    return sum;
}
#define MATRIX(TYPE, BYTES) \\
    OF_HEADER inline int8 intel_sub_group_i8_i8_matrix_mad_k32(TYPE a, int8 b, int8 c) { \\
        return (int8)(matrix_word(a.s0, b, c.s0, BYTES), matrix_word(a.s1, b, c.s1, BYTES), \\
                      matrix_word(a.s2, b, c.s2, BYTES), matrix_word(a.s3, b, c.s3, BYTES), \\
                      matrix_word(a.s4, b, c.s4, BYTES), matrix_word(a.s5, b, c.s5, BYTES), \\
                      matrix_word(a.s6, b, c.s6, BYTES), matrix_word(a.s7, b, c.s7, BYTES)); \\
    }
MATRIX(int8, 4)
MATRIX(short8, 2)
"""

# Rows enough for tiles, of shapes that fill none of them; which kernels ran.
TILED = """
from pathlib import Path
import numpy as np
from bitnet.core.arrays import TernaryMatrix
from bitnet.core.hal import OpenOptions
from bitnet.level_zero.backend import BACKEND
from bitnet.level_zero import specialise
from bitnet.level_zero.device import LevelZeroDriver
specialise.MODULES = Path({modules!r})
seen = set()
record = LevelZeroDriver.record
def recorded(self, launches):
    for one in launches:
        has = dict(one.kernel.defines)
        seen.add(f"{{one.kernel.entry}} {{has.get('XMX')}} {{has.get('SG')}}")
    return record(self, launches)
LevelZeroDriver.record = recorded
seed = {seed}
rng = np.random.default_rng(seed)
info, *_ = BACKEND.probe().devices
device = BACKEND.open(info, OpenOptions())
seen.clear()
wrong = 0
for n, k in ((200, 768), (96, 4 * int(rng.integers(40, 300)))):
    codes = rng.integers(-1, 2, (n, k), np.int8)
    with TernaryMatrix(codes, device=device, rows=77) as matrix:
        for m in (77, int(rng.integers(9, 77))):
            x = rng.integers(-127, 128, (m, k)).astype(np.float32)
            x[:, 0] = 127  # so that quantising keeps every number as it is
            wrong += int(np.count_nonzero(np.rint(matrix(x)) != x @ codes.T.astype(np.float32)))
print(wrong, sorted(name for name in seen if "gemm" in name))
device.close()
"""


@pytest.fixture
def emulated(hook: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int], Path]:
    """``emulated(width)``: the wheel's modules, those for XMX of that width with its emulation in its place."""

    def make(width: int) -> Path:
        lines = [line for line in hook.PRELUDE.splitlines() if not line.startswith(BUILT_IN)]
        assert len(lines) == len(hook.PRELUDE.splitlines()) - 1
        monkeypatch.setattr(hook, "PRELUDE", "\n".join(lines) + EMULATION)
        made = tmp_path / "modules"
        shutil.copytree(Path(str(MODULES)), made)
        index = json.loads((made / "index.json").read_text(encoding="utf-8"))
        for file, more in (("intel/sub_groups", {}), ("intel/ternary_gemm_sg", {"ADD": 0})):
            choices = {"XMX": 1, "SG": width, **more}
            name = module_name(file, choices, dot=True)
            words, index[name] = hook.compile_one(file, FAMILIES[file].shapes, choices, True, optimised=True)
            (made / f"{name}.spv").write_bytes(words)
        (made / "index.json").write_text(json.dumps(index), encoding="utf-8")
        return made

    return make


def check(on_driver: Run, kernel: str, modules: Path, variables: dict[str, str]) -> None:
    """No product is wrong, and that kernel, XMX or not, of that width, made them."""
    seed = randrange(1 << 30)
    done = on_driver("-c", TILED.format(seed=seed, modules=str(modules)), **variables)
    assert (done.returncode, done.stderr) == (0, ""), (seed, done.stderr)
    assert done.stdout.strip() == f"0 [{kernel!r}]", seed


@pytest.mark.nightly(unless_changed=FAMILY)
@pytest.mark.parametrize("width", [8, 16])
def test_xmx(on_driver: Run, emulated: Callable[[int], Path], width: int) -> None:
    """What the driver is given is refused as it is, so that the emulation is what runs."""
    wide = {"BITNET_TEST_DRIVER_WIDE": "1"} if width == 16 else {}
    check(on_driver, f"ternary_gemm_sg 1 {width}", emulated(width), {**wide, "BITNET_TEST_DRIVER_NO_XMX": "1"})


@pytest.mark.parametrize(
    ("kernel", "variables"),
    [
        pytest.param("ternary_gemm_sg 0 8", {}, marks=pytest.mark.nightly(unless_changed=FAMILY)),
        ("ternary_gemm_sg 0 8", {"BITNET_TEST_DRIVER_NO_DOT": "1"}),
        ("ternary_gemm None None", {"BITNET_TEST_DRIVER_WIDE": "1"}),
    ],
)
def test_without_xmx(on_driver: Run, kernel: str, variables: dict[str, str]) -> None:
    """By dot products, by bytes, and by the kernel of all devices."""
    check(on_driver, kernel, Path(str(MODULES)), variables)
