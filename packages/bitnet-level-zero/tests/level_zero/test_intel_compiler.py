"""Intel's own driver takes every module of the wheel. It needs no GPU for that: debug keys take the place of one."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bitnet.core.gpu import KernelSpec
from bitnet.core.gpu.clc.abilities import Matrix
from bitnet.core.support.dynlib import open_library
from bitnet.level_zero.loader import DRIVER
from bitnet.level_zero.variants import FAMILIES, all_modules

TOOLS = Path(__file__).parents[4] / "tools"
TARGETS = [
    ("skl", "ocloc"),
    ("tgllp", "ocloc"),
    ("dg2-g10", "ocloc"),
    ("dg2-g10", "newer"),
    ("mtl-h", "newer"),
    ("bmg-g21", "newer"),
    ("lnl-m", "newer"),
]
"""Products, and which compiler is asked: this Debian's, or a newer one, that knows XMX in SPIR-V and later products."""
FAMILY = ("kernels/opencl", "packages/bitnet-core/src/bitnet/core/gpu/clc", "packages/bitnet-level-zero")
SCRIPT = str(Path(__file__).with_name("intel_modules.py"))
DOT_PRODUCTS = {"skl": False, "tgllp": True}
"""Products of Gen9 and Gen12, and whether they have the integer dot product."""
# A kernel `k` that calls a function which nobody defines.
UNRESOLVED = "int nowhere(int); kernel void k(global int *o) { o[0] = nowhere(o[1]); }"


def _loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


counting = _loaded(TOOLS / "count_intel.py")
modules = _loaded(Path(SCRIPT))


@pytest.fixture
def asking(require_device: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``asking(compiler)`` has the counts made by that compiler."""

    def use(compiler: str) -> None:
        if compiler == "ocloc":
            absent = None if shutil.which("ocloc") else "ocloc is not there (apt: intel-opencl-icd)."
            require_device("level-zero-compiler", absent)
        else:
            named = os.environ.get("BITNET_OCLOC")
            absent = None if named else "BITNET_OCLOC names no newer ocloc (python3 tools/intel_compiler.py FOLDER)."
            require_device("level-zero-newer-compiler", absent)
            compiler = named or ""
        monkeypatch.setattr(counting, "OCLOC", compiler)

    return use


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


@pytest.mark.parametrize("product", [pytest.param("skl", marks=pytest.mark.nightly), "tgllp"])
def test_every_module_is_built(on_product: Any, product: str) -> None:
    done = on_product(product)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    found.pop("name")
    if not DOT_PRODUCTS[product]:  # the device is found not to take these, and is given the others
        found = {kernel: made for kernel, made in found.items() if " dot" not in kernel}
    count = sum((DOT_PRODUCTS[product] or not dot) and not choices.get("XMX") for *_, choices, dot in all_modules())
    assert len(found) >= count
    assert {kernel: made for kernel, made in found.items() if isinstance(made, str)} == {}
    assert {kernel: made for kernel, made in found.items() if made and "ternary_gemm" not in kernel} == {}


def test_every_module_has_shapes() -> None:
    assert {spec.file for width in (8, 16) for _, spec, _ in modules.specs(width, xmx=True)} == {*FAMILIES}


@pytest.mark.parametrize(("product", "compiler"), TARGETS)
@pytest.mark.nightly(unless_changed=FAMILY)
def test_decode_kernels_keep_their_registers(asking: Any, product: str, compiler: str) -> None:
    """No spill, no array in memory, and no unresolved function, for models' shapes; prefill multiplies mostly."""
    asking(compiler)
    specs = dict(counting.specs(product)).items()
    made = {name: counting.count(spec, product) for name, spec in specs if compiler == "newer" or "XMX" not in name}
    assert {"qkv", "gates and ups", "down", "attention_decode", "head", "groups of 32"} <= set(made)
    assert {name: count.spilled for name, count in made.items() if count.spilled} == {}
    if "prefill" in made and product not in counting.NO_DOT:
        assert made["prefill"].busy > 0.8 * made["prefill"].cycles


@pytest.mark.parametrize("tokens", [2, 4, 8])
@pytest.mark.parametrize(("product", "compiler"), TARGETS)
@pytest.mark.nightly(unless_changed=FAMILY)
def test_decode_kernels_of_several_tokens_keep_their_registers(
    asking: Any, product: str, compiler: str, tokens: int
) -> None:
    asking(compiler)
    made = {name: counting.count(spec, product).spilled for name, spec in counting.of_several(product, tokens)}
    assert set(made.values()) == {0}, made


@pytest.mark.parametrize(("product", "compiler"), TARGETS)
@pytest.mark.nightly(unless_changed=FAMILY)
def test_groups_of_columns_keep_their_registers_for_eight_tokens(asking: Any, product: str, compiler: str) -> None:
    """A work-item multiplies as many tokens at once as its registers hold the sums of."""
    asking(compiler)
    made = {group: counting.count(counting.grouped(4096, 4096, group, 8), product) for group in (32, 64, 128)}
    assert {group: count.spilled for group, count in made.items() if count.spilled} == {}


@pytest.mark.parametrize(("product", "compiler"), [one for one in TARGETS if one[0] not in DOT_PRODUCTS])
@pytest.mark.nightly(unless_changed=FAMILY)
def test_every_module_is_compiled(asking: Any, product: str, compiler: str) -> None:
    """Each with all of its kernels and no unresolved function; of the other products the driver itself is asked."""
    asking(compiler)
    xmx = compiler == "newer" and product in counting.XMX
    specs = modules.specs(16 if product in counting.WIDE else 8, xmx)
    assert {spec.file for _, spec, _ in specs} >= {*FAMILIES} - {file for file in FAMILIES if "/" in file}
    assert xmx == any("XMX=1" in label for label, _, _ in specs)
    spilled = {}
    for label, spec, dot in specs:
        for entry in modules.entries(spec.file):
            count = counting.count(KernelSpec(spec.file, entry, spec.defines), product, dot=dot)
            if count.spilled and "ternary_gemm" not in label:
                spilled[f"{label}: {entry}"] = count.spilled
    assert spilled == {}


@pytest.mark.parametrize(("product", "matrix"), [("skl", "intel"), ("tgllp", "intel"), ("dg2-g10", "xmx8")])
@pytest.mark.nightly(unless_changed=FAMILY)
def test_sources_for_sub_groups_are_compiled(asking: Any, product: str, matrix: Matrix) -> None:
    """From OpenCL C, as OpenCL's driver is given it; this Debian's compiler takes XMX in that language alone."""
    asking("ocloc")
    seen = set()
    for label, spec, dot in modules.specs(8, matrix != "intel"):
        xmx = dict(spec.defines).get("XMX")
        if xmx != int(matrix != "intel") or dot:
            continue
        for entry in modules.entries(spec.file):
            count = counting.count_source(KernelSpec(spec.file, entry, spec.defines), product, matrix)
            assert not count.spilled or "ternary_gemm" in label, label
            assert count.products or matrix == "intel" or entry == "activation_tiles", label
            seen.add(entry)
    assert seen >= {"sub_groups", "activation_tiles", "ternary_gemm_sg"}
    assert ("attention_prefill_xmx" in seen) == (matrix != "intel")


@pytest.mark.parametrize("compiler", ["ocloc", pytest.param("newer", marks=pytest.mark.nightly(unless_changed=FAMILY))])
def test_ocloc_that_leaves_a_function_open_is_refused(
    asking: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiler: str
) -> None:
    asking(compiler)
    made = unresolved(tmp_path)
    monkeypatch.setattr(counting, "module", lambda spec, **_: made.read_bytes())
    with pytest.raises(counting.Refused, match="calls a function"):
        counting.count(KernelSpec("unresolved", "k"), "tgllp")


def test_spills_are_counted(asking: Any) -> None:
    """The product of many tokens for all devices, which has more sums than Gen12 has registers."""
    asking("ocloc")
    shapes = {"ADD": 0, "COLS": 2560, "ROW_BYTES": 640, "TX": 16, "TY": 16, "EACH_M": 4}
    spec = KernelSpec("ternary_gemm", "ternary_gemm", tuple(shapes.items()))
    assert counting.count(spec, "tgllp").spilled > 0


def unresolved(folder: Path) -> Path:
    """A module whose kernel calls a function that is nowhere."""
    source, made = folder / "unresolved.cl", folder / "unresolved.spv"
    source.write_text(UNRESOLVED)
    options = ["-x", "cl", "-cl-std=CL3.0", "-cl-no-stdinc", "-target", "spirv64v1.2", "-O0", "-c"]
    command = [sys.executable, "-m", "ziglang", "clang", *options, str(source), "-o", str(made)]
    subprocess.run(command, check=True, capture_output=True)
    return made


def test_an_unresolved_function_is_noticed(on_product: Any, tmp_path: Path) -> None:
    """The driver builds such a module all the same; its kernels it does not make."""
    made = unresolved(tmp_path)
    done = on_product("tgllp", str(made))
    assert done.returncode == 1
    assert "zeKernelCreate failed with ZE_RESULT_ERROR_INVALID_MODULE_UNLINKED" in done.stderr
