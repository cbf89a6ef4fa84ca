"""The entry points of the installed distributions, each read separately, so that a broken one hides no other."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from typing import Any

from bitnet.core.support import log
from bitnet.core.support.distributions import distributions, metadata


@dataclass(frozen=True, slots=True)
class EntryPoint:
    """An entry point of a distribution.

    Attributes:
        value: Where its object is: ``MODULE:NAME``.
        distribution: The distribution's name, in lower case, with hyphens.
        version: The distribution's version.
        requires: The distribution's ``Requires-Dist`` lines.
    """

    name: str
    value: str
    distribution: str
    version: str
    requires: tuple[str, ...]

    def load(self) -> Any:
        """Import the module, and return the object.

        Raises:
            Exception: What importing the module raises; ``AttributeError`` if it has no such object.
        """
        module, _, path = self.value.partition("[")[0].partition(":")
        return reduce(getattr, filter(None, path.strip().split(".")), import_module(module.strip()))


def entry_points(group: str) -> Iterator[EntryPoint]:
    """The entry points in a group.

    As for imports, the first distribution of a name counts. One whose files cannot be read, such as an
    ``entry_points.txt`` that is not UTF-8, is ignored with a warning.
    """
    seen: set[str] = set()
    for files in distributions():
        try:
            text = files.read_text("entry_points.txt") or ""
            if group not in text:
                continue
            of = metadata(files)
            if of.name in seen:
                continue
            seen.add(of.name)
            entries = [EntryPoint(name, value, of.name, of.version, of.requires) for name, value in _lines(text, group)]
        except Exception as error:
            where = getattr(files, "path", None) or getattr(files, "_path", files)
            log.once(logging.WARNING, f"{where}: its entry points cannot be read ({error!r}); it is ignored.")
            continue
        yield from entries


def _lines(text: str, group: str) -> Iterator[tuple[str, str]]:
    """Names and values of a group's lines in an ``entry_points.txt``."""
    section = None
    for line in map(str.strip, text.splitlines()):
        if not line or line.startswith("#"):
            continue
        if line.startswith("[") and line.endswith("]"):
            section = line[1:-1].strip()
            continue
        name, equals, value = line.partition("=")
        if section is None or (section == group and not equals):
            raise ValueError(f"the line {line!r} is in no section, or has no equals sign")
        if section == group:
            yield name.strip(), value.strip()
