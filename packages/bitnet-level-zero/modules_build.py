"""Compile `kernels/opencl` into the SPIR-V of bitnet-level-zero's wheel, for machines with a driver and no compiler.

SPIR-V is the same for every platform, so the wheel is pure. The compiler is clang as PyPI's `ziglang` carries it. Array
lengths and work-group sizes that depend on a model's shape are compiled as placeholders, the other numbers of the shape
as specialisation constants; the wheel's index says which words of a module hold them, and what each is computed by
(decision 0081). To rebuild in place: `uv run python packages/bitnet-level-zero/modules_build.py`.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / "src/bitnet/level_zero"
BUILT = "bitnet/level_zero/_spirv"
INDEX = "index.json"
COMPILER = ["ziglang==0.17.0"]

Formula: TypeAlias = "int | str | list[Formula]"
"""A number, a shape's name, or an operator and its operands: `["/", "DIM", 4]`."""

FEATURES = {"FP16": 1, "SUBGROUPS": 1, "GPU": 1, "PTX": 0, "INTEL": 1}
"""What every device of Level Zero has."""
CLANG = ["clang", "-x", "cl", "-cl-std=CL3.0", "-cl-no-stdinc", "-target", "spirv64v1.2", "-Werror"]
# Unoptimised, as Intel's own front end hands it to the driver's compiler: an optimiser would fold placeholders.
# Sources without placeholders are optimised: clang then unrolls what drivers of 2022 do not.
COMPILE = ["-Xclang", "-fdeclare-opencl-builtins", "-Dinline=static inline"]
EXTENSIONS = ("SPV_INTEL_subgroups", "SPV_INTEL_subgroup_matrix_multiply_accumulate")
DOT = "SPV_KHR_integer_dot_product"
FIRST = 20_011
"""The least placeholder: above every id of a module, every number of the kernels and every product of two of them."""

# What the header of OpenCL C declares and the compiler of the wheel `ziglang`, which has no headers of it, does not.
VECTORS = " ".join(
    f"typedef {name} {name}{n} __attribute__((ext_vector_type({n})));"
    for name in ("char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "float", "half")
    for n in (2, 3, 4, 8, 16)
)
AS = "\n".join(
    f"#define as_{name}(x) __builtin_astype((x), {name})"
    for name in ("uint", "float", "uchar4", "char4", "half4", "int8", "short8", "float8")
)
PRELUDE = f"""
typedef unsigned char uchar; typedef unsigned short ushort; typedef unsigned int uint; typedef unsigned long ulong;
typedef __SIZE_TYPE__ size_t; typedef uint cl_mem_fence_flags;
{VECTORS}
{AS}
#define CLK_LOCAL_MEM_FENCE 1
#define CLK_GLOBAL_MEM_FENCE 2
#define INFINITY __builtin_inff()
#define OF_HEADER __attribute__((overloadable, convergent))
OF_HEADER float sub_group_reduce_add(float);
OF_HEADER float sub_group_reduce_max(float);
OF_HEADER uint get_num_sub_groups(void);
OF_HEADER uint get_sub_group_id(void);
OF_HEADER uint get_sub_group_local_id(void);
OF_HEADER int dot_4x8packed_us_int(uint, uint);
OF_HEADER int dot_acc_sat_4x8packed_us_int(uint, uint, int);
OF_HEADER int dot_acc_sat_4x8packed_ss_int(uint, uint, int);
OF_HEADER int sub_group_broadcast(int, uint);
OF_HEADER uint8 intel_sub_group_block_read8(const global uint *);
OF_HEADER ushort8 intel_sub_group_block_read_us8(const global ushort *);
OF_HEADER int8 __spirv_SubgroupMatrixMultiplyAccumulateINTEL(int, int8, int8, int8, int);
OF_HEADER int8 __spirv_SubgroupMatrixMultiplyAccumulateINTEL(int, short8, int8, int8, int);
OF_HEADER float8 __spirv_SubgroupMatrixMultiplyAccumulateINTEL(int, int8, int8, float8, int);
OF_HEADER float8 __spirv_SubgroupMatrixMultiplyAccumulateINTEL(int, short8, int8, float8, int);
// K of 32; both operands are signed bytes, several in a component (bits 0, 1, 4 and 5 of the extension's operands).
#define intel_sub_group_i8_i8_matrix_mad_k32(a, b, c) __spirv_SubgroupMatrixMultiplyAccumulateINTEL(32, a, b, c, 0x33)
// K of 16; both operands are halves, several in a component (bits 10 and 11).
#define intel_sub_group_f16_f16_matrix_mad_k16(a, b, c) __spirv_SubgroupMatrixMultiplyAccumulateINTEL(16, a, b, c, 3072)
OF_HEADER int __spirv_SpecConstant(int, int);
inline bool unrolled(bool goes_on) {{ return goes_on; }}
"""

TYPE = r"(?:local\s+|global\s+|const\s+)*(?:float|int|uint|half|size_t|char)\d*\s+"
DECLARATOR = r"\*?\w+(?:\[[^\]=]*\])*"
ARRAYS = re.compile(rf"((?:^|[;{{}}])\s*{TYPE})({DECLARATOR}(?:\s*,\s*{DECLARATOR})*)(?=\s*[;=])", re.MULTILINE)
"""A declaration up to its `;` or `=`. What this misses does not compile: a shape is no constant to clang."""
INCLUDE = re.compile(r'^#include "([\w./]+)"\n', re.MULTILINE)
UNROLLED = re.compile(r"#pragma unroll\s*\n(\s*for \([^;]*;)([^;]*);")
"""A loop that is to be unrolled. This compiler drops the pragma; a call in the loop's condition marks it instead."""
GROUP = re.compile(r"(reqd_work_group_size\()([^,]*)(?=,)")
OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "/", ast.Mod: "%"}

# Instructions of SPIR-V (section 3 of its specification), and those of their words that matter here.
NAME, ENTRY_POINT, EXECUTION_MODE, CONSTANT, SPEC_CONSTANT, FUNCTION, DECORATE = 5, 15, 16, 43, 50, 54, 71
CALL, BITWISE_OR, LOOP_MERGE, LABEL, BRANCH, BRANCH_CONDITIONAL = 57, 197, 246, 248, 249, 250
LOCAL_SIZE, CONTRACTION_OFF, SPEC_ID, INLINE, UNROLL = 17, 31, 1, 1, 1
HEADER_WORDS = 5


def table() -> ModuleType:
    """The package's list of what is to be compiled."""
    spec = importlib.util.spec_from_file_location("bitnet_level_zero_variants", PACKAGE / "variants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def clang(what: str, *options: str, text: str) -> str:
    """Run the compiler on a text; returns its output."""
    command = [sys.executable, "-m", "ziglang", *CLANG, *options, "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"compiling {what} failed\n{done.stderr}")
    return done.stdout


def formula(text: str) -> Formula:
    """An integer expression of C as data."""

    def walk(node: ast.expr) -> Formula:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            return node.id
        if isinstance(node, ast.BinOp):
            return [OPERATORS[type(node.op)], walk(node.left), walk(node.right)]
        if isinstance(node, ast.IfExp):
            return ["?", walk(node.test), walk(node.body), walk(node.orelse)]
        raise SystemExit(f"an array's length is {text!r}, which formula() does not know")

    return walk(ast.parse(pythonic(text.replace("/", "//")).strip(), mode="eval").body)


def pythonic(text: str) -> str:
    """An expression of C with its conditionals as Python has them: ``(b) if (a) else (c)`` for ``a ? b : c``."""
    depth, questions, first, opened, made = 0, 0, 0, 0, ""
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if c == "(" and depth == 1:
            made, opened = made + text[opened:i], i + 1
        elif c == ")" and depth == 0:
            made, opened = f"{made}({pythonic(text[opened:i])})", i + 1
        elif c == "?" and depth == 0:
            first, questions = first or i, questions + 1
        elif c == ":" and depth == 0 and (questions := questions - 1) == 0:
            test, yes, no = (pythonic(part) for part in (text[:first], text[first + 1 : i], text[i + 1 :]))
            return f"({yes}) if ({test}) else ({no})"
    return made + text[opened:]


def held_open(text: str, shapes: tuple[str, ...], *, mark: bool = True) -> tuple[str, list[Formula]]:
    """A preprocessed source with a placeholder for each array length that depends on a shape, and their formulas.

    Args:
        mark: Whether to mark the loops that are to be unrolled.
    """
    formulas: list[Formula] = []
    names = re.compile(rf"\b(?:{'|'.join(shapes)})\b") if shapes else re.compile(r"(?!)")

    def hold(length: str) -> str:
        if not names.search(length):
            return length
        formulas.append(formula(length))
        return str(FIRST + 2 * len(formulas))

    def declare(found: re.Match[str]) -> str:
        return found[1] + re.sub(r"\[([^\]]*)\]", lambda part: f"[{hold(part[1])}]", found[2])

    text = ARRAYS.sub(declare, text)
    if mark:
        text = UNROLLED.sub(r"\1 unrolled(\2);", text)
    return GROUP.sub(lambda found: found[1] + hold(found[2]), text), formulas


def source(file: str) -> str:
    """A kernel's source with what all have in front."""
    kernels = PACKAGE / "kernels"

    def read(name: str) -> str:
        return INCLUDE.sub(lambda line: read(line[1]), (kernels / name).read_text(encoding="utf-8"))

    return read("common.clh") + read(f"{file}.cl")


def compile_one(
    file: str, shapes: tuple[str, ...], choices: dict[str, int], dot: bool, *, optimised: bool = False
) -> tuple[bytes, list[tuple[int, Formula]]]:
    """A module, and which of its words are to be set to what."""
    what = f"{file} {choices}"
    original = source(file)
    for line in re.findall(r"^#\s*(?:el)?if .*", original, re.MULTILINE):
        if asked := [name for name in shapes if re.search(rf"\b{name}\b", line)]:
            raise SystemExit(f"{file}.cl: `{line}` asks the preprocessor about {asked[0]}, which is a shape")
    defines = {**FEATURES, "INT_DOT": int(dot), **choices, **{name: name for name in shapes}}
    flat = clang(what, "-E", "-P", "-o", "-", *(f"-D{name}={value}" for name, value in defines.items()), text=original)
    text, formulas = held_open(flat, shapes, mark=not optimised)
    if optimised and formulas:
        raise SystemExit(f"{what}: an optimiser would fold the length {formulas[0]}")
    specials = "".join(
        f"inline int shape_{name}(void) {{ return __spirv_SpecConstant({i}, 0); }}\n#define {name} shape_{name}()\n"
        for i, name in enumerate(shapes)
    )
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "made.spv"
        extensions = ",".join(f"+{name}" for name in (*EXTENSIONS, *([DOT] if dot else [])))
        options = ["-O2" if optimised else "-O0", *COMPILE, "-Xclang", "-mllvm", "-Xclang", f"--spirv-ext={extensions}"]
        clang(what, *options, "-c", "-o", str(made), text=PRELUDE + specials + text)
        words = array("I", made.read_bytes())
    return finished(what, words, shapes, formulas, contract="FP_CONTRACT OFF" not in original)


def instructions(words: array[int]) -> Iterator[array[int]]:
    """The instructions of a module, after its header."""
    at = HEADER_WORDS
    while at < len(words):
        size = words[at] >> 16
        yield words[at : at + size]
        at += size


def continues(words: array[int]) -> dict[int, int]:
    """Header of each loop → the block that leads back to it: the last that branches to it without a condition."""
    found: dict[int, int] = {}
    label = 0
    for one in instructions(words):
        if one[0] & 0xFFFF == LABEL:
            label = one[1]
        elif one[0] & 0xFFFF == BRANCH:
            found[one[1]] = label
    return found


def named(words: array[int]) -> dict[str, int]:
    """The ids of what has a name."""
    names = (one for one in instructions(words) if one[0] & 0xFFFF == NAME)
    return {one[2:].tobytes().rstrip(b"\0").decode(): one[1] for one in names}


def special_constants(words: array[int]) -> dict[int, int]:
    """Id of a specialisation constant → its number."""
    made = (one for one in instructions(words) if one[0] & 0xFFFF == DECORATE and one[2] == SPEC_ID)
    return {one[1]: one[3] for one in made}


def made_of(number: int, placeholders: Collection[int]) -> int | None:
    """The placeholder that a number of a module was computed from at compile time, if it seems to be of one."""
    near = (
        one for one in placeholders if number >= FIRST // 2 and (number % one == 0 or abs(number - one) < FIRST // 2)
    )
    return next(near, None)


def finished(
    what: str, words: array[int], shapes: tuple[str, ...], formulas: list[Formula], *, contract: bool
) -> tuple[bytes, list[tuple[int, Formula]]]:
    """Let functions be inlined, loops unrolled and products contracted; find the words of shapes and placeholders."""
    wanted: dict[int, Formula] = {FIRST + 2 * (i + 1): made for i, made in enumerate(formulas)}
    if words[3] >= FIRST:
        raise SystemExit(f"{what}: it has more than {FIRST} ids")
    out = array("I", words[:HEADER_WORDS])
    entries: set[int] = set()
    patches: list[tuple[int, Formula]] = []
    names, special = named(words), special_constants(words)
    calls = {names[f"shape_{name}"]: i for i, name in enumerate(shapes) if f"shape_{name}" in names}
    number = {call: made for call, i in calls.items() for made, of in special.items() if of == i}
    leads_back, unrolled, label, condition = continues(words), names.get("unrolled"), 0, 0
    for one in instructions(words):
        opcode = one[0] & 0xFFFF
        if opcode == NAME or (opcode == EXECUTION_MODE and one[2] == CONTRACTION_OFF and contract):
            continue
        if opcode == LABEL:
            label, condition = one[1], 0
        elif opcode == CALL and one[3] == unrolled:
            condition = one[4]
            continue
        elif opcode == CALL and one[3] in number:  # a compiler unrolls before it looks into calls
            out.extend([5 << 16 | BITWISE_OR, *one[1:3], number[one[3]], number[one[3]]])
            continue
        elif opcode == BRANCH_CONDITIONAL and condition:
            out.extend([4 << 16 | LOOP_MERGE, one[3], leads_back[label], UNROLL])
            one[1] = condition
        place = len(out)
        held = [i for i, word in enumerate(one) if word in wanted and i]
        if opcode == ENTRY_POINT:
            entries.add(one[2])
        elif opcode == SPEC_CONSTANT:
            patches.append((place + 3, shapes[special[one[2]]]))
        elif opcode == FUNCTION:
            one[3] = 0 if one[2] in entries else INLINE
        if opcode == CONSTANT and one[3] not in wanted and (made := made_of(one[3], wanted)):
            raise SystemExit(f"{what}: the number {one[3]} seems to be made of the length {made}")
        if held:
            length = opcode == CONSTANT or (opcode == EXECUTION_MODE and one[2] == LOCAL_SIZE)
            if not length or held != [3]:
                raise SystemExit(f"{what}: a placeholder stands in instruction {opcode}, which is no length")
            patches.append((place + 3, wanted[one[3]]))
        out.extend(one)
    return out.tobytes(), patches


def build(target: Path) -> None:
    """Compile every module into the folder, which must exist, and write the index."""
    listed = table()

    def one(entry: tuple[str, str, dict[str, int], bool]) -> tuple[str, list[tuple[int, Formula]]]:
        name, file, choices, dot = entry
        family = listed.FAMILIES[file]
        module, patches = compile_one(file, family.shapes, choices, dot, optimised=family.optimised)
        (target / f"{name}.spv").write_bytes(module)
        return name, patches

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        index = dict(pool.map(one, listed.all_modules()))
    (target / INDEX).write_text(json.dumps(index, separators=(",", ":")), encoding="utf-8")


def install() -> Path:
    """Put the modules where an editable install looks for them.

    The folder stays where there is one: uv builds again when it finds a new one.
    """
    place = ROOT / "src" / BUILT
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        wanted = {made.name for made in Path(folder).iterdir()}
        for name in sorted(wanted):
            copy = place / f"{name}.{os.getpid()}"
            shutil.copyfile(Path(folder) / name, copy)
            copy.replace(place / name)
    for path in place.iterdir():
        if path.name not in wanted and not path.name.startswith("."):  # git's own file stays
            path.unlink()
    return place


class SpirvHook(BuildHookInterface[Any]):
    """Gives the wheel its SPIR-V."""

    _folder: tempfile.TemporaryDirectory[str] | None = None

    def dependencies(self) -> list[str]:
        return COMPILER

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            install()
            return
        self._folder = tempfile.TemporaryDirectory()
        build(Path(self._folder.name))
        for path in sorted(Path(self._folder.name).iterdir()):
            build_data["force_include"][str(path)] = f"{BUILT}/{path.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._folder is not None:
            self._folder.cleanup()


if __name__ == "__main__":
    print(install())
