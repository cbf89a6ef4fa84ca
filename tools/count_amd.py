"""Count the cost of AMD machine code for a model's steps (instructions, registers, local memory), and predict times.

    python tools/count_amd.py gfx942 gfx1100
    python tools/count_amd.py gfx942 --group 128

Compiles what a decode step of one token and a prefill of 512 launch for BitNet b1.58 2B4T, or for weights of its shape
with a scale for each group of columns, by ziglang's clang with the
options of ``bitnet.rocm.compiler``, and counts in its assembly. Nothing is run. Times are those of a card's data sheet;
docs/adr/0083 says how they are meant, and what they leave out.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np

from bitnet.core.gpu import KernelSpec, Launch
from bitnet.core.gpu.clc.amd import architecture
from bitnet.rocm.compiler import SOURCES, options

TESTS = Path(__file__).parents[1] / "packages" / "bitnet-rocm" / "tests" / "rocm" / "test_code_objects.py"
"""What compiles the same launches for the tests."""
CLANG = (sys.executable, "-m", "ziglang", "clang", "-x", "cl", "-target", "amdgcn-amd-amdhsa")
LOCAL_BYTES = 65536
PREFILL = 512
LOCAL = 128
"""Bytes of local memory that a compute unit moves in a cycle."""
LATENCY = 400
"""Cycles of a stage in which nothing hides a lone group's barrier and loads from local memory: an assumption."""
CLASSES = {
    "loads": r"global_load|flat_load|s_load|s_buffer_load",
    "wide": r"global_load_(dwordx4|b128)",
    "local": r"ds_(read|load|write|store)",
    "dots": r"v_dot4",
    "matrix": r"v_(mfma|wmma|swmmac)",
    "waits": r"s_wait",
    "valu": r"v_(?!mfma|wmma|swmmac)",
}
RESOURCES = "registers", "local", "waves"
PER_BLOCK = "loads", "dots", "local", "waits", "valu"


@dataclass(frozen=True)
class Card:
    """A card by its data sheet.

    Attributes:
        clock: Cycles a second, at most.
        bandwidth: Bytes a second of its memory.
        issue: Instructions of vectors that a compute unit starts in a cycle: one of 64 lanes, or two of 32.
        products: Cycles of one matrix instruction, and units of a compute unit that do one each.
    """

    name: str
    units: int
    clock: float
    bandwidth: float
    issue: int
    products: tuple[int, int]


CARDS = {
    "gfx942": Card("Instinct MI300X", 304, 2.1e9, 5.3e12, 1, (16, 4)),
    "gfx1100": Card("Radeon RX 7900 XTX", 96, 2.5e9, 0.96e12, 2, (32, 2)),
}


@dataclass(frozen=True)
class Counted:
    """A kernel's assembly: instructions of each class in all of it and in its loop of matrix products; its registers.

    Attributes:
        occupancy: Waves that a SIMD can hold.
    """

    all: Counter[str]
    loop: Counter[str]
    registers: int
    local_bytes: int
    occupancy: int


def products(card: str, tokens: int, group: int | None = None) -> list[tuple[Launch, int, int]]:
    """The ternary products of a step, each with its rows and columns."""
    steps = ((tokens, int(tokens == 1)),)
    spec = spec_from_file_location(TESTS.stem, TESTS)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules.setdefault(TESTS.stem, module_from_spec(spec))
    spec.loader.exec_module(module)
    module.SHAPES["counted"] = module.SHAPES["2b4t"] | {"group": group}
    launches = module.launches(card, "counted", units=CARDS[card].units, steps=steps)
    named = [launch for launch, of in launches if of == tokens and launch.kernel.entry.startswith("ternary_")]
    # A step whose logits are adjusted compiles the kernels of one token once more.
    once = {(launch.kernel, int(launch.args[-1])): launch for launch in named}
    return [(launch, rows, int(dict(kernel.defines)["COLS"])) for (kernel, rows), launch in once.items()]


def counted(spec: KernelSpec, card: str, folder: Path) -> Counted:
    """Compile a kernel for an architecture, and count."""
    kind = architecture(card)
    assert kind is not None
    source, made = folder / "kernel.cl", folder / "kernel.s"
    source.write_text(SOURCES.text(spec.file), encoding="utf-8")
    abilities = kind.abilities(compute_units=CARDS[card].units, group=1024, local_bytes=LOCAL_BYTES)
    flags = (f"-mcpu={card}", *options(abilities), *(f"-D{name}={value}" for name, value in spec.defines))
    subprocess.run([*CLANG, *flags, "-S", source, "-o", made], check=True)
    text = made.read_text(encoding="utf-8")
    text = text[text.index(f"\n{spec.entry}:") :]
    body = text[: text.index("\n\t.section")]
    numbers = {key: int(value) for key, value in re.findall(r"^; (NumVgprs|LDSByteSize|Occupancy): (\d+)", text, re.M)}
    loops = [_classes(loop) for loop in _loops(body)]
    found = numbers["NumVgprs"], numbers["LDSByteSize"], numbers["Occupancy"]
    return Counted(_classes(body), max(loops, key=lambda loop: loop["matrix"], default=Counter()), *found)


def _classes(text: str) -> Counter[str]:
    instructions = re.findall(r"^\t([a-z]\w+)", text, re.M)
    return Counter({name: sum(bool(re.match(p, i)) for i in instructions) for name, p in CLASSES.items()})


def _loops(body: str) -> Iterator[str]:
    """The text between each label and the last branch back to it."""
    for label in re.finditer(r"^(\.L\w+):", body, re.M):
        back = list(re.finditer(rf"^\ts_c?branch\w* {re.escape(label[1])}$", body[label.end() :], re.M))
        if back:
            yield body[label.end() : label.end() + back[-1].end()]


def decode(card: str, folder: Path, group: int | None) -> None:
    """Each kernel of a decode step that reads weights: per 128 weights of a work-item, and time by its limits."""
    data = CARDS[card]
    print(f"\n{data.name}, {card}: a decode step")
    line("rows x columns", "groups x items", *RESOURCES, f"{', '.join(PER_BLOCK)} / 128", "reading, us", "issuing, us")
    for launch, rows, cols in products(card, 1, group):
        found = counted(launch.kernel, card, folder)
        items = int(np.prod(launch.grid)) * int(np.prod(launch.block))
        blocks = rows * cols / items / 128
        wave = 64 if data.issue == 1 else 32
        memory = rows * cols / 4 / data.bandwidth
        issue = items / wave * found.all["valu"] / (data.units * data.issue * data.clock)
        ratios = ", ".join(f"{found.all[name] / blocks:.1f}" for name in PER_BLOCK)
        size = f"{np.prod(launch.grid)} x {np.prod(launch.block)}"
        times = f"{memory * 1e6:.2f}", f"{issue * 1e6:.2f}"
        line(f"{rows} x {cols}", size, found.registers, found.local_bytes, found.occupancy, ratios, *times)


def prefill(card: str, folder: Path, group: int | None) -> None:
    """Each product of a prefill: cycles of a stage by its limits, groups by compute units, share of the int8 peak."""
    data = CARDS[card]
    print(f"\n{data.name}, {card}: a prefill of {PREFILL}")
    line("rows x columns", "tile", "groups", *RESOURCES, "matrix, valu, local cycles", "units busy", "share of peak")
    cycles, units = data.products
    for launch, rows, cols in products(card, PREFILL, group):
        found, tile = counted(launch.kernel, card, folder), {name: int(value) for name, value in launch.kernel.defines}
        waves = tile["WAVES_M"] * tile["WAVES_N"]
        wave, groups = int(np.prod(launch.block)) // waves, int(np.prod(launch.grid))
        matrix = found.loop["matrix"] * cycles * waves / units
        valu = found.loop["valu"] * waves / data.issue
        local = found.loop["local"] * wave * 16 * waves / LOCAL
        resident = max(1, min(LOCAL_BYTES // found.local_bytes, 4 * found.occupancy // waves if wave == 64 else 16))
        rounds = -(-groups // data.units)
        busy = groups / (rounds * data.units)
        hidden = max(matrix, valu, local) if resident > 1 else matrix + LATENCY
        hidden = max(hidden, matrix if wave == 64 else matrix + valu)
        size = f"{16 * tile['TM'] * tile['WAVES_M']} x {16 * tile['TN'] * tile['WAVES_N']}"
        stage = f"{matrix:.0f}, {valu:.0f}, {local:.0f}"
        shares = f"{busy:.0%}", f"{busy * matrix / hidden:.0%}"
        resources = found.registers, found.local_bytes, found.occupancy
        line(f"{rows} x {cols}", size, groups, *resources, stage, *shares)


def line(*columns: object) -> None:
    """Print a row of a table."""
    print(" | ".join(map(str, columns)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="+", choices=sorted(CARDS))
    parser.add_argument("--group", type=int, choices=(64, 128, 256), help="columns that share a scale")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for card in args.architectures:
            decode(card, Path(folder), args.group)
            prefill(card, Path(folder), args.group)


if __name__ == "__main__":
    main()
