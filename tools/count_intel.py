"""Count instructions, dot products and spilled registers in the output of Intel's compiler for BitNet b1.58 2B4T.

It needs no GPU: ``ocloc`` compiles the wheel's SPIR-V for any product that it knows, and writes its assembly. Debian
has it in ``intel-opencl-icd`` (12) or ``intel-ocloc`` (newer); ``BITNET_OCLOC`` names another, such as one that
``tools/intel_compiler.py`` fetches. Decision 0084 goes by these figures.

    uv run --group dev tools/count_intel.py tgllp dg2-g10
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitnet.core.gpu import KernelSpec
from bitnet.core.gpu.clc import Abilities, sources
from bitnet.core.gpu.clc.abilities import Dot4, Matrix
from bitnet.core.gpu.clc.intel_products import FILE, IntelProducts, by_sub_groups
from bitnet.core.gpu.ops.scaled import group_shape
from bitnet.core.gpu.weights import TernaryBuffer
from bitnet.level_zero.specialise import module
from running import run_tool

ATTENTION = "intel/attention_prefill_xmx"
OCLOC = os.environ.get("BITNET_OCLOC", "ocloc")
COLUMNS = (
    "| product | kernel | SIMD | registers | instructions | loads, stores | products "
    "| vector cycles of its loop | cycles of its products | spilled, bytes |"
)
LANES = {"bmg": 16, "lnl": 16, "ptl": 16, "pvc": 16}
"""32-bit lanes of a vector engine in a cycle; 8 of others."""
XMX: Mapping[str, Matrix] = {"dg2-g10": "xmx8", "bmg-g21": "xmx16", "lnl-m": "xmx16", "ptl-h": "xmx16", "pvc": "xmx16"}
WIDE = ("bmg-g21", "lnl-m", "ptl-h", "pvc")
"""Products whose least sub-group has 16 work-items."""
DPAS_CYCLES = 16
"""Cycles of one XMX for 8 tokens by as many rows as it takes at once, over 32 columns: 8 * 8 * 32 products at 128 a
cycle, or 8 * 16 * 32 at 256."""
NO_DOT = ("skl",)
"""Products without the integer dot product."""
UNITS = {"skl": 24, "tgllp": 96, "dg2-g10": 512, "mtl-h": 128, "bmg-g21": 160, "lnl-m": 64, "ptl-h": 96, "pvc": 1024}
"""Vector engines of the largest device of a product."""
INSTRUCTION = re.compile(r"^\s*(?:\([^)]*\)\s+)*([a-z]\w*)(?:\.[\w.]+)*\s+\((\d+)\|M\d+\)", re.MULTILINE)
CALLS = ("call", "calla")
"""Instructions that call a function. A module's own are inlined; of one that is nowhere ocloc says nothing."""
LABEL = re.compile(r"^(\w+):\s*$")
BRANCH = re.compile(r"\b(?:jmpi|while|goto)\b.*?((?:_0_|L)\d+)")


class Refused(Exception):  # it is an answer
    """The compiler does not take a module."""


@dataclass(frozen=True, slots=True)
class Count:
    """What the compiler made of a kernel.

    Attributes:
        cycles: Cycles of a vector engine for one turn of the loop with most of the products, if each instruction took
            but its lanes; all of the kernel's where it has no loop with products. XMX runs beside it.
        busy: Cycles of that loop's dot products, which are among those, or of XMX.
        spilled: Bytes of a thread's registers, and of arrays, that are in memory.
    """

    simd: int
    registers: int
    instructions: int
    memory: int
    products: int
    cycles: int
    busy: int
    spilled: int


def specs(product: str) -> Iterator[tuple[str, KernelSpec]]:
    """Name and specification of each kernel that a step of the model launches most, as the lowering makes them.

    Besides them, products of a model of Qwen3 8B's width with a scale for each group of columns.
    """
    lanes = {
        "qkv": (3840, 2560, 1),
        "gates and ups": (6912, 2560, 2),
        "down": (2560, 6912, 1),
        "output": (2560, 2560, 1),
    }
    for name, (rows, cols, times) in lanes.items():
        defines = {"WG": 256, "COLS": cols, "ROW_BYTES": cols // 4, "TOKENS": 1, "INPUT": 2, "GLU": times - 1}
        more = {
            "RELU2": times - 1,
            "ADD": int(name in ("down", "output")),
            "LANES": lanes_of(product, rows, cols, times),
        }
        yield name, KernelSpec("ternary_decode", "ternary_decode", tuple((defines | more).items()))
    cache = {"WG": 128, "DIM": 128, "BLOCK": 32, "HEAD_GROUP": 4, "WINDOW": 0, "KV_F16": 1, "ROPE": 1, "NEOX": 1}
    for entry in ("attention_decode", "attention_merge"):
        yield entry, KernelSpec("attention_decode", entry, tuple(cache.items()))
    for group in (32, 128):
        yield f"groups of {group}", grouped(4096, 4096, group)
        for name, (rows, cols, times) in lanes.items():
            yield f"{name}, groups of {group}", fused(product, rows, cols, times, group)
    head = {"WG": 256, "LANES": 32, "EACH": 4, "TOKENS": 1, "WEIGHT_F16": 1}
    yield "head", KernelSpec("dense_matmul", "dense_matmul", tuple(head.items()))
    for matrix in dict.fromkeys((XMX.get(product, "intel"), "intel")):
        if matrix != "intel" or product not in WIDE:
            tiles = by_sub_groups(matrix) | {"COLS": 2560, "ROW_BYTES": 640, "ADD": 1}
            label = "prefill" if matrix == "intel" else "prefill by XMX"
            yield label, KernelSpec(FILE, "ternary_gemm_sg", tuple(tiles.items()))
    if product in XMX:
        tiles = by_sub_groups(XMX[product]) | {"DIM": 128, "BLOCK": 32, "KV_F16": 1, "HEAD_GROUP": 4}
        yield "attention_prefill by XMX", KernelSpec(ATTENTION, "attention_prefill_xmx", tuple(tiles.items()))


def grouped(rows: int, cols: int, group: int, tokens: int = 1) -> KernelSpec:
    """The product of few tokens and weights with a scale for each group of columns, as the lowering has it."""
    nowhere: Any = None
    shape = group_shape(TernaryBuffer(nowhere, nowhere, rows, cols, cols // 4, group), tokens)
    defines = shape | {"INPUT": 0, "GLU": 0, "RELU2": 0, "ADD": 0}
    return KernelSpec("ternary_groups", "ternary_groups", tuple(defines.items()))


def fused(product: str, rows: int, cols: int, times: int, group: int) -> KernelSpec:
    """The same of one token that is normed and quantised, with ``times`` rows of W for each result."""
    nowhere: Any = None
    matrix = TernaryBuffer(nowhere, nowhere, rows * times, cols, cols // 4, group)
    shape = products_of(product)._fused_groups(matrix, times)
    if shape is None:
        raise SystemExit(f"{product}: a product of {rows} x {cols} does not quantise its input")
    defines = shape | {"INPUT": 2, "GLU": times - 1, "RELU2": 0, "ADD": 0}
    return KernelSpec("ternary_groups", "ternary_groups", tuple(defines.items()))


def of_several(product: str, tokens: int) -> Iterator[tuple[str, KernelSpec]]:
    """Products and head of a decode step of several tokens; separate launches quantise their rows."""
    for rows, cols in ((3840, 2560), (13824, 2560), (2560, 6912)):
        defines = {"WG": 256, "COLS": cols, "ROW_BYTES": cols // 4, "TOKENS": tokens, "INPUT": 0, "GLU": 0, "RELU2": 0}
        more = {"ADD": int(cols == 6912), "LANES": lanes_of(product, rows, cols, 1)}
        yield f"{rows} x {cols}", KernelSpec("ternary_decode", "ternary_decode", tuple((defines | more).items()))
    head = {"WG": 256, "LANES": 32, "EACH": 1, "TOKENS": tokens, "WEIGHT_F16": 1}
    yield "head", KernelSpec("dense_matmul", "dense_matmul", tuple(head.items()))


def lanes_of(product: str, rows: int, cols: int, times: int) -> int:
    """Work-items that share a row, as the lowering chooses them."""
    nowhere: Any = None  # its memory is not asked for
    matrix = TernaryBuffer(nowhere, nowhere, rows * times, cols, cols // 4)
    return products_of(product)._lanes(matrix, times)


def products_of(product: str) -> IntelProducts:
    """The lowering of a product's matrix products."""
    dot4: Dot4 = "none" if product in NO_DOT else "khr"
    return IntelProducts(Abilities(UNITS[product], 1024, 65536, matrix="intel", dot4=dot4))


def assembly(spec: KernelSpec, product: str, program: bytes, *options: str) -> tuple[str, str]:
    """What the compiler made of a kernel of a program: the name of its file and its text.

    Raises:
        Refused: It does not take the program, or leaves a function unresolved, of which its exit status says nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, dump = Path(folder) / "kernel", Path(folder) / "dump"
        source.write_bytes(program)
        about = ["-file", str(source), "-device", product, "-out_dir", folder]
        command = [*OCLOC.split(), "compile", *about, *options]
        wanted = {**os.environ, "IGC_ShaderDumpEnable": "1", "IGC_DumpToCustomDir": str(dump)}
        done = subprocess.run(command, env=wanted, capture_output=True, text=True, check=False, cwd=folder)
        if done.returncode:
            raise Refused(f"{product} {spec.file}: {done.stdout}{done.stderr}")
        tries = sorted(dump.glob("*_entry_*.asm"), key=lambda path: path.stat().st_mtime_ns)
        texts = [(path.name, text) for path in tries if f"//.kernel {spec.entry}\n" in (text := path.read_text())]
        if not texts:
            raise Refused(f"{product} {spec.file}: there is no {spec.entry} in what ocloc wrote")
        file, text = texts[-1]  # the last try is what it takes
        if any(name in CALLS for name, _ in INSTRUCTION.findall(text)):
            raise Refused(f"{product} {spec.file}: {spec.entry} calls a function, which the module may not have")
        return file, text


def count(spec: KernelSpec, product: str, *, dot: bool | None = None) -> Count:
    """The figures of a kernel for a product, of its module with the integer dot product where that has one."""
    words = module(spec, dot=product not in NO_DOT if dot is None else dot, device=product)
    return figures(product, *assembly(spec, product, words, "-spirv_input"))


def count_source(spec: KernelSpec, product: str, matrix: Matrix) -> Count:
    """The figures of a kernel in OpenCL C, as an OpenCL driver without the integer dot product compiles it."""
    has = Abilities(UNITS[product], 1024, 65536, subgroups=True, f16=True, matrix=matrix)
    defines = [f"-D{name}={value}" for name, value in spec.defines]
    if matrix != "intel":  # ocloc does not say so, which a driver does of a device that has it
        defines.append("-Dcl_intel_subgroup_matrix_multiply_accumulate")
    options = " ".join([*has.options("3.0"), *defines])
    text = sources("bitnet.level_zero", "level-zero", vendors=("intel",)).text(spec.file)
    return figures(product, *assembly(spec, product, text.encode(), "-options", options))


def figures(product: str, file: str, text: str) -> Count:
    """The figures of a kernel's assembly."""
    lanes = LANES.get(product.split("-", maxsplit=1)[0], 8)
    all_of = INSTRUCTION.findall(text)
    loop = INSTRUCTION.findall(_loop(text))

    def number(pattern: str) -> int:
        found = re.search(pattern, text, re.MULTILINE)
        return int(found[1]) if found else 0

    def memory(name: str) -> bool:
        return name.startswith(("send", "load", "store"))

    def multiplies(name: str) -> bool:
        return name in ("dp4a", "dpas")

    alu = sum(-(-int(width) // lanes) for name, width in loop if name != "dpas" and not memory(name) and name != "sync")
    dpas = DPAS_CYCLES * sum(name == "dpas" for name, _ in loop)
    dots = sum(-(-int(width) // lanes) for name, width in loop if name == "dp4a")
    return Count(
        simd=int(re.search(r"simd(\d+)", file)[1]),  # type: ignore[index]  # every file's name has it
        registers=number(r"numGRF=(\d+)"),
        instructions=len(all_of),
        memory=sum(memory(name) for name, _ in all_of),
        products=sum(multiplies(name) for name, _ in all_of),
        cycles=alu,
        busy=dpas or dots,
        spilled=number(r"^//\.spill size (\d+)") + number(r"^//\.private memory size (\d+)"),
    )


def _loop(text: str) -> str:
    """The shortest loop that has most of the products; all of the text where they are in none."""
    lines, places = text.splitlines(), {}
    best: tuple[int, int, str] = (1, 0, text)
    for at, line in enumerate(lines):
        if found := LABEL.match(line):
            places[found[1]] = at
        elif (found := BRANCH.search(line)) and found[1] in places:
            inner = "\n".join(lines[places[found[1]] : at + 1])
            best = max(best, (len(re.findall(r"\b(?:dp4a|dpas)", inner)), -len(inner), inner))
    return best[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("products", nargs="*", default=["tgllp", "dg2-g10"], help=f"of {', '.join(UNITS)}")
    products = parser.parse_args().products
    if unknown := [name for name in products if name not in UNITS]:
        parser.error(f"{unknown[0]} is none of {', '.join(UNITS)}")
    print(COLUMNS, "|" + " --- |" * COLUMNS.count(" |"), sep="\n")
    for product in products:
        for name, spec in specs(product):
            try:
                c = count(spec, product)
            except Refused:
                print(f"| {product} | {name} | refused |" + " |" * 7)
                continue
            figures = (c.simd, c.registers, c.instructions, c.memory, c.products, c.cycles, c.busy, c.spilled)
            print(f"| {product} | {name} |", *(f"{figure} |" for figure in figures))


if __name__ == "__main__":
    run_tool(main)
