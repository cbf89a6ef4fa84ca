"""Each test has one tier, a tier that is left out costs nothing, and nightly tests run by day where they can fail."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from changes import changed

ROOT = Path(__file__).resolve().parents[2]
TIERS = ("unit", "device", "system")
Run = Callable[..., str]


def test_each_test_has_one_tier(request: pytest.FixtureRequest) -> None:
    wrong = [i.nodeid for i in request.session.items if sum(i.get_closest_marker(t) is not None for t in TIERS) != 1]
    assert wrong == []
    assert request.node in request.session.items


def test_every_path_of_the_table_is_there(pytestconfig: pytest.Config) -> None:
    (table,) = [vars(m)["TIERS"] for m in pytestconfig.pluginmanager.get_plugins() if hasattr(m, "TIERS")]
    assert [path for path in table if not (ROOT / path).exists()] == []


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run pytest on a workspace with one test in each tier; ``run(*options, file=source)`` adds files first."""
    shutil.copy(ROOT / "conftest.py", tmp_path)
    shutil.copytree(ROOT / "tools", tmp_path / "tools", ignore=lambda _, names: {*names} - {"changes.py"})
    markers = "".join(f"\n  {name}: x" for name in (*TIERS, "nightly"))
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\naddopts = --strict-markers\npythonpath = tools\nmarkers ={markers}\n"
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "BITNET_"))}

    def run(*options: str, code: int = 0, **files: str) -> str:
        places = {"unit": "packages/bitnet-core/tests", "device": "packages/bitnet-cuda/tests", "system": "tests"}
        for name in TIERS:
            folder = tmp_path / places[name]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"test_{name}.py").write_text(files.pop(name, "def test(): pass\n"))
        for name, source in files.items():
            (tmp_path / f"test_{name}.py").write_text(source)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
        done = subprocess.run(command, cwd=tmp_path, env=kept, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def test_each_tier_is_told_apart_and_timed(run: Run) -> None:
    said = run("-n0", "--durations=0")
    assert [line.split(",")[0] for line in said.splitlines() if line.startswith("tier ")] == [
        f"tier {name}: 1 tests" for name in ("system", "device", "unit")
    ]


@pytest.mark.parametrize(
    ("name", "expression"), [("unit", "unit"), ("device", "device and not nightly"), ("system", "not (unit or device)")]
)
def test_a_tier_that_is_left_out_is_not_imported(run: Run, name: str, expression: str) -> None:
    broken = {other: "raise SystemExit('imported')" for other in TIERS if other != name}
    assert "1 passed" in run("-n0", "-m", expression, **broken)


def test_a_file_of_no_tier_is_refused(run: Run) -> None:
    assert "has no tier" in run("-n0", code=4, other="def test(): pass\n")


def test_a_tier_by_hand_is_refused(run: Run) -> None:
    source = "import pytest\n@pytest.mark.unit\ndef test(): pass\n"
    assert "is marked unit" in run("-n0", code=4, system=source)


def test_nights(run: Run, tmp_path: Path) -> None:
    """By night all of them, by day those of which a path has changed."""
    (tmp_path / ".gitignore").write_text("*.pyc\n__pycache__/\n")
    night = (
        "import pytest\n@pytest.mark.nightly\ndef test_late(): pass\n"
        "@pytest.mark.nightly(unless_changed=['kernels'])\ndef test_built(): pass\n"
    )
    repository(tmp_path)

    def ran(*options: str) -> set[str]:
        return {*re.findall(r"test_system.py::(\w+) PASSED", run("-n0", "-v", *options, system=night))}

    assert ran() == set()
    assert ran("-m", "nightly") == {"test_late", "test_built"}
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/new.c").touch()
    assert ran() == {"test_built"}
    assert ran("-m", "nightly") == {"test_late", "test_built"}


def test_of_what_has_not_changed_some_are_drawn(run: Run, tmp_path: Path) -> None:
    """Others for each commit, all where it has changed, and the rest at night."""
    (tmp_path / ".gitignore").write_text("*.pyc\n__pycache__/\n")
    many = "import pytest\n@pytest.mark.parametrize('n', range(1000))\ndef test(n): pass\n"
    run("-n0", device=many)
    repository(tmp_path)
    commit(tmp_path, "c/three.c", "3")  # with the tests; what follows has changed nothing

    def ran(*options: str) -> set[str]:
        return {*re.findall(r"test_device.py::(test\[\d+\]) PASSED", run("-n0", "-v", *options, device=many))}

    commit(tmp_path, "c/four.c", "4")
    one = ran()
    assert 10 <= len(one) <= 70  # 31 are expected
    assert ran() == one
    assert ran("-m", "nightly") == {f"test[{n}]" for n in range(1000)} - one
    commit(tmp_path, "c/five.c", "5")
    assert ran() != one
    (tmp_path / "kernels/cuda").mkdir(parents=True)
    (tmp_path / "kernels/cuda/new.cu").touch()
    assert len(ran()) == 1000


def test_the_share_is_the_one_that_contributors_read_of(pytestconfig: pytest.Config) -> None:
    (share,) = [vars(m)["SHARE"] for m in pytestconfig.pluginmanager.get_plugins() if hasattr(m, "SHARE")]
    assert f"runs one in {share} of its tests" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def git(root: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    done = subprocess.run(["git", *who, *words], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(root: Path, path: str, text: str) -> str:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)
    git(root, "add", "-A")
    git(root, "commit", "-qm", path)
    return git(root, "rev-parse", "HEAD")


def repository(root: Path) -> None:
    """Two commits on ``main``, as a clone has them."""
    git(root, "init", "-q")
    commit(root, "a/one.c", "1")
    commit(root, "b/two.c", "2")
    git(root, "update-ref", "refs/remotes/origin/main", "HEAD")


def test_what_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BITNET_BASE", raising=False)

    def answer(*paths: str) -> bool:
        changed.cache_clear()
        return changed(*paths, root=tmp_path)

    assert answer("a"), "where there is no repository, git cannot tell"
    repository(tmp_path)
    # On main itself, the last commit.
    assert (answer("a"), answer("b"), answer("a", "b"), answer()) == (False, True, True, False)
    # On a branch, what it has on top of main.
    last = commit(tmp_path, "c/three.c", "3")
    assert (answer("a"), answer("b"), answer("c")) == (False, False, True)
    # Since a commit that is named; all is new where that is not there.
    monkeypatch.setenv("BITNET_BASE", last)
    assert not answer("a", "b", "c")
    (tmp_path / "a/one.c").write_text("not committed")
    assert (answer("a"), answer("b")) == (True, False)
    (tmp_path / "b/new.c").touch()
    assert answer("b")
    monkeypatch.setenv("BITNET_BASE", "0" * 40)
    assert answer("c")
    changed.cache_clear()
