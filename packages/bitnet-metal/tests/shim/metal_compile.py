"""Compiles Metal sources for the CPU through the shim.

``python metal_compile.py [--unchecked] SOURCE.metal -DNAME=value …`` prints the path of the library that ``shim.h``
describes; in an unchecked one no access is looked up, at a fifth of the time. Libraries are kept by the content of what
they are made of, in a folder of the system's temporary one (or the one that ``BITNET_METAL_SHIM_CACHE`` names). This
imports no numpy: the test library starts it for each source, and numpy takes longer than a compilation.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

SHIM = Path(__file__).resolve().parent
LANGUAGE = [
    "-std=c++14",
    "-Werror=c++17-extensions",
    "-x",
    "c++",
    "-ffp-contract=off",
    "-Wno-unknown-attributes",
    "-Wno-unknown-pragmas",
    "-Wno-user-defined-literals",
]
WARNINGS = [
    "-Wall",
    "-Werror",
    "-Wno-unused-function",
    "-Wno-unused-variable",
    "-Wno-vla",
    "-Wno-unused-but-set-variable",
]
UNDEFINED = "shift,bounds,integer-divide-by-zero,float-cast-overflow,alignment,signed-integer-overflow"
CHECKS = [
    *("-Xclang", "-fsanitize=address", "-mllvm", "-asan-stack=0", "-mllvm", "-asan-opt-globals=0"),
    *("-mllvm", "-asan-instrumentation-with-call-threshold=0"),
    *(f"-fsanitize={UNDEFINED}", "-fsanitize-minimal-runtime", f"-fno-sanitize-trap={UNDEFINED}"),
]
"""Calls to the shim before every access, and wherever an operation may have no defined result."""
VECTOR = re.compile(r"(?<![\w<])((?:u?char|u?short|u?int|ulong|half|float)[234])\s*\(")
KERNEL = re.compile(
    r"\[\[kernel(?:, max_total_threads_per_threadgroup\((?P<most>(?:[^()]|\([^()]*\))*)\))?\]\]"
    r"\s*void\s+(?P<name>\w+)\s*\("
)
_NAMED = r"\w+(?:\[[^\]]*\])*"
SHARED = re.compile(rf"^([ \t]*)threadgroup (?P<type>\w+) (?P<names>{_NAMED}(?:,\s*{_NAMED})*);", re.MULTILINE)
POSITIONS = {
    "threadgroup_position_in_grid": "shim_make<uint3>(w->group[0], w->group[1], w->group[2])",
    "threadgroups_per_grid": "shim_make<uint3>(w->groups[0], w->groups[1], w->groups[2])",
    "threads_per_threadgroup": "shim_make<uint3>(w->threads[0], w->threads[1], w->threads[2])",
    "thread_position_in_threadgroup": "shim_make<uint3>(w->position[0], w->position[1], w->position[2])",
    "thread_index_in_threadgroup": "w->index",
    "thread_index_in_simdgroup": "w->lane",
    "simdgroup_index_in_threadgroup": "w->simdgroup",
    "simdgroups_per_threadgroup": "w->simdgroups",
}
"""What a kernel's argument with each attribute gets."""
MAX_THREADS = 1024
RUNTIME = ("shim.h", "fibre.h", "table.h", "shim.cpp")


class CompileError(Exception):
    """A source is not C++14 with Metal's library; the text is the compiler's."""


class Parameter(NamedTuple):
    """A kernel's parameter: its type without the name, and its attribute with what is in brackets behind it."""

    type: str
    name: str
    attribute: str
    number: str


class Kernel(NamedTuple):
    """A kernel's head, as a source has it."""

    name: str
    most: str | None
    parameters: list[Parameter]


def without_comments(source: str) -> str:
    """The source, comments replaced by as many lines."""
    return re.sub(r"/\*.*?\*/|//[^\n]*", lambda found: " " + "\n" * found[0].count("\n"), source, flags=re.DOTALL)


def kernels(source: str) -> list[Kernel]:
    """All kernels of a source, in order, whether or not the preprocessor keeps them."""
    text, found = without_comments(source), []
    for head in KERNEL.finditer(text):
        depth, end = 1, head.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        found.append(Kernel(head["name"], head["most"], [_parameter(p) for p in _split(text[head.end() : end - 1])]))
    return found


def _split(text: str) -> list[str]:
    """A list at its outer commas."""
    parts, depth, part = [], 0, ""
    for c in text:
        depth += {"(": 1, "[": 1, "<": 1, ")": -1, "]": -1, ">": -1}.get(c, 0)
        if c == "," and not depth:
            parts.append(part)
            part = ""
        else:
            part += c
    return [part.strip() for part in [*parts, part] if part.strip()]


def _parameter(text: str) -> Parameter:
    found = re.fullmatch(
        r"(?P<type>.*?[\s*&])(?P<name>\w+)\s*(?:\[\[(?P<attribute>\w+)(?:\((?P<number>\w+)\))?\]\])?", text, re.DOTALL
    )
    if found is None:
        raise CompileError(f"not understood: {text}")
    return Parameter(found["type"].strip(), found["name"], found["attribute"] or "", found["number"] or "")


def translated(source: str) -> str:
    """The source as C++: constructors of vectors, variables in threadgroup memory, and a table of its kernels."""
    text = VECTOR.sub(r"shim_make<\1>(", without_comments(source))

    def shared(found: re.Match[str]) -> str:
        names = re.findall(r"\w+", re.sub(r"\[[^\]]*\]", "", found["names"]))
        registered = " ".join(f'shim_threadgroup("{name}", (void *)&{name}, sizeof {name});' for name in names)
        return f"{found[1]}static threadgroup {found['type']} {found['names']}; {registered}"

    return SHARED.sub(shared, text)


def table(source: str) -> str:
    """C++ that tells the shim of the source's kernels."""
    made, rows = [], []
    for kernel in kernels(source):
        by_number = {int(p.number): p for p in kernel.parameters if p.attribute == "buffer"}
        count = max(by_number, default=-1) + 1
        call = []
        for p in kernel.parameters:
            if p.attribute == "buffer":
                at = f"buffers[{p.number}]"
                call.append(f"*({p.type[:-1]}*){at}" if p.type.endswith("&") else f"({p.type}){at}")
            elif p.attribute == "threadgroup":
                call.append(f"({p.type})shim_dynamic()")
            elif p.attribute in POSITIONS:
                call.append(POSITIONS[p.attribute])
            else:
                raise CompileError(f"{kernel.name}: {p.name} has no attribute that the shim knows")
        least = [
            "~(uint64_t)0"
            if i not in by_number
            else f"sizeof({by_number[i].type[:-1]})"
            if by_number[i].type.endswith("&")
            else "0"
            for i in range(count)
        ]
        made.append(
            f"SHIM_QUIET static void shim_run_{kernel.name}(void **buffers, const shim_where *w) "
            f"{{ {kernel.name}({', '.join(call)}); }}\n"
            f"static const uint64_t shim_least_{kernel.name}[] = {{ {', '.join([*least, '0'])} }};\n"
        )
        rows.append(
            f'{{ "{kernel.name}", shim_run_{kernel.name}, {kernel.most or MAX_THREADS}, {count}, '
            f"shim_least_{kernel.name} }},"
        )
    end = '{ "", 0, 0, 0, 0 }'
    return (
        f'{"".join(made)}extern "C" {{ extern const shim_kernel shim_table[]; extern const uint32_t shim_table_size;\n'
        f"const shim_kernel shim_table[] = {{ {' '.join(rows)} {end} }};\n"
        f"const uint32_t shim_table_size = {len(rows)}; }}\n"
    )


def compiled(source: str, defines: Sequence[str] = (), *, checks: bool = True) -> Path:
    """The library of a source, ``common.metal`` in front of it, for constants as ``NAME=value``.

    Args:
        checks: Whether the library looks at every access, at some five times the time.

    Raises:
        CompileError: It is no C++14 with what the shim has of Metal's library.
    """
    flags = [
        *LANGUAGE,
        *WARNINGS,
        *(f"-D{name}" for name in defines),
        *(CHECKS if checks else ["-fno-sanitize=undefined"]),
    ]
    parts = (source, *flags, *(_text(name) for name in ("metal_stdlib", *RUNTIME, "metal_compile.py")))
    path = _kept(parts, ".so")
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            code = Path(folder, "kernels.cpp")
            code.write_text(preprocessed(source, defines))
            given = ["-O1", "-g0", "-fPIC", "-shared", *flags, str(code), "-x", "none", str(_runtime())]
            _run([*given, f"-I{SHIM}", "-o", f"{folder}/made.so"])
            Path(folder, "made.so").replace(path)
    return path


def preprocessed(source: str, defines: Sequence[str] = ()) -> str:
    """The source translated, with the table of those kernels that the preprocessor leaves in it."""
    text = _unfolded(source, defines)
    return '#include "metal_stdlib"\n' + translated(text) + table(text)


def _unfolded(source: str, defines: Sequence[str]) -> str:
    """What the preprocessor leaves of a source."""
    given = ["-E", "-P", "-std=c++14", "-nostdinc", *(f"-D{name}" for name in defines), "-x", "c++", "-"]
    return _run(given, INCLUDE.sub("", source))


INCLUDE = re.compile(r"^#include <metal_stdlib>\n", re.MULTILINE)


def check_spaces(source: str, defines: Sequence[str] = ()) -> None:
    """Whether every pointer points where its address space says.

    Raises:
        CompileError: One does not; or the source is no C++14.
    """
    flags = [*LANGUAGE, "-DSHIM_SPACES=1", "-O0", "-c", "-fno-sanitize=undefined", f"-I{SHIM}"]
    text = _unfolded(source, defines)
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder, "spaces.cpp")
        code.write_text('#include "metal_stdlib"\n' + translated(text))
        _run([*flags, str(code), "-o", f"{folder}/spaces.o"])


@cache
def _zig() -> str:
    """The program itself: ``python -m ziglang`` only starts it."""
    found = find_spec("ziglang")
    folder = Path(found.origin).parent if found and found.origin else None
    return shutil.which("zig", path=folder) or "zig"


@cache
def _text(name: str) -> str:
    return (SHIM / name).read_text(encoding="utf-8")


def _kept(parts: Sequence[str], ending: str) -> Path:
    folder = Path(os.environ.get("BITNET_METAL_SHIM_CACHE", Path(tempfile.gettempdir(), "bitnet-metal-shim")))
    folder.mkdir(parents=True, exist_ok=True)
    return folder / (hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32] + ending)


@cache
def _runtime() -> Path:
    """The object of shim.cpp."""
    path = _kept(tuple(_text(name) for name in (*RUNTIME, "metal_compile.py")), ".o")
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = f"{folder}/shim.o"
            given = ["-std=c++14", "-O2", "-fPIC", "-fno-sanitize=undefined", "-Wall", "-x", "c++", "-c"]
            _run([*given, str(SHIM / "shim.cpp"), "-o", made])
            Path(made).replace(path)
    return path


def _run(arguments: Sequence[str], text: str | None = None) -> str:
    """What clang says; as C, for no source needs the standard library of C++, which has to be linked."""
    done = subprocess.run([_zig(), "cc", *arguments], input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(done.stderr[-8000:])
    return done.stdout


if __name__ == "__main__":
    unchecked = sys.argv[1] == "--unchecked"
    file, *constants = sys.argv[1 + unchecked :]
    names = [constant.removeprefix("-D") for constant in constants]
    print(compiled(Path(file).read_text(encoding="utf-8"), names, checks=not unchecked))
