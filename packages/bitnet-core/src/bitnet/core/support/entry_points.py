"""The entry points of the installed distributions, each read separately, so that a broken one hides no other."""

from __future__ import annotations

import importlib.metadata
import logging
import re
from collections.abc import Iterator
from importlib.metadata import EntryPoint

from bitnet.core.support import log


def entry_points(group: str) -> Iterator[tuple[str, str, EntryPoint]]:
    """Distribution, version and entry point of each in a group.

    As for imports, the first distribution of a name counts. One whose files cannot be read, such as an
    ``entry_points.txt`` that is not UTF-8, is ignored with a warning. With ``importlib.metadata.entry_points()``, it
    would hide all others.
    """
    seen: set[str] = set()
    for distribution in importlib.metadata.distributions():
        try:
            if group not in (distribution.read_text("entry_points.txt") or ""):
                continue
            name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
            if name in seen:
                continue
            seen.add(name)
            entries = [entry for entry in distribution.entry_points if entry.group == group]
            version = distribution.version
        except Exception as error:
            where = getattr(distribution, "_path", distribution)
            log.once(logging.WARNING, f"{where}: its entry points cannot be read ({error!r}); it is ignored.")
            continue
        for entry in entries:
            yield name, version, entry
