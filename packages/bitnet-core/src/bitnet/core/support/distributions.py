"""The installed distributions, read from their folders on the path.

``importlib.metadata`` does the same, but takes twice as long to import as all of the command line. It is used for what
is no folder: zip files, and the places of other finders.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Protocol


class Files(Protocol):
    """The files of a distribution, such as an ``importlib.metadata.Distribution``."""

    def read_text(self, filename: str, /) -> str | None:
        """The text of a file; None if there is none.

        Raises:
            ValueError: It is not UTF-8.
        """


@dataclass(frozen=True, slots=True)
class Folder:
    """A distribution's folder of information, ``NAME-VERSION.dist-info``."""

    path: Path

    def read_text(self, filename: str, /) -> str | None:
        """The text of a file; None if there is none or it cannot be read."""
        try:
            return (self.path / filename).read_text(encoding="utf-8")
        except OSError:
            return None


def distributions() -> Iterator[Files]:
    """The files of each distribution, in the order of the path; one name may occur several times."""
    places = [Path(place) for place in sys.path]
    if not _others() and all(place.is_dir() or not place.exists() for place in places):
        for place in places:
            yield from _folders(place)
        return
    import importlib.metadata

    yield from importlib.metadata.distributions()


def _others() -> bool:
    """Whether modules of other finders may be distributions."""
    return any(hasattr(finder, "find_distributions") and finder is not PathFinder for finder in sys.meta_path)


def _folders(place: Path) -> Iterator[Folder]:
    try:
        paths = sorted(path for path in place.iterdir() if path.suffix.lower() in (".dist-info", ".egg-info"))
    except OSError:
        return
    yield from map(Folder, paths)


@dataclass(frozen=True, slots=True)
class Metadata:
    """The fields of a distribution's metadata that are needed here.

    Attributes:
        name: In lower case, with hyphens.
        requires: The lines of ``Requires-Dist``.
    """

    name: str
    version: str
    requires: tuple[str, ...]


def metadata(files: Files) -> Metadata:
    """Read the metadata of a distribution.

    Raises:
        ValueError: It is missing, has no name or no version, or is not UTF-8.
    """
    fields: dict[str, list[str]] = {}
    for line in (files.read_text("METADATA") or files.read_text("PKG-INFO") or "").splitlines():
        if not line.strip():
            break  # the description follows
        key, _, value = line.partition(":")
        fields.setdefault(key.strip().lower(), []).append(value.strip())
    if not fields.get("name") or not fields.get("version"):
        raise ValueError("its metadata has no name or no version")
    return Metadata(normalized(fields["name"][0]), fields["version"][0], tuple(fields.get("requires-dist", ())))


def normalized(name: str) -> str:
    """A distribution's name as it is compared: in lower case, with single hyphens."""
    return re.sub(r"[-_.]+", "-", name).lower()


def version_of(name: str) -> str:
    """The version of the first distribution with this normalised name; empty if there is none."""
    for files in distributions():
        if isinstance(files, Folder) and not _may_be(files, name):
            continue
        try:
            found = metadata(files)
        except (ValueError, OSError):
            continue
        if found.name == name:
            return found.version
    return ""


def _may_be(folder: Folder, name: str) -> bool:
    """Whether a folder is named for this distribution."""
    return normalized(folder.path.name).startswith(name)
