"""Preprocesses kernel sources, as WGSL has neither a preprocessor nor a way to query a kernel's bindings."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from bitnet.core.gpu import KernelSources, KernelSpec

_ENTRY = r"^@compute @workgroup_size\(WG\)\nfn (\w+)\("
SOURCES = KernelSources("bitnet.webgpu", "webgpu", ending=".wgsl", common="common.wgsl", entry=_ENTRY)
_DECLARED = re.compile(
    rf"^@group\(0\) @binding\((\d+)\) var<(uniform|storage, read|storage, read_write)>|{_ENTRY}", re.MULTILINE
)

INT8_DOT = "int8-dot"
SUBGROUPS = "subgroups"
LAYOUTS = {"uniform": "uniform", "storage, read": "read-only-storage", "storage, read_write": "storage"}
"""WebGPU's names of the types of bindings."""


def kernel_text(spec: KernelSpec, group: int, features: Collection[str]) -> tuple[str, list[str]]:
    """A kernel's preprocessed source and the types of its bindings.

    Args:
        group: Invocations of a workgroup.
        features: Those of INT8_DOT and SUBGROUPS that it may use.
    """
    used = {"INT8_DOT": int(INT8_DOT in features), "SUBGROUPS": int(SUBGROUPS in features)}
    text = preprocess(SOURCES.text(spec.file), {**used, **dict(spec.defines), "WG": group})
    return text, bindings(text, spec.entry)


def preprocess(text: str, defines: Mapping[str, int | str]) -> str:
    """The preprocessed text for given constants, which are prepended.

    A line ``#if NAME`` or ``#if !NAME`` keeps the lines up to its ``#else`` or ``#endif`` if the constant is, or is
    not, defined and non-zero. ``#repeat NAME COUNT`` repeats the lines up to its ``#end`` COUNT times (a number or a
    constant), each time as a block with NAME replaced by ``0u``, ``1u``, …. This forces unrolling: otherwise a driver
    may keep arrays in memory. Removed lines become empty ones, so that a compiler's line numbers match, offset by the
    constants.
    """
    kept, conditions = [], [True]
    for line in text.splitlines():
        word, _, name = line.strip().partition(" ")
        if word == "#if":
            conditions.append(bool(defines.get(name.lstrip("!"), 0)) != name.startswith("!"))
        elif word == "#else":
            conditions[-1] = not conditions[-1]
        elif word == "#endif":
            conditions.pop()
        elif all(conditions):
            kept.append(line)
            continue
        kept.append("")
    constants = [f"const {name} = {value};" for name, value in defines.items()]
    return "\n".join([*constants, *_repeated(iter(kept), defines), ""])


def _repeated(lines: Iterator[str], defines: Mapping[str, int | str]) -> list[str]:
    """The lines up to an ``#end``, or all, with what they repeat written out."""
    out: list[str] = []
    for line in lines:
        match line.split():
            case ["#end"]:
                break
            case ["#repeat", name, count]:
                body = _repeated(lines, defines)
                text = " ".join(part.partition("//")[0].strip() for part in body)
                times = range(int(defines.get(count, count)))
                out.append(" ".join(re.sub(rf"\b{name}\b", f"{i}u", f"{{ {text} }}") for i in times))
                out += [""] * (len(body) + 1)
            case _:
                out.append(line)
    return out


def bindings(text: str, entry: str) -> list[str]:
    """The types of a kernel's bindings: ``uniform``, ``storage, read`` or ``storage, read_write``.

    A kernel's bindings are those declared between the previous kernel, if any, and itself.
    """
    found: dict[int, str] = {}
    for number, kind, name in _DECLARED.findall(text):
        if not name:
            found[int(number)] = kind
        elif name == entry:
            return [found[i] for i in range(len(found))]
        else:
            found = {}
    raise ValueError(f"there is no kernel {entry} in this source")
