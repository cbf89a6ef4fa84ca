"""Each test has one tier, a tier that is left out costs nothing, and tests of what has not changed are drawn."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import shares
from changes import RECORD, base, changed, differing

ROOT = Path(__file__).resolve().parents[2]
TIERS = ("unit", "device", "system")
Run = Callable[..., str]


def test_each_test_has_one_tier(request: pytest.FixtureRequest) -> None:
    wrong = [i.nodeid for i in request.session.items if sum(i.get_closest_marker(t) is not None for t in TIERS) != 1]
    assert wrong == []
    assert request.node in request.session.items


def test_every_path_of_the_table_is_there(pytestconfig: pytest.Config) -> None:
    (module,) = [m for m in pytestconfig.pluginmanager.get_plugins() if hasattr(m, "TIERS")]
    declared = {path for paths in module.LONG.values() for path in paths if not path.startswith(":")}
    listed = {*module.TIERS, *module.LONG, *module.EVERYWHERE, *declared}
    assert [path for path in listed if not (ROOT / path).exists()] == []


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run pytest on a workspace with one test in each tier.

    ``run(*options, file=source)`` adds files first; ``env`` and ``before`` are the child's variables and first call.
    """
    shutil.copy(ROOT / "conftest.py", tmp_path)
    shutil.copytree(
        ROOT / "tools", tmp_path / "tools", ignore=lambda _, names: {*names} - {"changes.py", "closure.py", "shares.py"}
    )
    markers = "".join(f"\n  {name}: x" for name in (*TIERS, "nightly"))
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\naddopts = --strict-markers\npythonpath = tools\nmarkers ={markers}\n"
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "BITNET_"))}
    kept["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # some plugins take seconds to import
    kept["BITNET_GPU_FAKE"] = "opencl"  # opens no driver to find out which devices are present

    def run(
        *options: str,
        code: int = 0,
        env: Mapping[str, str] = {},
        before: Callable[[], None] | None = None,
        **files: str,
    ) -> str:
        places = {"unit": "packages/bitnet-core/tests", "device": "packages/bitnet-cuda/tests", "system": "tests"}
        for name in TIERS:
            folder = tmp_path / places[name]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"test_{name}.py").write_text(files.pop(name, "def test(): pass\n"))
        for name, source in files.items():
            (tmp_path / f"test_{name}.py").write_text(source)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "xdist", *options]
        done = subprocess.run(
            command, cwd=tmp_path, env={**kept, **env}, capture_output=True, text=True, check=False, preexec_fn=before
        )
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


@pytest.fixture
def passed(tmp_path: Path, run: Run) -> Callable[[], None]:
    """``passed()`` records that CI has passed at the current commit of the workspace, which is made a repository."""
    (tmp_path / ".gitignore").write_text("*.pyc\n__pycache__/\n")
    run("-n0")
    repository(tmp_path)

    def passed() -> None:
        (tmp_path / RECORD).parent.mkdir(exist_ok=True)
        (tmp_path / RECORD).write_text(git(tmp_path, "rev-parse", "HEAD") + "\n")

    return passed


def test_nights(run: Run, tmp_path: Path, passed: Callable[[], None]) -> None:
    """By night all of them, by day those of which a path has changed."""
    night = (
        "import pytest\n@pytest.mark.nightly\ndef test_late(): pass\n"
        "@pytest.mark.nightly(unless_changed=['kernels'])\ndef test_built(): pass\n"
    )

    def ran(*options: str) -> set[str]:
        return {*re.findall(r"test_system.py::(\w+) PASSED", run("-n0", "-v", *options, system=night))}

    passed()
    assert ran() == set()
    assert ran("-m", "nightly") == {"test_late", "test_built"}
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/new.c").touch()
    assert ran() == {"test_built"}
    assert ran("-m", "nightly") == {"test_late", "test_built"}


IMPORTING = "def unused():\n    from bitnet.core.near import name\n"
MANY = f"import pytest\n@pytest.mark.parametrize('n', range(320))\ndef test(n): pass\n{IMPORTING}"
SOURCE = "packages/bitnet-core/src/bitnet/core/"


@pytest.fixture
def ran(run: Run, tmp_path: Path, passed: Callable[[], None]) -> Callable[..., set[str]]:
    """``ran(*options)``: the tests that run of a long file with 320, in a workspace that CI has passed."""

    def ran(*options: str, **env: str) -> set[str]:
        said = run("-n0", "-v", *options, device=MANY, env=env)
        found = {*re.findall(r"test_device.py::(test\[\d+\]) PASSED", said)}
        left_out = re.search(
            r"^left out (\d+): (\d+) of long files .* 0 nightly; `-m '(.*)'` runs all$", said, re.MULTILINE
        )
        assert left_out is None if "-m" in options else int(left_out[1] if left_out else 0) == 320 - len(found)
        return found

    for name, text in ("__init__", ""), ("near", "import bitnet.core.far"), ("far", ""), ("elsewhere", ""):
        commit(tmp_path, f"{SOURCE}{name}.py", text)
    ran()
    commit(tmp_path, "c/three.c", "3")  # with the tests; what follows has changed nothing
    passed()
    return ran


def test_of_what_has_not_changed_some_are_drawn(ran: Callable[..., set[str]], tmp_path: Path) -> None:
    """Others for each commit, all where it has changed, and the rest at night."""
    one = ran()
    assert 1 <= len(one) <= 40  # 10 are expected
    assert ran() == one
    assert ran("-m", "nightly") == {f"test[{n}]" for n in range(320)} - one
    assert len(ran("-m", "nightly or not nightly")) == 320
    commit(tmp_path, f"{SOURCE}elsewhere.py", "new = 1")
    assert 0 < len(ran()) < 320
    assert ran() != one
    (tmp_path / "kernels/cuda").mkdir(parents=True)
    (tmp_path / "kernels/cuda/new.cu").touch()
    assert len(ran()) == 320


def test_a_path_that_a_test_names_selects_it(ran: Callable[..., set[str]], tmp_path: Path) -> None:
    """Nothing declares it, and nothing imports it."""
    naming = "from pathlib import Path\n\nPAGE = Path(__file__).parents[3] / 'docs' / 'page.md'\n"
    commit(tmp_path, "packages/bitnet-cuda/tests/conftest.py", naming)
    commit(tmp_path, "docs/page.md", "1")
    commit(tmp_path, "docs/other.md", "1")
    (tmp_path / RECORD).write_text(git(tmp_path, "rev-parse", "HEAD"))
    assert len(ran()) < 320
    (tmp_path / "docs/other.md").write_text("2")
    assert len(ran()) < 320
    (tmp_path / "docs/page.md").write_text("2")
    assert len(ran()) == 320


def test_more_are_run_until_ci_has_passed_with_what_is_imported(ran: Callable[..., set[str]], tmp_path: Path) -> None:
    """However many commits ago it has changed, as far as the budget goes, and all where it is unknown when CI last
    passed. 40 of 320 are expected of tests that take 30 s each, and 10 where nothing has changed."""
    commit(tmp_path, f"{SOURCE}far.py", "new = 1")
    commit(tmp_path, "c/later.c", "4")
    assert len(ran()) == 320
    (tmp_path / shares.RECORD).write_text('{"packages/bitnet-cuda/tests/test_device.py": 30}')
    assert 22 < len(ran()) < 70
    head = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / RECORD).write_text(head)
    assert len(ran()) < 22
    (tmp_path / RECORD).write_text("0" * 40)
    assert len(ran()) == 320
    (tmp_path / RECORD).write_text(head)
    (tmp_path / f"{SOURCE}far.py").unlink()  # though who imports it has not changed
    assert 22 < len(ran()) < 70


def test_a_device_that_is_present_gets_all_of_its_tests(ran: Callable[..., set[str]]) -> None:
    assert len(ran(BITNET_GPU_FAKE="opencl")) < 320
    assert len(ran(BITNET_GPU_FAKE="opencl,cuda")) == 320


@pytest.mark.skipif(os.name == "nt", reason="signals are POSIX's")
@pytest.mark.parametrize("processes", ["-n0", "-n2"])
def test_programs_do_not_inherit_that_a_signal_is_ignored(run: Run, processes: str) -> None:
    """As under ``nohup``, or in the background of a script."""
    code = "import signal; print([int(signal.getsignal(n)) for n in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM)])"
    source = f"""
import os, signal, subprocess, sys
def test_child():
    assert subprocess.run([sys.executable, "-c", {code!r}], capture_output=True, text=True).stdout == "[0, 0, 0]\\n"
def test_self():
    os.kill(os.getpid(), signal.SIGHUP)
"""

    def ignore() -> None:
        for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)

    assert "4 passed" in run(processes, before=ignore, system=source)


@pytest.mark.parametrize("processes", ["-n0", "-n2"])
def test_a_run_says_what_was_left_out(run: Run, passed: Callable[[], None], processes: str) -> None:
    night = "import pytest\n@pytest.mark.nightly\ndef test_late(): pass\n"
    passed()
    said = run(processes, system=night)
    assert re.search(
        r"^left out \d+: \d+ of long files .*, 1 nightly; `-m 'nightly or not nightly'` runs all$", said, re.M
    )
    assert "left out" not in run(processes, "-m", "nightly or not nightly", system=night)


def test_the_share_is_the_one_that_contributors_read_of(pytestconfig: pytest.Config) -> None:
    (share,) = [vars(m)["SHARE"] for m in pytestconfig.pluginmanager.get_plugins() if hasattr(m, "SHARE")]
    assert f"runs one in {share} of its tests" in " ".join(
        (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split()
    )


def test_a_run_that_passes_records_how_long_tests_took(run: Run, tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    slow = "import time, pytest\n@pytest.mark.parametrize('n', [0, 0.4])\ndef test(n): time.sleep(n)\n"
    run("-n2", env={"BITNET_RECORD_SECONDS": "1"}, system=slow)
    recorded = json.loads((tmp_path / shares.RECORD).read_text())
    assert len(recorded) == 3
    assert 0.2 <= recorded["tests/test_system.py"] < 0.4
    run("-n0", code=1, env={"BITNET_RECORD_SECONDS": "1"}, system="def test(): assert 0")
    assert json.loads((tmp_path / shares.RECORD).read_text()) == recorded, "a run that fails may have ended early"


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
    """Two commits on ``main``."""
    git(root, "init", "-q")
    commit(root, "a/one.c", "1")
    commit(root, "b/two.c", "2")


def test_what_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BITNET_BASE", raising=False)

    def answer(*paths: str) -> bool:
        for function in (base, differing):
            function.cache_clear()
        return changed(*paths, root=tmp_path)

    assert answer("a"), "where there is no repository, git cannot tell"
    repository(tmp_path)
    assert answer("a"), "nothing says when CI passed"
    assert not answer(), "no path has not changed"
    monkeypatch.setenv("BITNET_BASE", "HEAD^")
    assert (answer("a"), answer("b"), answer("a", "b")) == (False, True, True)
    last = commit(tmp_path, "c/three.c", "3")
    monkeypatch.setenv("BITNET_BASE", last)
    assert not answer("a", "b", "c")
    (tmp_path / "a/one.c").write_text("not committed")
    assert (answer("a"), answer("b")) == (True, False)
    (tmp_path / "b/new.c").touch()
    assert answer("b")
    (tmp_path / "c/three.c").unlink()
    assert answer("c")
    # A commit that is not there, or of another history, is no base.
    git(tmp_path, "checkout", "-qf", "--orphan", "other")
    commit(tmp_path, "d/four.c", "4")
    assert answer("e")
    monkeypatch.setenv("BITNET_BASE", "0" * 40)
    assert answer("e")
    for function in (base, differing):
        function.cache_clear()
