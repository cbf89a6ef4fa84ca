"""Installed distributions and what they require, against ``importlib.metadata`` and ``packaging``."""

from __future__ import annotations

import importlib.metadata
import random
import secrets
import sys
import zipfile
from importlib.metadata import DistributionFinder, PathDistribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from bitnet.core.support import distributions, requirement
from bitnet.core.support.entry_points import entry_points


@pytest.mark.parametrize("group", ["console_scripts", "bitnet.backends", "bitnet.commands", "pytest11", "nothing"])
def test_entry_points_are_those_of_the_standard_library(group: str) -> None:
    found = {(point.name, point.value, point.distribution, point.version) for point in entry_points(group)}
    expected = {
        (point.name, point.value, distributions.normalized(point.dist.name), point.dist.version)
        for point in importlib.metadata.entry_points(group=group)
        if point.dist is not None
    }
    assert found == expected
    if group == "console_scripts":
        loaded = {point.name: point for point in entry_points(group)}["pytest"]
        (theirs,) = importlib.metadata.entry_points(group=group, name="pytest")
        assert loaded.load() is theirs.load()
        assert [*loaded.requires] == importlib.metadata.requires("pytest")


def test_versions_are_those_of_the_standard_library() -> None:
    for name in ("bitnet-core", "numpy", "click"):
        assert distributions.version_of(name) == importlib.metadata.version(name)
    assert distributions.version_of("bitnet") == ""


def _made(folder: Path, name: str) -> dict[str, str]:
    return {
        f"{name}-2.0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.0\n\nName: wrong\n",
        f"{name}-2.0.dist-info/entry_points.txt": "[bitnet.made]\nthing = os.path:join [extra]\n",
    }


def test_a_zip_file_on_the_path_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in _made(tmp_path, "zipped").items():
            archive.writestr(path, text)
    monkeypatch.syspath_prepend(str(wheel))
    (point,) = entry_points("bitnet.made")
    assert (point.distribution, point.version, point.load()) == ("zipped", "2.0", __import__("os").path.join)
    assert distributions.version_of("zipped") == "2.0"


def test_distributions_of_other_finders_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, text in _made(tmp_path, "hidden").items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")

    class Finder(DistributionFinder):
        def find_spec(self, *_: Any) -> None:
            return None

        def find_distributions(self, context: Any = None) -> Any:
            return iter([PathDistribution(tmp_path / "hidden-2.0.dist-info")])

    assert not [*entry_points("bitnet.made")]
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder()])
    assert [point.distribution for point in entry_points("bitnet.made")] == ["hidden"]


def test_requirements_are_judged_as_packaging_does(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = secrets.randbits(32)
    print("seed", seed)
    draw = random.Random(seed)

    def version() -> str:
        numbers = [str(draw.choice((0, 1, 2, 10))) for _ in range(draw.randint(1, 4))]
        return ".".join(numbers) + draw.choice(("",) * 16 + (".dev1", "rc1", ".post1", "+local"))

    held = 0
    for _ in range(1000):
        installed = version()
        operators = [draw.choice((">=", "<=", "==", "!=", ">", "<", "~=")) for _ in range(draw.randint(1, 2))]
        conditions = [f"{op} {version()}" for op in operators]
        line = f"Bitnet_Core {','.join(conditions)}"
        try:
            specifier = Requirement(line).specifier
            expected = "" if specifier.contains(installed, prereleases=True) else str(specifier)
        except ValueError:  # not valid, such as ~=1
            expected = ""
        monkeypatch.setattr(requirement, "core_version", lambda installed=installed: installed)
        assert requirement.unmet(["numpy>=1", line]) == expected, (line, installed)
        held += requirement._holds(line, installed)
    assert held > 50
