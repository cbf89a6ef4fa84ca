"""Runs tests with a text of the kernels replaced, to see whether they notice.

    python -m bitnet.core.testing.mutant OLD NEW PYTEST-ARGUMENTS...

Kernels are those of a backend's :class:`~bitnet.core.gpu.KernelSources`. The exit status is pytest's, :data:`UNUSED`
if no kernel that was compiled has the text, or a signal's if a guard has ended the process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from bitnet.core.gpu import KernelSources

UNUSED = 9


class Mutant(NamedTuple):
    """A change of a kernel's source, and pytest's expression (``-k``) for tests that run it."""

    defect: str
    old: str
    new: str
    tests: str

    def command(self, suite: Path, *options: str) -> list[str]:
        """What follows ``python`` to run these tests of a file with the change."""
        selection = ["-n0", "-q", "-x", "-p", "no:cacheprovider", "-m", "nightly or not nightly", "-k", self.tests]
        return ["-m", __name__, self.old, self.new, *options, *selection, str(suite)]


def run(old: str, new: str, arguments: Sequence[str]) -> int:
    """Pytest's exit status with the text replaced, or :data:`UNUSED`."""
    plain, found = KernelSources._text, []

    def text(self: KernelSources, file: str) -> str:
        source = plain(self, file)
        found.append(old in source)
        return source.replace(old, new)

    KernelSources._text = text  # type: ignore[method-assign]
    status = int(pytest.main([*arguments]))
    return status if any(found) else UNUSED


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2], sys.argv[3:]))
