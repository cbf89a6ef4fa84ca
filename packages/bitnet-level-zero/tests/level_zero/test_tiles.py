"""Steps of many tokens through the loader, by each kernel that a device may get: products are exact.

Intel's OpenCL for CPUs has no XMX. In its place stands what the extension says that it computes
(cl_intel_subgroup_matrix_multiply_accumulate: which work-item holds which elements), compiled into the kernel.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from random import randrange
from types import ModuleType
from typing import TypeAlias

import pytest

from bitnet.level_zero.specialise import MODULES
from bitnet.level_zero.variants import FAMILIES, all_modules

Run: TypeAlias = Callable[..., subprocess.CompletedProcess[str]]

FAMILY = ("kernels/opencl", "packages/bitnet-core/src/bitnet/core/gpu", "packages/bitnet-level-zero")
BUILT_IN = re.compile(r"#define intel_sub_group_\w+_matrix_mad_k\d+\(")
EMULATION = Path(__file__).parents[3] / "bitnet-opencl/tests/xmx.clh"

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


# A step of several sequences: ends of some in one tile, more positions than a work-group has at a time.
ATTENTION = """
from pathlib import Path
import numpy as np
from bitnet.core.hal import OpenOptions
from bitnet.core.testing.attention import Heads, Paged, Part
from bitnet.level_zero.backend import BACKEND
from bitnet.level_zero import specialise
from bitnet.level_zero.device import LevelZeroDriver
specialise.MODULES = Path({modules!r})
seen = set()
record = LevelZeroDriver.record
def recorded(self, launches):
    seen.update(launch.kernel.entry for launch in launches)
    return record(self, launches)
LevelZeroDriver.record = recorded
rng = np.random.default_rng({seed})
info, *_ = BACKEND.probe().devices
device = BACKEND.open(info, OpenOptions())
heads = Heads({heads})
past, new = rng.integers(60, 200, 2).tolist(), int(rng.integers(2, 40))
parts = [Part(0, 70), Part(past[0], 5), Part(3, 1), Part(past[1], new)]
most = max(part.past + part.new for part in parts)
paged = Paged(device, rng, heads, length=most, seqs=len(parts), chunk=sum(part.new for part in parts))
with paged.rig:
    paged.prefill(*(part.past for part in parts))
    paged.run(list(enumerate(parts)))
print(sorted(name for name in seen if "prefill" in name))
device.close()
"""


@pytest.fixture
def emulated(hook: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int], Path]:
    """``emulated(width)``: the wheel's modules, those for XMX of that width with its emulation in its place."""

    def make(width: int) -> Path:
        lines = [line for line in hook.PRELUDE.splitlines() if not BUILT_IN.match(line)]
        assert len(lines) == len(hook.PRELUDE.splitlines()) - 2
        monkeypatch.setattr(hook, "PRELUDE", "\n".join([*lines, EMULATION.read_text(encoding="utf-8")]))
        made = tmp_path / "modules"
        shutil.copytree(Path(str(MODULES)), made)
        index = json.loads((made / "index.json").read_text(encoding="utf-8"))
        for name, file, choices, dot in all_modules():
            if choices.get("XMX") and choices["SG"] == width:
                words, index[name] = hook.compile_one(file, FAMILIES[file].shapes, choices, dot, optimised=True)
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


@pytest.mark.nightly(unless_changed=FAMILY)
@pytest.mark.parametrize(
    ("width", "heads", "kernel"),
    [
        (8, "4, 1, 128, 16", "attention_prefill_xmx"),
        (16, "7, 1, 64, 48", "attention_prefill_xmx"),
        (16, "4, 2, 128, 24", "attention_prefill"),  # its blocks are no multiple of 16 positions
    ],
)
def test_attention_by_xmx(on_driver: Run, emulated: Callable[[int], Path], width: int, heads: str, kernel: str) -> None:
    """Within the bounds of the contract."""
    wide = {"BITNET_TEST_DRIVER_WIDE": "1"} if width == 16 else {}
    seed = randrange(1 << 30)
    code = ATTENTION.format(seed=seed, modules=str(emulated(width)), heads=heads)
    done = on_driver("-c", code, BITNET_TEST_DRIVER_NO_XMX="1", **wide)
    assert (done.returncode, done.stderr) == (0, ""), (seed, done.stderr)
    assert done.stdout.strip() == f"[{kernel!r}]", seed


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
