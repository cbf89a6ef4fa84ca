"""The kernel sources in a backend's wheel."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Traversable  # which moved to importlib.resources.abc in Python 3.11, and left in 3.14

INCLUDE = re.compile(r'^#include "([\w./]+)"\n', re.MULTILINE)


class KernelSources:
    """Kernels of one language.

    Args:
        package: Import name of the backend's package, whose folder ``kernels`` holds them.
        backend: Name of the backend, which is the suffix of the kernels' names.
        ending: Extension of the files, such as ``.cl``. Files for one vendor's hardware are in a folder of their own.
        common: The file prepended to all others. A line ``#include "path"`` is replaced by the file at that path.
        entry: Pattern of a kernel definition; its first group is the kernel's name.
        vendors: Folders of the vendors whose hardware the backend reaches; None for all.
    """

    def __init__(
        self,
        package: str,
        backend: str,
        *,
        ending: str,
        common: str,
        entry: str,
        vendors: Collection[str] | None = None,
    ) -> None:
        self._folder = files(package) / "kernels"
        self._backend, self._ending, self._common = backend, ending, common
        self._entry, self._vendors = re.compile(entry, re.MULTILINE), vendors
        self.text = cache(self._text)

    def names(self) -> frozenset[str]:
        """The names, as in receipts, of every kernel that the backend may launch."""
        found = _files(self._folder, self._vendors)
        texts = [file.read_text(encoding="utf-8") for file in found if file.name.endswith(self._ending)]
        return frozenset(f"{entry}_{self._backend}" for text in texts for entry in self._entry.findall(text))

    def _text(self, file: str) -> str:
        """A source with its includes expanded, each at the first line that names it."""
        seen: set[str] = set()

        def read(name: str) -> str:
            if name in seen:
                return ""
            seen.add(name)
            return INCLUDE.sub(lambda line: read(line[1]), (self._folder / name).read_text(encoding="utf-8"))

        return read(self._common) + read(file + self._ending)


def _files(folder: Traversable, inner: Collection[str] | None) -> Iterator[Traversable]:
    """Every file of a folder and of its subfolders: the named ones, or all."""
    for entry in folder.iterdir():
        if not entry.is_dir():
            yield entry
        elif inner is None or entry.name in inner:
            yield from _files(entry, None)
