"""Has Intel's own driver build every module of the wheel for one product without that GPU; prints what it made of them.

Run with the driver's debug keys that take the place of hardware: it compiles, and computes nothing.
"""

from __future__ import annotations

import json
import sys
from ctypes import byref
from typing import Any

from bitnet.core.errors import DeviceError
from bitnet.core.gpu import KernelSpec
from bitnet.level_zero.compiler import SPIRV, Compiler
from bitnet.level_zero.hardware import devices
from bitnet.level_zero.loader import LevelZero, loader
from bitnet.level_zero.specialise import module
from bitnet.level_zero.structures import ContextDesc, KernelDesc, KernelProperties
from bitnet.level_zero.variants import FAMILIES, dots

ENTRIES = {
    "attention_decode": ("attention_decode", "attention_merge"),
    "intel/ternary_gemm_sg": ("activation_tiles", "ternary_gemm_sg"),
    "expert_matmul": ("expert_matmul", "expert_sums"),
    "quantize": ("absmean_partial", "absmean_scale", "ternary_codes"),
    "route": ("route_logits", "route_top"),
}
SHAPES = {
    "WG": 256,
    "DIM": 128,
    "BLOCK": 32,
    "HEAD_GROUP": 4,
    "COLS": 2560,
    "ROW_BYTES": 640,
    "TOKENS": 1,
    "LANES": 8,
    "EACH": 4,
    "GROUP": 32,
    "HELD": 2,
    "EACH_M": 4,
    "TX": 16,
    "TY": 16,
    "PAIRS": 64,
    "TAPS": 4,
    "D_K": 128,
    "D_V": 128,
    "HEADS": 48,
    "K_HEADS": 16,
    "TILED": 1,
    "COLUMNS": 32,
    "PARTS": 8,
    "HEAD": 128,
    "SILU": 1,
    "UNTILE": 0,
    "ROWS": 0,
    "SIGNS": 1,
    "WINDOW": 0,
    "EXPERTS": 256,
    "BITS": 7,
    "PASSES": 1,
}
"""Of BitNet b1.58 2B4T's layers; of those with scales of groups, the narrowest groups there are; of Bonsai 27B's hybrid
layers."""


def specs(sub_group: int = 8, xmx: bool = False) -> list[tuple[str, KernelSpec, bool]]:
    """The wheel's modules for a device: the name, a kernel's specification, and whether with the integer dot product.

    Args:
        sub_group: Least work-items of its sub-groups.
        xmx: Whether its compiler takes XMX; that of Debian 12 does not.
    """
    made = []
    for file, family in FAMILIES.items():
        for choices in family.choices:
            if choices.get("SG", sub_group) != sub_group or (choices.get("XMX") and not xmx):
                continue
            shapes = {name: SHAPES[name] for name in family.shapes}
            if choices.get("GLU"):
                shapes["LANES"] = 16  # as the lowering has it
            if file == "transform_quant":
                shapes["DIM"] = 4096
            if file == "attention_decode":
                shapes["WG"] = 128
            if file == "ternary_groups":
                quantises = choices["INPUT"] > 0
                shapes |= {"WG": 256 if quantises else 64, "LANES": 16, "HELD": choices["GLU"] + 1 if quantises else 2}
            for dot in dots(file, choices):
                fewer = file == "ternary_groups" and choices["GLU"] and not dot  # codes that a work-item may hold
                defines = tuple({**choices, **shapes, **({"LANES": 32} if fewer else {})}.items())
                label = " ".join([file, *(f"{name}={value}" for name, value in choices.items()), *["dot"] * dot])
                made.append((label, KernelSpec(file, file, defines), dot))
    return made


def entries(file: str) -> tuple[str, ...]:
    """The kernels of a source."""
    return ENTRIES.get(file, (file.rpartition("/")[2],))


def built(compiler: Compiler, level_zero: LevelZero, label: str, spec: KernelSpec, dot: bool) -> dict[str, Any]:
    """By kernel, what the driver made of it; an error's text for one that it does not take."""
    found: dict[str, Any] = {}
    try:
        made = compiler._create(spec.file, SPIRV, module(spec, dot=dot, device="level-zero:0"))
    except DeviceError as error:
        return {label: str(error)}
    for entry in entries(spec.file):
        try:
            kernel = level_zero.make("zeKernelCreate", made, byref(KernelDesc(name=entry.encode())))
            found[f"{label}: {entry}"] = level_zero.filled(
                "zeKernelGetProperties", kernel, KernelProperties
            ).spill_bytes
        except DeviceError as error:
            found[f"{label}: {entry}"] = str(error)
    return found


def main() -> None:
    level_zero = LevelZero(loader())
    hardware = next(devices(level_zero))
    context = level_zero.make("zeContextCreate", hardware.driver, byref(ContextDesc()))
    compiler = Compiler(level_zero, context, hardware, "level-zero:0", None)  # type: ignore[arg-type]  # nothing is kept
    if len(sys.argv) > 1:  # a module of somebody else's, with one kernel `k`
        with open(sys.argv[1], "rb") as file:  # noqa: PTH123
            made = compiler._create("given", SPIRV, file.read())
        level_zero.make("zeKernelCreate", made, byref(KernelDesc(name=b"k")))
        return
    found: dict[str, Any] = {"name": hardware.name}
    for label, spec, dot in specs():
        found |= built(compiler, level_zero, label, spec, dot)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
