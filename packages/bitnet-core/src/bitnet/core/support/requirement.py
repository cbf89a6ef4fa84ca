"""What an installed distribution requires of bitnet-core. Installers can be told to ignore it (``--no-deps``)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from operator import eq, ge, gt, le, lt, ne

from bitnet.core.support.system import core_version

_OURS = re.compile(r"\s*bitnet[-_.]+core\b(?![-_.])", re.IGNORECASE)

_SIMPLE = re.compile(r"(>=|<=|==|!=|>|<)\s*(\d+(?:\.\d+)*)")
"""A condition on a version of numbers alone."""
_COMPARED = {">=": ge, "<=": le, "==": eq, "!=": ne, ">": gt, "<": lt}
_RELEASE = re.compile(r"\d+(?:\.\d+)*")


def unmet(requires: Iterable[str] | None) -> str:
    """The versions of bitnet-core that a distribution requires, if the installed one is not among them; else empty.

    Args:
        requires: The distribution's ``Requires-Dist`` lines. Malformed ones and those of other packages are ignored.
    """
    installed = core_version()
    lines = [line for line in requires or () if _OURS.match(line)]
    if not (installed and lines):
        return ""
    if all(_holds(line, installed) for line in lines):
        return ""
    from packaging.requirements import InvalidRequirement, Requirement

    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and not requirement.specifier.contains(installed, prereleases=True):
            return str(requirement.specifier)
    return ""


def _holds(line: str, installed: str) -> bool:
    """Whether a requirement certainly holds: one without a marker, by conditions on versions of numbers alone.

    ``packaging`` decides the others; importing it takes a tenth of a command's start.
    """
    conditions = [_SIMPLE.fullmatch(part.strip()) for part in _OURS.sub("", line, count=1).split(",")]
    if not _RELEASE.fullmatch(installed):
        return False
    return all(found and _COMPARED[found[1]](_numbers(installed), _numbers(found[2])) for found in conditions)


def _numbers(version: str) -> list[int]:
    """The numbers of a version, without zeros at its end: 1.0 is 1."""
    return list(map(int, re.sub(r"(\.0+)+$", "", version).split(".")))
