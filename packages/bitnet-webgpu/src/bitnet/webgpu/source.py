"""Kernel sources as WGSL for one launch: WGSL has neither a preprocessor nor a way to ask what a kernel binds."""

from __future__ import annotations

import re
from collections.abc import Mapping

from bitnet.core.gpu import KernelSources

_ENTRY = r"^@compute @workgroup_size\(WG\)\nfn (\w+)\("
SOURCES = KernelSources("bitnet.webgpu", "webgpu", ending=".wgsl", common="common.wgsl", entry=_ENTRY)
_DECLARED = re.compile(
    rf"^@group\(0\) @binding\((\d+)\) var<(uniform|storage, read|storage, read_write)>|{_ENTRY}", re.MULTILINE
)


def preprocess(text: str, defines: Mapping[str, int | str]) -> str:
    """The text for given constants, which stand in front of it.

    A line ``#if NAME`` or ``#if !NAME`` keeps the lines up to its ``#else`` or ``#endif`` where the constant is, or is
    not, there and other than 0. Lines that go leave empty ones: a compiler's line numbers fit, less the constants.
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
    return "\n".join([*constants, *kept, ""])


def bindings(text: str, entry: str) -> list[str]:
    """What a kernel of a preprocessed source binds: ``uniform``, ``storage, read`` or ``storage, read_write``.

    Its bindings are those declared between the kernel before it, if there is one, and it.
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
