"""What a notebook in a browser does: ``micropip`` installs our wheels from an index, and Python runs the demo model."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from bitnet.core import load_model

ROOT = Path(__file__).resolve().parents[2]
MICROPIP = "micropip==0.11.1 --hash=sha256:768de165adb8e66906039d8fec4127a57f522dfdf8e6fbff877a4616941ecfd3"
"""For Pyodide 314, whose own is on Pyodide's site."""
OLD_TAG, TAG = "pyodide_2024_0_wasm32", "pyemscripten_2026_0_wasm32"
"""What wheels of Pyodide 0.27.7 and of Pyodide 314 are called. The library in our wheel is the same for both."""
INSTALL = """
import json, sys
import pyodide_js
if not any("micropip" in folder for folder in folders):
    await pyodide_js.loadPackage("micropip", checkIntegrity=False)
import micropip
await micropip.install("bitnet-core", index_urls=[INDEX + "{package_name}/"], deps=DEPENDENCIES)
"""
ASK = """
from bitnet.core import load_model_async
model = await load_model_async(context=256, max_seqs=2)
messages = [{"role": "user", "content": QUESTION}]
whole = await model.chat_stream(messages, max_tokens=16, temperature=0.7, seed=7)
chunks = [chunk.text async for chunk in model.chat_stream([{"role": "user", "content": "What is 17 + 25?"}])]
model.close()
print(json.dumps([model.device.name, whole.tokens, chunks, bitnet_from()]))
"""
FROM = """
def bitnet_from():
    import bitnet.core
    return bitnet.core.__file__
"""
OPEN = """
import ctypes, importlib.metadata
found = importlib.metadata.distribution("bitnet-core")
(path,) = [file.locate() for file in found.files if file.name == "libbitnet_cpu_relaxed.wasm"]
library = ctypes.CDLL(str(path))
library.bitnet_level.restype = ctypes.c_void_p
library.bitnet_level_name.restype, library.bitnet_level_name.argtypes = ctypes.c_char_p, (ctypes.c_void_p,)
print(json.dumps([found.version, library.bitnet_level_name(library.bitnet_level(0)).decode()]))
"""
SECONDS = 300
"""Seconds in which a notebook starts, and in which it answers, on a busy machine."""
CELLS = """
import micropip
await micropip.install("bitnet-core", index_urls=[INDEX + "{package_name}/"])
---
from bitnet.core import load_model_async

model = await load_model_async(context=512)
async for chunk in model.chat_stream([{"role": "user", "content": "What is 17 + 25?"}]):
    print(chunk.text, end="")
---
print(model.device.name)
"""
"""Those of docs/browsers.md, and which device computes."""


def uv(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    found = os.environ.get("UV") or shutil.which("uv")
    assert found, "uv is not on the PATH"
    env = {**os.environ, **environment}
    return subprocess.run([found, *words], cwd=ROOT, env=env, check=False, capture_output=True, text=True, timeout=500)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheels of the core: the one that is pure, and the one for Pyodide."""
    folder = tmp_path_factory.mktemp("wheels")
    for target in ("any", "pyodide-wasm32"):
        built = uv("build", "-q", "--wheel", "--package", "bitnet-core", "-o", folder, BITNET_TARGET=target)
        assert built.returncode == 0, built.stderr
    return folder


def pack(name: str, folder: Path) -> None:
    """A wheel of an installed package, without compiled parts."""
    found = distribution(name)
    label = f"{name}-{found.version}"
    with zipfile.ZipFile(folder / f"{label}-py3-none-any.whl", "w") as packed:
        for file in found.files or ():
            if file.suffix == ".py":
                packed.write(str(file.locate()), file.as_posix())
        packed.writestr(f"{label}.dist-info/METADATA", found.read_text("METADATA") or "")
        packed.writestr(f"{label}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        packed.writestr(f"{label}.dist-info/RECORD", "")


@pytest.fixture
def index(
    wheels: Path, tmp_path: Path, served: Callable[[Path], AbstractContextManager[str]]
) -> Iterator[tuple[Path, Callable[[], str]]]:
    """A folder for wheels, and a function that gives the address of an index of them, as files on a server."""
    folder = tmp_path / "index"
    shutil.copytree(wheels, folder)

    def listed() -> str:
        for path in folder.glob("*.whl"):
            page = folder / path.name.split("-")[0].replace("_", "-").lower() / "index.html"
            page.parent.mkdir(exist_ok=True)
            with page.open("a", encoding="utf-8") as lines:
                lines.write(f'<a href="../{path.name}">{path.name}</a>\n')
        return address

    with served(folder) as address:
        yield folder, listed


@pytest.fixture
def run(node: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """``run(distribution, script, *folders)`` is what a script prints last in Pyodide, read as JSON."""

    def run(distribution: Path, script: str, *folders: Path) -> Any:
        shutil.copy(Path(__file__).parent / "run.mjs", tmp_path)
        (tmp_path / "script.py").write_text(script, encoding="utf-8")
        ended = node("node", ["run.mjs", str(distribution), "script.py", *map(str, folders)], cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr[-4000:]
        return json.loads(ended.stdout.splitlines()[-1])

    return run


def for_the_older_pyodide(folder: Path) -> None:
    """Make an index fit Pyodide 0.27.7, as numpy is not to be had for a newer one here: with the tag that it takes,
    and with what the core stands on."""
    (wheel,) = folder.glob(f"*{TAG}.whl")
    wheel.rename(folder / wheel.name.replace(TAG, OLD_TAG))
    (pure,) = folder.glob("bitnet_core-*-any.whl")  # micropip 0.9.0 takes the last of the wheels that fit
    pure.unlink()
    for name in ("click", "jinja2", "markupsafe"):
        pack(name, folder)


def test_a_notebook_installs_the_core_and_asks_the_demo_model(
    index: tuple[Path, Callable[[], str]], run: Callable[..., Any], with_numpy: Path
) -> None:
    """With the tokens that this Python gives."""
    folder, listed = index
    for_the_older_pyodide(folder)
    question = "Count to three."
    given = f"INDEX, QUESTION, DEPENDENCIES = {listed()!r}, {question!r}, True\n"
    device, tokens, chunks, place = run(with_numpy, given + INSTALL + FROM + ASK)
    assert "site-packages" in place
    assert device == "cpu:simd128"
    assert "".join(chunks) == "17 + 25 = 42."
    assert len(chunks) > 1
    with load_model(device="cpu") as model:
        messages = [{"role": "user", "content": question}]
        assert tuple(tokens) == model.chat(messages, max_tokens=16, temperature=0.7, seed=7).tokens


def test_the_newest_pyodide_takes_the_wheel_with_the_library(
    index: tuple[Path, Callable[[], str]],
    run: Callable[..., Any],
    newest: Path,
    tmp_path: Path,
    installed: Callable[[str, Any], None],
) -> None:
    """Of both wheels, by the tag of PEP 783."""
    _, listed = index
    (tmp_path / "requirements.txt").write_text(MICROPIP, encoding="utf-8")
    place = tmp_path / "micropip"
    words: list[str | Path] = [
        "pip",
        "install",
        "--python",
        sys.executable,
        "--python-version",
        "3.14",
        "--target",
        place,
        "--no-deps",
    ]
    installed("node", uv(*words, "--require-hashes", "-r", tmp_path / "requirements.txt"))
    shutil.copytree(Path(str(distribution("packaging").locate_file("packaging"))), place / "packaging")
    given = f"INDEX, DEPENDENCIES = {listed()!r}, False\n"
    version, level = run(newest, given + INSTALL + OPEN, place)
    assert version == distribution("bitnet-core").version
    assert level == "relaxed_simd128"


def jupyterlite(built: Path, folder: Path, cells: list[str]) -> None:
    """Put JupyterLite into a folder, with one notebook, ``ask.ipynb``."""
    folder.mkdir()
    for path in built.iterdir():
        if path.name not in ("jupyter-lite.json", "api", "files"):
            (folder / path.name).symlink_to(path)
    config = json.loads((built / "jupyter-lite.json").read_text(encoding="utf-8"))
    plugins = config["jupyter-config-data"]["litePluginSettings"]
    plugins["@jupyterlite/pyodide-kernel-extension:kernel"]["loadPyodideOptions"] = {"packages": []}
    (folder / "jupyter-lite.json").write_text(json.dumps(config), encoding="utf-8")
    listing = json.loads((built / "api" / "contents" / "all.json").read_text(encoding="utf-8"))
    listing["content"] = [listing["content"][0] | {"name": "ask.ipynb", "path": "ask.ipynb"}]
    (folder / "api" / "contents").mkdir(parents=True)
    (folder / "api" / "contents" / "all.json").write_text(json.dumps(listing), encoding="utf-8")
    code: dict[str, Any] = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": []}
    notebook = {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": {"name": "python"}}}
    notebook["cells"] = [{**code, "id": str(i), "source": source} for i, source in enumerate(cells)]
    (folder / "files").mkdir()
    (folder / "files" / "ask.ipynb").write_text(json.dumps(notebook), encoding="utf-8")


@pytest.mark.nightly  # starts JupyterLite and Pyodide: a minute
def test_a_notebook_of_jupyterlite(index: tuple[Path, Callable[[], str]], with_numpy: Path, browser: Browser) -> None:
    """In Chromium: JupyterLite 0.5.1 with its Pyodide kernel, from the wheel that has Pyodide 0.27.7."""
    folder, listed = index
    for_the_older_pyodide(folder)
    address = listed()
    (folder / "pyodide").symlink_to(with_numpy)
    jupyterlite(with_numpy.parent / "lite", folder / "lite", CELLS.replace("INDEX", repr(address)).split("---\n"))
    page = browser.new_page()
    page.set_default_timeout(SECONDS * 1000)
    page.goto(f"{address}lite/notebooks/index.html?path=ask.ipynb")
    expect(page.locator(".jp-CodeCell")).to_have_count(3, timeout=SECONDS * 1000)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    outputs = page.locator('[data-mime-type="application/vnd.jupyter.stdout"]')
    expect(outputs).to_have_text(["17 + 25 = 42.", "cpu:simd128"], timeout=SECONDS * 1000)
    warnings = page.locator('[data-mime-type="application/vnd.jupyter.stderr"]')
    expect(warnings).to_contain_text(["No GPU detected; falling back to CPU (simd128)."])
    page.close()
