"""What an installed distribution requires of bitnet-core. Installers can be told to ignore it (``--no-deps``)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from bitnet.core.support.system import core_version

_OURS = re.compile(r"\s*bitnet[-_.]+core\b(?![-_.])", re.IGNORECASE)


def unmet(requires: Iterable[str] | None) -> str:
    """The versions of bitnet-core that a distribution requires, if the installed one is not among them; else empty.

    Args:
        requires: The distribution's ``Requires-Dist`` lines. Malformed ones and those of other packages are ignored.
    """
    installed = core_version()
    lines = [line for line in requires or () if _OURS.match(line)]
    if not (installed and lines):
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
