"""A library that builds on bitnet-core alone: built, installed outside the workspace, used, and checked for types."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

SAMPLE = Path(__file__).parent / "sample"
DOCS = Path(__file__).resolve().parents[2] / "docs"
GUIDED = ("docs/outside-the-tree.md", "docs/adding-a-backend.md", "packages/bitnet-core/src/bitnet/core/hal")
"""What the guide is, and what it is about."""
GUIDE, PARTS = DOCS / "outside-the-tree.md", DOCS / "adding-a-backend.md"
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def install(folder: Path, source: str) -> Path:
    """A folder with nothing but a distribution built from a folder's source."""
    uv = os.environ.get("UV") or shutil.which("uv")
    assert uv, "uv is not on the PATH"
    command = [uv, "pip", "install", "--python", sys.executable, "--target", "site", "--no-deps", f"./{source}"]
    built = subprocess.run(
        [*command, "--no-build-isolation", "--no-sources"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    return folder / "site"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample, built from a copy of its source."""
    folder = tmp_path_factory.mktemp("downstream")
    shutil.copytree(SAMPLE, folder / "sample")
    return install(folder, "sample")


@pytest.fixture
def run(site: Path, tmp_path: Path) -> Run:
    """Run a command as where the sample is installed, and nothing of ours is set."""

    def run(*command: str, status: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("BITNET_", "PYTHON", "MYPY"))}
        kept |= {"PYTHONPATH": str(site), "BITNET_CACHE_DIR": str(tmp_path / "cache")}
        done = subprocess.run(
            command, env={**kept, **env}, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == status, f"{done.stdout}{done.stderr}"
        return done

    return run


BITNET = str(Path(sysconfig.get_path("scripts")) / "bitnet")


def test_its_backend_is_listed_proved_selected_and_answers(run: Run) -> None:
    listed = json.loads(run(BITNET, "devices", "--json", BITNET_BACKEND_PRIORITY="sample").stdout)
    (backend,) = [b for b in listed["backends"] if b["name"] == "sample"]
    assert (backend["distribution"], backend["version"], backend["status"]) == ("bitnet-sample", "1.2.3", "ok")
    (device,) = backend["devices"]
    assert (device["name"], device["id"], device["memory"]) == ("sample:0", "sample-board-0001", 8 * 2**30)
    assert device["proof"]["passed"]
    assert listed["selected"] == "sample:0"

    asked = run(BITNET, "run", "--device", "sample", "What is 17 + 25?", "--receipt", "r.json", BITNET_LOG="info")
    assert "selected=sample:0" in asked.stderr
    assert "42" in asked.stdout
    verified = run(BITNET, "receipt", "verify", "r.json")
    assert "sample:0" in verified.stdout

    # Without the distribution, the name means nothing.
    gone = run(BITNET, "run", "--device", "sample", "Hi", status=2, PYTHONPATH="")
    assert gone.stderr.startswith("bitnet: error: there is no device 'sample'")


def test_its_kernels_are_cached_as_the_variables_say(run: Run, tmp_path: Path) -> None:
    """A backend that compiles, through the command line: what is compiled again, and what is found."""

    def compiled(**env: str) -> bool:
        said = run(BITNET, "run", "--device", "sample", "Hi", "-n", "1", BITNET_LOG="info", **env).stderr
        return "compiled the sample's kernels in" in said

    def entries(**env: str) -> int:
        return int(json.loads(run(BITNET, "cache", "info", "--json", **env).stdout)["entries"])

    assert compiled(BITNET_NO_KERNEL_CACHE="1")
    assert entries() == 0
    assert compiled()
    assert not compiled()
    elsewhere = {"BITNET_CACHE_DIR": str(tmp_path / "elsewhere")}
    assert compiled(**elsewhere)
    (entry,) = (tmp_path / "elsewhere" / "kernels").glob("*.kernel")
    entry.write_bytes(entry.read_bytes()[:-1] + b"!")
    assert compiled(**elsewhere)  # and the damaged entry is replaced
    assert not compiled(**elsewhere)
    run(BITNET, "cache", "clear", **elsewhere)
    assert (entries(), entries(**elsewhere)) == (1, 0)


def test_its_command_is_listed_and_runs(run: Run) -> None:
    assert "Answer a question in capital letters." in run(BITNET, "--help").stdout
    assert run(BITNET, "shout", "Tell me a story about a cat.").stdout.isupper()


CODE = """
import bitnet_sample, numpy as np
assert bitnet_sample.best_device() == "sample:0"
rng = np.random.default_rng()
w, x = rng.standard_normal((24, 40), np.float32), rng.standard_normal((3, 40), np.float32)
scale = np.abs(w).mean()
ternary = np.clip(np.rint(w / scale), -1, 1) * scale
with bitnet_sample.CompressedLinear(w) as layer:
    assert layer.device == "sample:0"
    difference = np.abs(layer(x) - x @ ternary.T).max()
assert 0 < difference < 40 * scale * np.abs(x).max() / 127, difference
assert "42" in bitnet_sample.answer("What is 17 + 25?")
"""


def test_its_library_computes_on_its_backend(run: Run) -> None:
    run(sys.executable, "-c", CODE, BITNET_BACKEND_PRIORITY="sample")


def test_its_backend_conforms(run: Run, tmp_path: Path) -> None:
    shutil.copy(SAMPLE / "pyproject.toml", tmp_path)
    shutil.copytree(SAMPLE / "tests", tmp_path / "tests")
    ran = run(sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider")  # as in a copy of the sample
    # Nothing is expected to fail, and nothing skipped but for features that the sample does not list.
    *lines, last = ran.stdout.splitlines()
    summary = re.fullmatch(r"(\d+) passed, (\d+) skipped in .*", last.strip("= "))
    assert summary, ran.stdout
    assert int(summary[1]) > 100
    lacking = [re.search(r"\[(\d+)\].* (has no [a-z0-9, -]+|prepares no sizes of steps)$", line) for line in lines]
    assert sum(int(found[1]) for found in lacking if found) == int(summary[2]), ran.stdout


USER = """
from bitnet.core import quantize
from bitnet_sample import CompressedLinear

quantize("no array")  # type: ignore[arg-type]
CompressedLinear([1.0])  # type: ignore[arg-type]
"""
"""Without our ``py.typed`` everything were ``Any`` and the comments unused, which strict mode tells."""


def test_it_type_checks_against_what_is_installed(run: Run, site: Path, tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER)
    shutil.copytree(site / "bitnet_sample", tmp_path / "bitnet_sample")
    run(sys.executable, "-m", "mypy", "--strict", f"--cache-dir={tmp_path / 'mypy'}", "user.py", "bitnet_sample")


NAMES = {"bitnet.toy": "bitnet_mine", '"toy"': '"mine"', "ToyDriver": "MineDriver"}
PLACES = {"packages/bitnet-toy/src/bitnet/toy/": "src/bitnet_mine/", "kernels/toy/": "src/bitnet_mine/kernels/"}
"""What the guide's table renames, and where."""


def renamed(text: str, names: dict[str, str]) -> str:
    for there, here in names.items():
        text = text.replace(there, here)
    return text


def follow(guide: str, package: Path) -> None:
    """Write the package that the guide describes: its own blocks, and those of the toy under the guide's names."""
    block = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
    toy = block.findall(PARTS.read_text(encoding="utf-8"))
    files = {renamed(path, PLACES): renamed(text, NAMES) for path, text in toy}
    files |= dict(block.findall(guide.partition("## A command")[0]))
    for path, text in {"src/bitnet_mine/__init__.py": "", **files}.items():
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_text(text, encoding="utf-8")


# Takes 11 s: a build, and three commands that open devices. test_adding_a_backend.py tests the same blocks in the tree.
@pytest.mark.nightly(unless_changed=GUIDED)
def test_the_guide_leads_to_a_backend(run: Run, tmp_path: Path) -> None:
    guide = GUIDE.read_text(encoding="utf-8")
    for there, here in (PLACES | NAMES).items():
        assert re.search(rf"^\| `{re.escape(there)}`[^|]*\| `{re.escape(here)}` \|$", guide, re.MULTILINE)
    follow(guide, tmp_path / "mine")
    path = str(install(tmp_path, "mine"))
    listed = json.loads(run(BITNET, "devices", "--json", PYTHONPATH=path).stdout)
    (found,) = [backend for backend in listed["backends"] if backend["name"] == "mine"]
    assert (found["distribution"], found["status"]) == ("bitnet-mine", "ok")
    assert found["devices"][0]["proof"]["passed"] is True
    assert "42" in run(BITNET, "run", "--device", "mine:0", "What is 17 + 25?", PYTHONPATH=path).stdout
    suite = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "mine/tests", "-k", "test_embed"]
    said = run(*suite, PYTHONPATH=path, BITNET_CONFORMANCE="small", BITNET_REQUIRE_DEVICES="mine:0").stdout
    assert re.search(r"\d+ passed", said), said
