"""The files of `.github`: their form, what judges their security, and what neither sees."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

FORMS = ".github/ISSUE_TEMPLATE"


@pytest.fixture(params=["ci", "docs", "nightly", "release"])
def workflow(request: pytest.FixtureRequest, root: Path) -> Path:
    return root / ".github/workflows" / f"{request.param}.yml"


def schema(name: str, path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{name}", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_workflow_is_tested(root: Path) -> None:
    assert {path.stem for path in (root / ".github/workflows").iterdir()} == {
        "ci",
        "docs",
        "every-night",
        "nightly",
        "release",
    }


def test_workflows_follow_the_schema(workflow: Path) -> None:
    done = schema("github-workflows", workflow)
    assert done.returncode == 0, done.stdout


def test_dependabot_follows_the_schema(root: Path) -> None:
    done = schema("dependabot", root / ".github/dependabot.yml")
    assert done.returncode == 0, done.stdout
    updates = yaml.safe_load((root / ".github/dependabot.yml").read_text())["updates"]
    assert {update["package-ecosystem"] for update in updates} == {"github-actions", "uv"}


def test_issue_forms_follow_the_schema(root: Path) -> None:
    for path in (root / FORMS).iterdir():
        done = schema(f"github-issue-{'config' if path.name == 'config.yml' else 'forms'}", path)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("old", "new"),
    [("type: textarea", "type: text"), ("id: report", "id: the report"), ("validations: {", "validation: {")],
)
def test_the_schema_finds_a_broken_issue_form(root: Path, tmp_path: Path, old: str, new: str) -> None:
    text = (root / FORMS / "2-device-report.yml").read_text(encoding="utf-8")
    assert old in text
    broken = tmp_path / "broken.yml"
    broken.write_text(text.replace(old, new, 1), encoding="utf-8")
    assert schema("github-issue-forms", broken).returncode == 1


def test_the_schema_finds_a_broken_workflow(tmp_path: Path, root: Path) -> None:
    broken = tmp_path / "ci.yml"
    broken.write_text((root / ".github/workflows/ci.yml").read_text().replace("runs-on:", "run-on:", 1))
    assert schema("github-workflows", broken).returncode == 1


def zizmor(folder: Path) -> list[str]:
    """What zizmor finds offline."""
    program = Path(sys.executable).with_name("zizmor")
    options = ["--offline", "--no-progress", "--no-exit-codes", "--format", "json"]
    done = subprocess.run([program, *options, folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [found["ident"] for found in json.loads(done.stdout)]


def test_zizmor_finds_nothing(root: Path) -> None:
    assert zizmor(root / ".github") == []


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ('tox -e "$PACKAGE"', "tox -e ${{ matrix.tox }}", "template-injection"),
        ("actions/checkout@3d3c42e5aac5ba805825da76410c181273ba90b1", "actions/checkout@main", "unpinned-uses"),
        ("permissions:\n  contents: read", "permissions: write-all", "excessive-permissions"),
        ("run: bash .ci/run", "uses: ./.ci", "self-repository"),  # of low severity
    ],
)
def test_zizmor_finds_what_is_put_there(root: Path, tmp_path: Path, old: str, new: str, found: str) -> None:
    text = (root / ".github/workflows/ci.yml").read_text()
    assert old in text
    folder = tmp_path / ".github/workflows"
    folder.mkdir(parents=True)
    (folder / "ci.yml").write_text(text.replace(old, new, 1))
    assert found in zizmor(tmp_path)


def test_actions_are_pinned_and_secrets_absent(workflow: Path) -> None:
    text = workflow.read_text()
    actions = re.findall(r"uses: *(?!\$/)(\S+)( # v[\d.]+)?", text)
    assert actions
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) and version for action, version in actions)
    assert text.count("actions/checkout@") == text.count("persist-credentials: false")
    assert "secrets." not in text


def test_jobs_have_few_rights_and_an_end(workflow: Path) -> None:
    data: dict[str, Any] = yaml.safe_load(workflow.read_text())
    assert data["permissions"] in ({}, {"contents": "read"})
    assert data["concurrency"]["group"]
    for name, job in data["jobs"].items():
        runs_tests = re.search(r"pytest|tox|\.ci/run", str(job))
        assert "uses" in job or job["timeout-minutes"] >= (60 if runs_tests else 10), name


@pytest.mark.skipif(os.name == "nt", reason=".ci/run is for Debian.")
def test_git_answers_in_a_clone_of_another_user(root: Path, tmp_path: Path) -> None:
    """As in a container job, whose steps are root's and whose clone is not; else every test seems to be changed."""
    clone, programs, said = tmp_path / "clone", tmp_path / "bin", tmp_path / "said"
    (clone / ".ci").mkdir(parents=True)
    shutil.copy(root / ".ci/run", clone / ".ci")
    programs.mkdir()
    asks = f'git rev-parse --show-toplevel >>"{said}" 2>&1'
    for place, body in {programs / "apt-get": "", programs / "python3": "", clone / ".uv/bin/uv": asks}.items():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"#!/bin/sh\n{body}\n")
        place.chmod(0o755)
    own = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path)}
    subprocess.run(["git", "init", "--quiet", clone], check=True)
    other = {"GIT_TEST_ASSUME_DIFFERENT_OWNER": "1"}  # git's own test suite says so to it
    refused = subprocess.run(["git", "rev-parse", "HEAD"], cwd=clone, env={**os.environ, **own, **other}, check=False)
    assert refused.returncode
    subprocess.run(["bash", ".ci/run"], cwd=clone, env={**os.environ, **own, **other}, check=True)
    assert set(said.read_text().split()) == {str(clone)}
