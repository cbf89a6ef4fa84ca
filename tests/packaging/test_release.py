"""The release, run dry: with the script that the workflow runs, on what it would publish."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

import ci_matrix
import release

VERSION = release.version()
TAG = {
    "GITHUB_REF_TYPE": "tag",
    "GITHUB_REF_NAME": f"v{VERSION}",
    "GITHUB_SERVER_URL": "https://github.com",
    "GITHUB_REPOSITORY": "bitnet-core/bitnet",
}

PUBLISHERS = {"2.4": (1, 13, 0), "2.5": (1, 14, 2)}
"""Metadata-Version → a publishing action that takes it; its release notes say which twine it has."""


def test_wheels_can_be_installed_alone_and_used(
    dist: Path, locked: Path, packages: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    release.smoke(dist, packages, "--constraint", locked)
    assert "17 + 25 = 42" in capsys.readouterr().out


def published(folder: Path, package: str) -> None:
    """A wheel of this version by someone else, as an index would have it, that an installer prefers to ours."""
    name = package.replace("-", "_")
    info, files = f"{name}-{VERSION}.dist-info", {"decoy.py": "raise SystemExit('published before')\n"}
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {package}\nVersion: {VERSION}\n"
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\nBuild: 9\n"
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text)}\n"
    with zipfile.ZipFile(folder / f"{name}-{VERSION}-9-py3-none-any.whl", "w") as archive:
        for path, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(path, text)


def test_what_is_published_already_is_not_tried_instead(
    wheel: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend was built and the core was not: the index has one of the same version, and it must not be taken."""
    index, dist = tmp_path / "index", tmp_path / "dist"
    index.mkdir()
    dist.mkdir()
    published(index, "bitnet-core")
    shutil.copy(wheel("bitnet-cuda"), dist)
    monkeypatch.setenv("UV_FIND_LINKS", str(index))
    found = release.uv("pip", "install", "--dry-run", "--no-index", "--target", tmp_path / "site", "bitnet-core")
    assert found == ""  # uv would take it
    with pytest.raises(SystemExit, match="bitnet-core was not found"):
        release.smoke(dist, ["bitnet-core", "bitnet-cuda"])


def test_a_wheel_that_answers_wrongly_is_refused(
    dist: Path, locked: Path, packages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "ANSWER", "43")
    with pytest.raises(SystemExit, match=r"to 'What is 17 \+ 25\?' it said .*42"):
        release.smoke(dist, packages[:1], "--constraint", locked)


def test_a_wheel_whose_library_does_not_open_is_refused(target_wheel: Callable[[str], Path], locked: Path) -> None:
    """The model would answer all the same, on numpy."""
    with pytest.raises(SystemExit, match="the native library is missing or does not open"):
        release.smoke(target_wheel("any").parent, ["bitnet-core"], "--constraint", locked)


def test_ready(monkeypatch: pytest.MonkeyPatch, root: Path, tmp_path: Path) -> None:
    for path in [root / "VERSION", *root.glob("packages/*/pyproject.toml")]:
        (tmp_path / path.relative_to(root)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, tmp_path / path.relative_to(root))
    (tmp_path / "CHANGELOG.md").write_text(f"## [Unreleased]\n## [{VERSION}] - 2030-01-01\n")
    monkeypatch.setattr(release, "ROOT", tmp_path)
    release.ready(TAG)
    for change, why in [
        ({"GITHUB_REF_NAME": "v99.0"}, "the tag is v99.0, and VERSION says"),
        ({"GITHUB_REPOSITORY": "other/fork"}, r"this is https://github.com/other/fork: set \[project.urls\]"),
    ]:
        with pytest.raises(SystemExit, match=why):
            release.ready({**TAG, **change})
        release.ready({**TAG, **change, "GITHUB_REF_TYPE": "branch"})
    (tmp_path / "CHANGELOG.md").write_text(f"## [Unreleased]\nno {VERSION}\n")
    with pytest.raises(SystemExit, match=r"CHANGELOG\.md has no section"):
        release.ready(TAG)


def test_a_build_requirement_without_its_hash_is_refused(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = release.uv

    def uv(*words: Any, **options: Any) -> str:
        said = export(*words, **options)
        if words[0] == "export":
            pinned = Path(words[-1])
            pinned.write_text(re.sub(r"(?s)^hatchling==.*?(?=^\S)", "", pinned.read_text(), flags=re.MULTILINE))
        return said

    monkeypatch.setattr(release, "uv", uv)
    with pytest.raises(SystemExit, match="hatchling"):
        release.build(tmp_path, "--sdist", "--package", "bitnet-cuda")


def test_every_build_requirement_is_pinned(root: Path, packages: list[str], spirv_build: ModuleType) -> None:
    with release.build_requirements() as path:
        text = path.read_text()
    entries = re.split(r"^(?=[\w.-]+==)", text, flags=re.MULTILINE)[1:]
    assert entries
    assert all("--hash=sha256:" in entry for entry in entries)
    needed = [*spirv_build.COMPILER]
    for package in packages:
        data = ci_matrix.toml(root / "packages" / package / "pyproject.toml")
        needed += data["build-system"]["requires"]
    for requirement in map(Requirement, needed):
        (version,) = re.findall(rf"^{re.escape(requirement.name)}==(\S+)", text, re.MULTILINE)
        assert version in requirement.specifier


@pytest.fixture
def jobs(root: Path) -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load((root / ".github/workflows/release.yml").read_text())["jobs"]
    return data


def needs(jobs: dict[str, Any], name: str) -> set[str]:
    """All jobs that must have passed before this one starts."""
    given = jobs[name].get("needs", [])
    direct = {given} if isinstance(given, str) else set(given)
    return direct.union(*(needs(jobs, other) for other in direct))


def test_a_red_commit_is_not_published(root: Path, jobs: dict[str, Any]) -> None:
    """Publishing waits for every job, CI's among them; a condition with a status function would not."""
    assert needs(jobs, "publish") == jobs.keys() - {"publish", "page"}
    assert needs(jobs, "page") == jobs.keys() - {"page"}  # and so is skipped where nothing is published
    assert jobs["publish"]["if"] == "github.ref_type == 'tag'"
    assert [name for name, job in jobs.items() if "if" in job or "continue-on-error" in job] == ["publish"]
    for name in ("ci", "nightly"):
        assert jobs[name]["uses"] == f"$/.github/workflows/{name}.yml"
        called = yaml.safe_load((root / f".github/workflows/{name}.yml").read_text())
        assert "workflow_call" in called[True]  # YAML 1.1 reads `on` as true
        assert not [job for job in called["jobs"].values() if "if" in job or "continue-on-error" in job]
        # A called workflow with the caller's concurrency group cancels it.
        assert "github.workflow" not in called["concurrency"]["group"]


def test_only_publishing_has_an_identity(jobs: dict[str, Any]) -> None:
    rights = {name: job["permissions"] for name, job in jobs.items()}
    assert rights.pop("publish") == {"id-token": "write"}
    assert rights.pop("page") == {"contents": "write"}
    assert not [step for step in jobs["page"]["steps"] if "checkout" in step.get("uses", "")]
    assert all(given == {"contents": "read"} for given in rights.values())
    steps = jobs["publish"]["steps"]
    assert not [step for step in steps if "run" in step]
    assert steps[-1]["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert steps[-1]["with"]["attestations"] is True


def test_bills_of_materials_name_what_the_lock_has(root: Path, packages: list[str], tmp_path: Path) -> None:
    release.sbom(tmp_path)
    locked = {entry["name"]: entry.get("version") for entry in ci_matrix.toml(root / "uv.lock")["package"]}
    assert {file.name for file in tmp_path.iterdir()} == {f"{package}-{VERSION}.cdx.json" for package in packages}
    for package in packages:
        bill = json.loads((tmp_path / f"{package}-{VERSION}.cdx.json").read_text(encoding="utf-8"))
        assert (bill["bomFormat"], bill["metadata"]["component"]["purl"]) == (
            "CycloneDX",
            f"pkg:pypi/{package}@{VERSION}",
        )
        parts = {part["name"]: part.get("version") for part in bill["components"]}
        project = ci_matrix.toml(root / "packages" / package / "pyproject.toml")["project"]
        assert {Requirement(line).name for line in project["dependencies"]} <= parts.keys()
        assert all(locked[name] == version for name, version in parts.items() if version)


def test_the_publishing_action_takes_our_metadata(
    root: Path, wheel: Callable[[str], Path], jobs: dict[str, Any]
) -> None:
    """It checks each file before it uploads any, and refuses a Metadata-Version that its twine does not know."""
    action = jobs["publish"]["steps"][-1]["uses"]
    text = (root / ".github/workflows/release.yml").read_text()
    (version,) = re.findall(rf"{re.escape(action)} # v(\d+)\.(\d+)\.(\d+)$", text, re.MULTILINE)
    with zipfile.ZipFile(wheel("bitnet-cuda")) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        written = archive.read(metadata).decode().partition("\n")[0].removeprefix("Metadata-Version: ")
    assert tuple(map(int, version)) >= PUBLISHERS[written]


def test_the_workflow_runs_what_is_tested_here(jobs: dict[str, Any]) -> None:
    steps = [step for job in jobs.values() for step in job.get("steps", [])]
    lines = [line for step in steps for line in step.get("run", "").splitlines()]
    assert lines
    for line in (line for line in lines if not line.startswith("gh release create ")):
        ours = re.search(r"(python3|uv run --no-project) tools/(release|ci_matrix)\.py ", line)
        assert ours or line == "uv run --frozen --only-group clients tools/vendor_page.py", line
    text = " ".join(lines)
    for word in ("ready", "wheel", "sdists", "rebuild", "complete", "smoke", "sbom"):
        assert f"release.py {word}" in text


def test_smoke_tries_every_package_on_some_runner() -> None:
    data = ci_matrix.load()
    for name in data["packages"]:
        runners = [r for r, cannot in data["smoke"].items() if name not in cannot.get("install", [])]
        builders = [r for r in runners if name not in data["smoke"][r].get("build", [])]
        assert len(runners) > 2, name
        assert len(builders) > 1, name
    named = {name for cannot in data["smoke"].values() for names in cannot.values() for name in names}
    assert named < set(data["packages"])


@pytest.mark.parametrize("words", [[], ["publish"], ["smoke", "dist"], ["wheel", "bitnet-core"]])
def test_wrong_use_says_what_there_is(words: list[str]) -> None:
    with pytest.raises(SystemExit, match=r"release\.py complete DIST"):
        release.main(words)
