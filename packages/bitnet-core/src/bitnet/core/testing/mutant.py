"""Runs tests with a text of the kernels replaced, to see whether they notice.

    python -m bitnet.core.testing.mutant OLD NEW PYTEST-ARGUMENTS...

Kernels are the files in folders named ``kernels``, as backends read them. The exit status is pytest's, :data:`UNUSED`
if no file that was read has the text, or a signal's if a guard has ended the process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

UNUSED = 9
"""The exit status of tests that read no kernel with the text."""


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

    def assert_caught(self, suite: Path, *options: str, environment: Mapping[str, str]) -> None:
        """Check that a test of the file fails with the change, or that a guard ends the process."""
        command = [sys.executable, *self.command(suite, *options)]
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
        assert done.returncode != UNUSED, f"no kernel has {self.old!r}"
        failed = done.returncode == 1 and "failed" in done.stdout
        assert failed or done.returncode < 0, done.stdout + done.stderr


def run(old: str, new: str, arguments: Sequence[str]) -> int:
    """Pytest's exit status with the text replaced, or :data:`UNUSED`."""
    plain, found = Path.read_text, []

    def read_text(self: Path, *args: Any, **named: Any) -> str:
        source = plain(self, *args, **named)
        if "kernels" not in self.parts:
            return source
        found.append(old in source)
        return source.replace(old, new)

    Path.read_text = read_text  # type: ignore[method-assign]
    status = int(pytest.main([*arguments]))
    return status if any(found) else UNUSED


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2], sys.argv[3:]))
