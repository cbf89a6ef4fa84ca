"""Finds in Metal sources what C++14 takes and the Metal Shading Language 2.4, or the kernels' contract, does not.

:func:`problems` takes a source as it is written, :func:`parameter_problems` what the preprocessor leaves of it. Types,
address spaces and C++ newer than C++14 are left to a compiler (``check_spaces`` of ``metal_compile.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from metal_compile import KERNEL, POSITIONS, Kernel, kernels, without_comments

MAX_BUFFERS = 31
SPACES = {"device", "constant", "threadgroup", "thread"}
BUILTIN = r"(?:u?char|u?short|u?int|ulong|long|half|float|bool|size_t|void|atomic_u?int|WEIGHT|KV)[234]?"
WORD = r"(?<![\w.])(?:{})\b"


class Rule(NamedTuple):
    """What must not be in a source, and why."""

    name: str
    pattern: re.Pattern[str]
    why: str


def _rule(name: str, pattern: str, why: str) -> Rule:
    return Rule(name, re.compile(pattern, re.MULTILINE), why)


RULES = (
    _rule("exceptions", WORD.format("try|catch|throw|noexcept"), "the language has no exceptions"),
    _rule("memory", WORD.format("new|delete"), "there is no memory to allocate"),
    _rule("virtual", WORD.format("virtual|override"), "there are no virtual functions"),
    _rule("rtti", WORD.format("dynamic_cast|typeid"), "there is no type information at run time"),
    _rule("goto", WORD.format("goto"), "the language has no goto"),
    _rule("double", WORD.format("double[234]?|long double"), "the language has no double"),
    _rule("long-long", r"\blong\s+long\b", "the language has no long long"),
    _rule("std", r"\bstd\s*::", "the standard library is metal's"),
    _rule("static", WORD.format("static"), "variables of a function cannot be static, and functions need not"),
    _rule("thread-local", WORD.format("thread_local|register"), "the language has no such storage"),
    _rule("lambda", r"(?<![\w\])\[])\[[&=]?[\w, &=]*\]\s*[({](?!\()", "lambdas are newer than Metal 2.4"),
    _rule("function-pointer", r"\(\s*\*\s*\w+\s*\)\s*\(", "pointers to functions need visible functions"),
    _rule(
        "include",
        r'^[ \t]*#[ \t]*include[ \t]+(?!<metal_stdlib>|"[\w/]+\.metal")',
        "only metal_stdlib and files here are included",
    ),
    _rule("assembly", WORD.format("asm|__asm__|__asm"), "the language has no assembly"),
    _rule("variadic", r"\.\.\.", "functions have a fixed number of arguments"),
    _rule("characters", WORD.format("wchar_t|char16_t|char32_t"), "the language has no wide characters"),
    _rule("bit-fields", r"\b(?:uint|int|uchar|ushort)\s+\w+\s*:\s*\d+\s*;", "the language has no bit fields"),
    _rule(
        "literal",
        r"(?<![\w.])(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?(?![\w.])",
        "a number without f is a double elsewhere",
    ),
    _rule("c-library", WORD.format("printf|malloc|free|memcpy|memset|assert|abort"), "there is no C library"),
    _rule("main", r"\bmain\s*\(", "no function is called main"),
    _rule("fast", r"\bfast\s*::", "the contract needs precise functions"),
    _rule(
        "precise", r"(?<![\w:])(?:exp2?|log2?|sqrt|rsqrt|sin|cos|tan|tanh|pow|powr|divide)\s*\(", "call it as precise::"
    ),
    _rule("matrix-size", r"\bsimdgroup_(?:float|half|bfloat)(?!8x8)\d+x\d+", "matrices of a simdgroup are 8 by 8"),
    _rule("matrix-origin", r"\bulong2\((?!0, 0\))", "a matrix is loaded from where the pointer points"),
    _rule(
        "newer", WORD.format("bfloat[234]?|tensor|coherent|matmul2d|visible|constexpr sampler"), "newer than Metal 2.4"
    ),
    _rule(
        "old-kernel",
        r"^[ \t]*kernel\s+\w",
        "kernels here are written [[kernel, max_total_threads_per_threadgroup(…)]] void",
    ),
)
SHARED_SET = re.compile(r"^[ \t]*threadgroup\s+\w+\s+\w+(?:\[[^\]]*\])*\s*(?:=|\{)", re.MULTILINE)
SHARED = re.compile(r"^[ \t]*threadgroup\s+\w+\s+\w+\s*(?:\[|;|,)", re.MULTILINE)
FUNCTION = re.compile(
    r"^(?:template[^\n]*\n)?(?:inline\s+|\[\[kernel[^\n]*\]\]\s+)?[A-Za-z_]\w*(?:<[^>\n]*>)?\s+\**(\w+)\s*\([^;{}]*\)\s*\{",
    re.MULTILINE,
)
GLOBAL = re.compile(rf"^(?:const\s+)?{BUILTIN}\s+\w+(?:\[[^\]]*\])*\s*(?:=|;)", re.MULTILINE)


def problems(source: str) -> list[str]:
    """What is wrong with a source, each as ``line: rule: why``; empty where nothing is."""
    text = re.sub(r'^([ \t]*#[ \t]*error[^\n"]*)"[^"\n]*"', r"\1", without_comments(source), flags=re.MULTILINE)
    found = [
        (match.start(), f"{rule.name}: {rule.why}: {match[0].strip()}")
        for rule in RULES
        for match in rule.pattern.finditer(text)
    ]
    found += _pointers(text)
    found += _bodies(text)
    found += [
        (match.start(), f"shared-set: threadgroup memory cannot be initialised: {match[0].strip()}")
        for match in SHARED_SET.finditer(text)
    ]
    found += [
        (match.start(), f"global: a variable of the program must be constant: {match[0].strip()}")
        for match in GLOBAL.finditer(text)
    ]
    return [f"{text.count(chr(10), 0, at) + 1}: {what}" for at, what in sorted(found)]


def _pointers(text: str) -> Iterator[tuple[int, str]]:
    """Pointers and references that do not say where they point."""
    types = "|".join([BUILTIN, *re.findall(r"\bstruct\s+(\w+)", text)])
    for match in re.finditer(rf"((?:\b\w+[ \t]+)*)\b(?:{types})(?:\s+const)?\s*[*&]+\s*(?=[A-Za-z_)])", text):
        if not SPACES & set(match[1].split()):
            yield match.start(), f"address-space: a pointer or reference without one: {match[0].strip()}"


def _bodies(text: str) -> Iterator[tuple[int, str]]:
    """Functions that call themselves or kernels, threadgroup memory outside kernels, kernels that return something."""
    calls: dict[str, set[str]] = {}
    kernel_names = {match["name"] for match in KERNEL.finditer(text)}
    for match in FUNCTION.finditer(text):
        name, body = match[1], _block(text, match.end())
        calls.setdefault(name, set()).update(re.findall(r"(?<![.\w])(\w+)\s*\(", body))
        if name not in kernel_names and (shared := SHARED.search(body)):
            yield (
                match.end() + shared.start(),
                f"shared-outside: only kernels have threadgroup memory: {shared[0].strip()}",
            )
    for name, called in calls.items():
        for other in called & kernel_names:
            yield 0, f"kernel-called: {name} calls the kernel {other}"
        if name in _reached(name, calls):
            yield 0, f"recursion: {name} calls itself, perhaps by way of others"
    for match in re.finditer(r"\[\[kernel[^\n]*?\]\]\s*(?!void\b)(\w+)", text):
        yield match.start(), f"kernel-type: a kernel is of type void, not {match[1]}"
    for match in re.finditer(r"\[\[kernel\]\]", text):
        yield match.start(), "kernel-threads: a kernel says how many threads a threadgroup has at most"


def _block(text: str, start: int) -> str:
    depth, end = 1, start
    while depth and end < len(text):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
    return text[start:end]


def _reached(name: str, calls: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    open_ = set(calls[name])
    while open_:
        one = open_.pop()
        if one not in seen and one in calls:
            seen.add(one)
            open_ |= calls[one]
    return seen


def parameter_problems(preprocessed: str) -> list[str]:
    """What is wrong with the parameters of kernels, the preprocessor done."""
    return [problem for kernel in kernels(preprocessed) for problem in _kernel(kernel)]


def _kernel(kernel: Kernel) -> Iterator[str]:
    numbers, kinds = [], set()
    for p in kernel.parameters:
        pointer = p.type.endswith(("*", "&"))
        spaces = SPACES & set(p.type.replace("*", " ").replace("&", " ").split())
        if not p.attribute:
            yield f"{kernel.name}: attribute: {p.name} has none"
        elif p.attribute == "buffer":
            if not pointer or not spaces & {"device", "constant"}:
                yield f"{kernel.name}: buffer: {p.name} is no pointer or reference to device or constant memory"
            numbers.append(int(p.number) if p.number.isdigit() else -1)
        elif p.attribute == "threadgroup":
            if not pointer or "threadgroup" not in spaces:
                yield f"{kernel.name}: threadgroup: {p.name} is no pointer to threadgroup memory"
        elif p.attribute not in POSITIONS:
            yield f"{kernel.name}: attribute: {p.name} has {p.attribute}, which is unknown"
        elif (
            p.attribute.endswith(("_in_grid", "_per_grid", "_in_threadgroup", "_per_threadgroup"))
            and "index" not in p.attribute
        ):
            if not p.attribute.startswith("simdgroups"):
                kinds.add(p.type)
        elif p.type not in ("uint", "ushort"):
            yield f"{kernel.name}: index: {p.name} is uint or ushort, not {p.type}"
    if sorted(numbers) != list(range(len(numbers))):
        yield f"{kernel.name}: buffer: the numbers of its buffers are {numbers}, not 0, 1, 2 …"
    if len(numbers) > MAX_BUFFERS:
        yield f"{kernel.name}: buffer: it has {len(numbers)}; {MAX_BUFFERS} is the limit"
    if len(kinds) > 1 or kinds - {"uint", "uint2", "uint3", "ushort", "ushort2", "ushort3"}:
        yield f"{kernel.name}: position: all positions have the same type of uint or ushort, not {sorted(kinds)}"
