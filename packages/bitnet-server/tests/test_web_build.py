"""``bitnet web build``: what the folder holds, and what is refused. ``tests/browser`` runs a site in a browser."""

from __future__ import annotations

import hashlib
import io
import json
import re
import secrets
import shutil
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from bitnet.core.cli import main
from bitnet.core.model.default import default_model_path
from bitnet.server.models.threads import InCaller
from bitnet.server.web import pyodide
from folder_server import serving

LINK = re.compile(r'(?:src|href)="([^"#]+)"|from "(\.[^"]+)"|new URL\("([^"]+)", (?:import\.meta\.url|HERE)\)')


Build = Callable[..., tuple[int, str]]


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with other files in place of Pyodide's, and their hashes in place of the pinned ones."""
    folder = tmp_path / "pyodide"
    folder.mkdir()
    for name in pyodide.FILES:
        (folder / name).write_bytes(secrets.token_bytes(1000))
        digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        monkeypatch.setitem(pyodide.FILES, name, digest)
    return folder


@pytest.fixture
def build(capsys: pytest.CaptureFixture[str]) -> Build:
    """Runs the command; returns its exit status, and what it printed in one line."""

    def run(*words: str | Path) -> tuple[int, str]:
        status = main(["web", "build", *map(str, words)])
        captured = capsys.readouterr()
        return status, " ".join((captured.out + captured.err).split())

    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_folder_holds_all_that_its_files_name(build: Build, distribution: Path, tmp_path: Path) -> None:
    site = tmp_path / "made" / "site"
    status, said = build("-o", site, "--pyodide", distribution)
    assert status == 0, said
    assert {"page", "Pyodide", "numpy", "packages", "models"} <= set(said.split())
    for name, data in contents(site).items():
        if name.endswith((".js", ".html")) and "pyodide" not in name:
            for found in LINK.findall(data.decode()):
                address = next(filter(None, found))
                target = site / Path(name).parent / address.split("?")[0]
                if not address.startswith(("http", "${", "vendor/", "./vendor/")):
                    assert target.resolve().exists(), f"{name} names {address}"
    record = json.loads((site / "site.json").read_text(encoding="utf-8"))
    (model,) = record["models"]
    assert model["sha256"] == sha256(site / model["path"]) == sha256(default_model_path())
    assert model["bytes"] == (site / model["path"]).stat().st_size
    for name in pyodide.FILES:
        assert (site / "engine/pyodide" / name).read_bytes() == (distribution / name).read_bytes()


def test_the_policy_allows_the_pages_own_styles(build: Build, distribution: Path, tmp_path: Path) -> None:
    assert build("-o", tmp_path / "site", "--pyodide", distribution)[0] == 0
    html = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', html)
    assert policy is not None
    assert "frame-ancestors" not in policy[1]  # a browser ignores that in a page, and complains
    assert policy[1].endswith("trusted-types pdf-worker bitnet-engine")
    styles = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    assert any(".start" in style for style in styles)
    assert policy[1].count("'sha256-") == len(styles)
    assert html.index("engine/start.js") < html.index("assets/main.js")


def test_the_archive_has_the_backend_and_the_browsers_library_alone(
    build: Build, distribution: Path, tmp_path: Path
) -> None:
    assert build("-o", tmp_path / "site", "--pyodide", distribution)[0] == 0
    with zipfile.ZipFile(io.BytesIO((tmp_path / "site/engine/packages.zip").read_bytes())) as packed:
        names = packed.namelist()
        (entry_points,) = [name for name in names if re.match(r"bitnet_webgpu-.*/entry_points.txt", name)]
        assert b"bitnet.webgpu" in packed.read(entry_points)
        libraries = [packed.read(name) for name in names if re.fullmatch("bitnet/core/cpu/_native/.+", name)]
    assert len(libraries) == 2  # with relaxed SIMD and without
    assert all(library.startswith(b"\0asm") for library in libraries)
    assert any(name.endswith(".wgsl") for name in names)
    assert not [name for name in names if name.endswith((".so", ".pyc", ".gguf", ".spv", "ignore")) or "/page/" in name]
    assert {name.split("/")[0] for name in names} >= {"bitnet", "click", "jinja2", "markupsafe", "prometheus_client"}


def test_only_an_earlier_site_is_replaced(build: Build, distribution: Path, tmp_path: Path) -> None:
    site, model = tmp_path / "site", tmp_path / "other.gguf"
    shutil.copy(default_model_path(), model)
    assert build("-o", site, "--pyodide", distribution)[0] == 0
    first = contents(site)
    assert build("-o", site, "--pyodide", distribution)[0] == 0
    assert contents(site) == first  # equal, so browsers keep what they have
    assert build("-o", site, "--pyodide", distribution, "-m", model)[0] == 0
    assert (site / "weights/other.gguf").exists()
    assert not (site / "weights/bitnet-demo.gguf").exists()
    assert (site / "sw.js").read_bytes() != first["sw.js"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear", encoding="utf-8")
    status, said = build("-o", tmp_path / "mine", "--pyodide", distribution)
    assert status == 2
    assert "not an earlier site" in said
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_files_that_are_not_pyodides_are_refused(build: Build, distribution: Path, tmp_path: Path) -> None:
    name = secrets.choice([*pyodide.FILES])
    data = (distribution / name).read_bytes()
    (distribution / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    status, said = build("-o", tmp_path / "site", "--pyodide", distribution)
    assert status == 2
    assert f"{name} of {distribution} is not the one of Pyodide" in said
    (distribution / name).unlink()
    status, said = build("-o", tmp_path / "site", "--pyodide", distribution)
    assert f"has no {name}" in said
    assert not (tmp_path / "site").exists()


def test_pyodide_is_downloaded(build: Build, distribution: Path, tmp_path: Path) -> None:
    with serving(distribution) as root:
        address = root.rstrip("/")
        found = pyodide.files(root)
        (distribution / pyodide.NUMPY).unlink()
        status, said = build("-o", tmp_path / "site", "--pyodide", address)
    assert {name: hashlib.sha256(found[name]).hexdigest() for name in pyodide.FILES} == dict(pyodide.FILES)
    assert status == 1
    assert f"{pyodide.NUMPY} cannot be read from {address}" in said


@pytest.mark.parametrize("name", ["broken.gguf", "model-00001-of-00002.gguf"])
def test_a_file_that_no_site_can_offer_is_refused(build: Build, name: str, distribution: Path, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(secrets.token_bytes(5000))
    status, said = build("-o", tmp_path / "site", "--pyodide", distribution, "-m", tmp_path / name)
    assert status != 0
    assert name in said
    assert not (tmp_path / "site").exists()


def test_calls_run_where_they_are_submitted() -> None:
    """What takes the place of a thread where Python has none."""
    executor = InCaller()
    assert executor.submit(threading.get_ident).result() == threading.get_ident()
    failed = executor.submit(int, "one")
    with pytest.raises(ValueError, match="one"):
        failed.result()
