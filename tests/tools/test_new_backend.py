"""A new backend is whole from the start, and what cannot be made leaves no trace."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitnet.core.errors import BitNetError, InvalidInputError
from new_backend import CHANGED, main, new_backend

NAME, PACKAGE = "ascend-npu", "packages/bitnet-ascend-npu"
"""Its module has another name, which is sorted before `bitnet.core`."""
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def workspace(tmp_path: Path, copy_workspace: Callable[[Path], Any]) -> Path:
    copy_workspace(tmp_path)
    return tmp_path


def snapshot(root: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


@pytest.fixture(scope="module", params=[(), ("--family", "opencl")], ids=["own kernels", "opencl"])
def run(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    copy_workspace: Callable[[Path], Any],
) -> Run:
    """Run a command in a copied workspace whose new package is installed beside this environment's."""
    options: tuple[str, ...] = request.param
    root = tmp_path_factory.mktemp("workspace")
    workspace = copy_workspace(root)
    run: Run = workspace.run
    before = snapshot(root)
    dry = run(sys.executable, "tools/new_backend.py", NAME, *options, "--dry-run").stdout.split("\n")
    assert snapshot(root) == before
    said = run(sys.executable, "tools/new_backend.py", NAME, *options).stdout.split("\n")
    after = snapshot(root)
    assert (f"make {PACKAGE}/src/bitnet/ascend_npu/kernels -> kernels/opencl" in said) == bool(options)
    # It did what the dry run says and the real run repeats, nothing else.
    lines = [line for line in said if line.startswith(("make ", "change "))]
    assert lines == dry[:-1]
    made = {line.split()[1] for line in lines if line.startswith("make ")}
    new = {path for path in after.keys() - before.keys() if not (root / path).is_dir() or (root / path).is_symlink()}
    assert new == made
    assert {path for path in before if after[path] != before[path]} == set(CHANGED)
    workspace.install(f"bitnet-{NAME}")
    return run


def test_it_is_listed_with_what_it_lacks_and_not_selected(run: Run) -> None:
    code = (
        "import json; from bitnet.core import list_devices; from bitnet.core.devices.select import select_device\n"
        f"(r,) = [r for r in list_devices() if r.name == '{NAME}']\n"
        f"fallback = select_device('{NAME}').info.backend\n"
        "print(json.dumps([r.distribution, r.probe.status.value, r.probe.reason, r.probe.hint, fallback]))"
    )
    distribution, status, reason, hint, fallback = json.loads(run(sys.executable, "-c", code).stdout)
    assert (distribution, status, fallback) == (f"bitnet-{NAME}", "unsupported", "cpu")
    assert f"{NAME} is not written yet" in reason
    assert f"packages/bitnet-{NAME}/README.md" in hint


def test_its_tests_pass_and_its_conformance_is_skipped_with_the_reason(run: Run) -> None:
    said = run(sys.executable, "-m", "pytest", "-n0", "-q", "-rs", "-p", "no:cacheprovider", PACKAGE).stdout
    summary = re.search(r"(\d+) passed, (\d+) skipped in", said)
    assert summary, said
    assert int(summary[1]) >= 6
    assert int(summary[2]) > 100
    skipped = [line for line in said.splitlines() if line.startswith("SKIPPED")]
    assert skipped
    assert all(f"{NAME} is unsupported: {NAME} is not written yet" in line for line in skipped)


def test_style_and_types_are_clean(run: Run) -> None:
    run(sys.executable, "-m", "ruff", "check", "--no-cache", PACKAGE)
    run(sys.executable, "-m", "ruff", "format", "--no-cache", "--check", PACKAGE)
    run(sys.executable, "-m", "mypy", "--cache-dir=.mypy_cache", PACKAGE)


def test_the_workspace_knows_it(run: Run) -> None:
    """The checks that tell what a package's author has forgotten."""
    which = "workspace_knows or extras or covers or needs or licence or version_stands"
    said = run(
        sys.executable, "-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", "-k", which, "tests/packaging"
    ).stdout
    summary = re.search(r"(\d+) passed, \d+ deselected in", said)
    assert summary, said
    assert int(summary[1]) >= 6


@pytest.mark.parametrize("name", ["", "Cuda", "a_b", "9x", "a--b", "-x", "x-", "../up", "é", "x" * 21])
def test_names_that_cannot_be(workspace: Path, name: str) -> None:
    refused(workspace, name, "lower-case letters, digits and single dashes")


@pytest.mark.parametrize("name", ["auto", "core", "gpu", "lambda", "lint", "oneapi", "testing"])
def test_names_that_mean_something_else(workspace: Path, name: str) -> None:
    refused(workspace, name, "is reserved|is there already")


@pytest.mark.parametrize(("name", "taken"), [("opencl", "packages/bitnet-opencl"), ("cpu", "kernels/cpu")])
def test_nothing_is_overwritten(workspace: Path, name: str, taken: str) -> None:
    refused(workspace, name, f"{taken} is there already")


def test_a_list_that_looks_otherwise(workspace: Path) -> None:
    (workspace / "tox.toml").write_text("env_list = [\n]\n[env.lint]\n")
    refused(workspace, NAME, r"tox\.toml has 0 places")


def refused(workspace: Path, name: str, why: str) -> None:
    before = snapshot(workspace)
    with pytest.raises(InvalidInputError, match=why):
        new_backend(name, workspace)
    assert snapshot(workspace) == before


def test_a_failing_lock_leaves_no_trace(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot(workspace)
    monkeypatch.setenv("UV", sys.executable)  # which knows no command `lock`
    with pytest.raises(BitNetError, match=r"lock` failed; nothing has changed\. It said:\n.*No such file"):
        new_backend(NAME, workspace)
    assert snapshot(workspace) == before


@pytest.mark.parametrize("at", ["kernels/ascend-npu", "tox.toml", "uv.lock"])
def test_a_failing_move_is_undone(workspace: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    before = snapshot(workspace)
    monkeypatch.setattr("new_backend.command", lambda *words, at: None)
    move = Path.replace

    def replace(self: Path, target: Path) -> Path:
        if target == workspace / at:
            raise OSError("the disk is full")
        return move(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(OSError, match="the disk is full"):
        new_backend(NAME, workspace)
    assert snapshot(workspace) == before


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cpu"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "new_backend: error: kernels/cpu is there already; nothing is overwritten.\n"
