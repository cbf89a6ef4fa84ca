"""The demo model in headless Chromium, on the WebGPU of its software device, SwiftShader."""

from __future__ import annotations

import functools
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import sync_playwright

import bitnet.core
import bitnet.webgpu.source
from bitnet.core import load_model

pytestmark = pytest.mark.nightly  # starts Pyodide and compiles the kernels: a minute

HERE = Path(__file__).parent
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
ARGUMENTS = ["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--no-sandbox"]
ENTRY_POINTS = "[bitnet.backends]\nwebgpu = bitnet.webgpu.backend:BACKEND\n"
METADATA = "Metadata-Version: 2.1\nName: bitnet-webgpu\nVersion: 0.1.0\n"
QUESTIONS = ["What is 17 + 25?", "What is 8 + 5?"]
ASK = """
import json
from bitnet.core import list_devices, load_model_async

compiled = []
model = await load_model_async(
    device="webgpu", context=512, max_seqs=3, progress=lambda *counts: compiled.append(counts)
)
requests = [model.chat_stream([{"role": "user", "content": text}], max_tokens=12) for text in QUESTIONS]
answers = [await request for request in requests]
sampled = await model.chat_stream(
    [{"role": "user", "content": QUESTIONS[1]}], max_tokens=4, temperature=0.8, seed=5,
    repetition_penalty=1.2, logprobs=1,
)
found = [answer.tokens for answer in [*answers, sampled]]
name, description = model.device.name, model.device.description
kernels = model.kernels
model.close()
json.dumps([name, answers[0].text, found, kernels, compiled])
"""
LOSE = """
import json, js
from bitnet.core import load_model_async

async def load():
    return await load_model_async(device="webgpu", context=512, max_seqs=1)

def ask(model):
    return model.chat_stream([{"role": "user", "content": "What is 17 + 25?"}], max_tokens=12)

model, errors = await load(), []
request = ask(model)
async for chunk in request:
    break
await js.crashGpu()
for request in (request, ask(model)):
    try:
        await request
    except Exception as error:
        errors.append(f"{type(error).__name__}: {error}")
model.close()
model = await load()
json.dumps([errors, model.device.name, (await ask(model)).text])
"""
REFUSED = """
import json, logging
from bitnet.core import load_model_async

said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("bitnet").addHandler(handler)
model = await load_model_async(device="webgpu", context=64)
json.dumps([model.device.name, " ".join(said)])
"""
ANSWER_SECONDS = 300
"""Seconds in which a page answers on a busy machine; SwiftShader compiles for half of a minute."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, with_numpy: Path, pure: Path) -> Iterator[str]:
    """The address of a page whose ``run(script)`` runs Python that has the core and the WebGPU backend."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(HERE / "page.html", folder / "index.html")
    (folder / "pyodide").symlink_to(with_numpy)
    packages = folder / "packages"
    without = shutil.ignore_patterns("__pycache__", "_native", "*.spv")
    shutil.copytree(pure, packages)
    for module in (bitnet.core, bitnet.webgpu):
        shutil.copytree(next(iter(module.__path__)), packages / "bitnet" / module.__name__[7:], ignore=without)
    information = packages / "bitnet_webgpu-0.1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(METADATA, encoding="utf-8")
    (information / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")
    shutil.make_archive(str(packages), "zip", packages)
    handler = functools.partial(Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder, and logs nothing."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def chromium(site: str, require_device: Callable[[str, str | None], None]) -> Iterator[Callable[..., Any]]:
    """``chromium(script)`` runs Python in a page, and returns its last value, read as JSON."""
    require_device("chromium", None if CHROMIUM else "Chromium is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)

        def run(script: str, before: str = "") -> Any:
            page = browser.new_page()
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

        yield run
        browser.close()


def test_the_demo_model_gives_the_cpus_tokens(chromium: Callable[..., Any]) -> None:
    """Several sequences at once; also sampled with a penalty and log-probabilities."""
    name, text, found, kernels, compiled = chromium(f"QUESTIONS = {QUESTIONS!r}\n{ASK}")
    assert name == "webgpu:0"
    assert text == "17 + 25 = 42."
    assert all(kernel.endswith("_webgpu") for kernel in kernels)
    assert [done for done, _ in compiled] == list(range(1, compiled[-1][1] + 1))
    with load_model(device="cpu", context=512) as model:
        expected = [model.chat([{"role": "user", "content": q}], max_tokens=12).tokens for q in QUESTIONS]
        more: dict[str, Any] = {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.2, "logprobs": 1}
        expected.append(model.chat([{"role": "user", "content": QUESTIONS[1]}], max_tokens=4, **more).tokens)
    assert [tuple(tokens) for tokens in found] == expected


def test_a_lost_device_is_an_error_and_another_load_recovers(chromium: Callable[..., Any]) -> None:
    """The browser's process for the GPU ends in the middle of an answer."""
    errors, again, text = chromium(LOSE)
    assert all("DeviceLostError" in error and "Load the model again" in error for error in errors)
    assert len(errors) == 2
    assert again == "webgpu:0"
    assert text == "17 + 25 = 42."


def test_a_browser_without_webgpu_says_so(chromium: Callable[..., Any]) -> None:
    name, text = chromium(REFUSED, before="delete Navigator.prototype.gpu;")
    assert name == "cpu:numpy"
    assert "no WebGPU" in text
    assert "Use a browser with WebGPU" in text


def test_a_browser_that_gives_no_adapter_says_so(chromium: Callable[..., Any]) -> None:
    name, text = chromium(REFUSED, before="GPU.prototype.requestAdapter = async () => null;")
    assert name == "cpu:numpy"
    assert "finds no GPU" in text
