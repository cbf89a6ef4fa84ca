"""The wheels that the sdists make. By day they are built only where what decides it has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import release
from changes import BUILDS

pytestmark = pytest.mark.nightly(unless_changed=BUILDS)


def test_wheel_rebuilt_from_the_sdist_is_the_same(
    package: str, rebuilt: Path, wheel: Callable[[str], Path], wheel_files: Callable[[Path], dict[str, bytes]]
) -> None:
    """Native library included."""
    first, second = wheel_files(wheel(package)), wheel_files(rebuilt / wheel(package).name)
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []


def test_sdists_can_be_installed_alone_and_used(
    rebuilt: Path, locked: Path, packages: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    release.smoke(rebuilt, packages, "--constraint", locked)
    assert "17 + 25 = 42" in capsys.readouterr().out
