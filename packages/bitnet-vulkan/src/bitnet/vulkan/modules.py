"""The SPIR-V modules of the kernels: one for each kernel and each set of features that its source tests.

This file imports nothing of bitnet, because the wheel's build loads it by its path.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

COMMON = "common.glsl"
ENDING = ".comp"
ENTRY = r"^KERNEL\((\w+)\)"
TARGET = "vulkan1.1"
"""What all modules are compiled for, as compilers name it."""

_MACROS = re.compile(r"^// (requires|variants): (.+)$", re.MULTILINE)
_CONSTANT = re.compile(r"^layout\(constant_id = (\d+)\) const int (\w+)", re.MULTILINE)
_INCLUDE = re.compile(r'^#include "([\w.]+)"\n', re.MULTILINE)
_BUFFER = re.compile(r"^ *BUFFER\((\d+), (\w*), ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Module:
    """A kernel's source with the macros it is compiled with.

    Attributes:
        file: Its source, without the ending.
        entry: The kernel.
        text: The source as compilers get it, the common part in front.
        macros: Macros of this variant, without features that the source does not test.
    """

    file: str
    entry: str
    text: str
    macros: tuple[tuple[str, int], ...]

    @property
    def label(self) -> str:
        """A readable name, such as ``sample+SUBGROUPS``."""
        return "+".join([self.entry, *(name for name, value in self.macros if value and not name.startswith("ENTRY"))])

    @property
    def digest(self) -> str:
        """SHA-256 of everything its SPIR-V depends on, except the compiler."""
        return hashlib.sha256(repr((self.text, self.macros, TARGET)).encode()).hexdigest()

    @property
    def constants(self) -> dict[str, int]:
        """The specialisation constants' ids by their names."""
        return {name: int(number) for number, name in _CONSTANT.findall(self.text)}

    @property
    def written(self) -> frozenset[int]:
        """Bindings that the kernel writes."""
        return frozenset(int(at) for at, access in _BUFFER.findall(self.text) if access != "readonly")


def module(folder: Path, file: str, entry: str, features: Mapping[str, int | str]) -> Module:
    """The module of a kernel for these features (macro → 0 or 1), of which it takes those that its source names."""
    required, variants = _macros((folder / (file + ENDING)).read_text(encoding="utf-8"))
    macros = [(f"ENTRY_{entry}", 1), *((name, 1) for name in required)]
    macros += [(name, int(features.get(name, 0))) for name in variants]
    return Module(file, entry, _included(folder, COMMON) + _included(folder, file + ENDING), tuple(macros))


def all_modules(folder: Path) -> Iterator[Module]:
    """Every module of a folder of kernels."""
    for path in sorted(folder.glob("*" + ENDING)):
        source = path.read_text(encoding="utf-8")
        _, names = _macros(source)
        for entry in re.findall(ENTRY, source, re.MULTILINE):
            for values in product((0, 1), repeat=len(names)):
                yield module(folder, path.stem, entry, dict(zip(names, values, strict=True)))


def _included(folder: Path, name: str) -> str:
    """A source with the files that it includes in their places."""
    text = (folder / name).read_text(encoding="utf-8")
    return _INCLUDE.sub(lambda line: _included(folder, line[1]), text)


def _macros(source: str) -> tuple[list[str], list[str]]:
    """The macros that a kernel requires, and those of its variants."""
    found = dict(_MACROS.findall(source))
    return found.get("requires", "").split(), found.get("variants", "").split()
