"""A site of ``bitnet web build`` in headless Chromium: starting, answers, faults, and without a connection."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from bitnet.core.model.default import default_model_path
from bitnet.server.web.build import RECORD

SECONDS = 300
"""Seconds in which something happens on a busy machine."""
QUESTION, ANSWER = "What is 17 + 25?", "17 + 25 = 42."


class Server(ThreadingHTTPServer):
    """Serves a site, with ranges.

    Attributes:
        folder: That of the site.
        cut: Bytes after which the model's download breaks off; None: it does not.
        ranges: What parts of the model were asked for; None: all of it.
    """

    cut: int | None = None

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
        self.folder = folder
        self.ranges: list[str | None] = []
        self.address = f"http://127.0.0.1:{self.server_address[1]}/"


class Handler(SimpleHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if not self.path.endswith(".gguf"):
            super().do_GET()
            return
        data = Path(self.translate_path(self.path)).read_bytes()
        asked = self.headers["range"]
        self.server.ranges.append(asked)
        begin = 0 if asked is None else int(asked.removeprefix("bytes=").split("-")[0])
        self.send_response(200 if asked is None else 206)
        if asked is not None:
            self.send_header("content-range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        self.send_header("content-length", str(len(data) - begin))
        self.send_header("etag", '"one"')
        self.end_headers()
        self.wfile.write(data[begin : self.server.cut])
        self.close_connection = True


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    with Server(folder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def server(built_site: Path) -> Iterator[Server]:
    with serving(built_site) as running:
        yield running


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page in a context of its own, whose storage is empty."""
    with browser.new_context() as context:
        opened = context.new_page()
        opened.set_default_timeout(SECONDS * 1000)
        yield opened


def start(page: Page) -> None:
    """Start what the site proposes, and wait until it can be asked."""
    page.get_by_role("button", name=re.compile("Start|Try again")).click()
    expect(page.locator("dialog.start")).to_have_count(0, timeout=SECONDS * 1000)


def ask(page: Page) -> None:
    page.get_by_role("textbox", name="Message").fill(QUESTION)
    page.keyboard.press("Enter")
    expect(page.locator("main").get_by_text(ANSWER).last).to_be_visible(timeout=SECONDS * 1000)


def test_the_demo_model_answers_on_the_cpu(server: Server, page: Page) -> None:
    """The site says what it needs before it downloads anything large."""
    page.goto(f"{server.address}?device=cpu")
    needs = page.locator("dialog.start dl")
    engine = json.loads((server.folder / RECORD).read_bytes())["bytes"]
    assert 5e6 < engine < 15e6
    expect(needs).to_contain_text(f"{engine / 1e6:.0f} MB for the engine")
    expect(needs).to_contain_text("6 MB for the model")
    assert server.ranges == []
    start(page)
    ask(page)
    assert server.ranges == [None]


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("delete Navigator.prototype.gpu;", "This browser has no WebGPU. The processor computes, which is slow."),
        ("GPU.prototype.requestAdapter = async () => null;", "finds no GPU. The processor computes, which is slow."),
    ],
)
def test_a_site_says_before_it_starts_that_no_gpu_computes(before: str, said: str, server: Server, page: Page) -> None:
    page.add_init_script(before)
    page.goto(server.address)
    expect(page.locator("dialog.start dl")).to_contain_text(said)


@pytest.mark.nightly  # starts Pyodide and compiles the kernels: a minute
def test_the_demo_model_answers_on_webgpu(browser: Browser, server: Server, page: Page) -> None:
    """Also after the browser's process for the GPU has ended in the middle of an answer."""
    page.goto(f"{server.address}?device=webgpu")
    expect(page.locator("dialog.start dl")).to_contain_text("WebGPU: google swiftshader")
    start(page)
    ask(page)
    expect(page.locator("main")).to_contain_text("webgpu:0")
    page.get_by_role("link", name="New conversation").first.click()
    page.get_by_role("textbox", name="Message").fill("Tell me a story about a dog.")
    page.keyboard.press("Enter")
    expect(page.locator("main .assistant .prose")).to_contain_text(re.compile(r"\w"), timeout=SECONDS * 1000)
    expect(page.get_by_role("button", name="Stop")).to_be_visible()  # it goes on
    browser.new_browser_cdp_session().send("Browser.crashGpuProcess")
    expect(page.get_by_text("Load the model again").first).to_be_visible(timeout=SECONDS * 1000)
    page.get_by_role("link", name="New conversation").first.click()
    for _ in range(SECONDS):  # the model is loaded again by itself
        if page.evaluate("async () => (await fetch('health')).ok"):
            break
        page.wait_for_timeout(1000)
    ask(page)


@pytest.mark.nightly  # starts Pyodide twice
def test_a_started_site_works_without_a_connection(built_site: Path, page: Page) -> None:
    with serving(built_site) as server:
        page.goto(f"{server.address}?device=cpu")
        start(page)
        own = 'async () => await caches.open((await caches.keys()).find((name) => name.startsWith("bitnet-site")))'
        count = f"async () => (await (await ({own})()).keys()).length"
        script = (built_site / "sw.js").read_text(encoding="utf-8").splitlines()[1]
        files = json.loads(script.removeprefix("const FILES = ").removesuffix(";"))
        for _ in range(SECONDS):
            if page.evaluate(count) == len(files):
                break
            page.wait_for_timeout(1000)
        assert page.evaluate(count) == len(files)
    page.reload()  # from what the browser has; the model starts by itself
    expect(page.locator("dialog.start")).to_have_count(1)
    expect(page.locator("dialog.start")).to_have_count(0, timeout=SECONDS * 1000)
    ask(page)


SPOIL = """async (kind) => {
  const cache = await caches.open((await caches.keys()).find((name) => name.startsWith("bitnet-start")));
  const [request] = (await cache.keys()).filter(({ url }) => url.includes(kind === "snapshot" ? "snapshot" : "files"));
  const response = await cache.match(request);
  const headers = new Headers(response.headers);
  let body = new Uint8Array(65536);
  if (kind === "place of a function") {
    const bytes = new Uint8Array(await response.arrayBuffer());
    const size = new Uint32Array(bytes.buffer, 0, 1)[0];
    const index = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + size)));
    const head = new TextEncoder().encode(JSON.stringify({ ...index, links: index.links + 1 }));
    body = new Uint8Array(await new Blob([Uint32Array.of(head.length), head, bytes.subarray(4 + size)]).arrayBuffer());
    const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", body));
    headers.set("x-sha256", Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join(""));
  }
  await cache.put(request, new Response(body, { headers }));
}"""
"""Puts something else in the place of what was made: another file, or one that says that a library's functions are
elsewhere."""
MADE = """async () => {
  const name = (await caches.keys()).find((name) => name.startsWith("bitnet-start"));
  return name ? (await (await caches.open(name)).keys()).length : 0;
}"""
"""How many files are made for the next start."""


def wait_until_made(page: Page) -> None:
    for _ in range(SECONDS):
        if page.evaluate(MADE) == 2:
            return
        page.wait_for_timeout(1000)
    raise AssertionError(f"{page.evaluate(MADE)} files are made for the next start, not 2")


def come_again(page: Page, address: str) -> None:
    """Open a site that was started before; it starts by itself."""
    page.goto(address)
    expect(page.locator("dialog.start")).to_have_count(1)
    expect(page.locator("dialog.start")).to_have_count(0, timeout=SECONDS * 1000)


@pytest.mark.nightly  # starts Pyodide five times
@pytest.mark.parametrize("spoilt", ["snapshot", "files", "place of a function"])
def test_the_next_start_uses_what_the_first_one_made(built_site: Path, page: Page, spoilt: str) -> None:
    """And what cannot be used is made again."""
    workers: list[str] = []
    page.on("worker", lambda worker: workers.append(worker.url.rsplit("/", 1)[-1]))

    with serving(built_site) as server:
        address = f"{server.address}?device=cpu"
        page.goto(address)
        start(page)
        assert page.evaluate(MADE) == 0
        ask(page)
        wait_until_made(page)
        come_again(page, address)
        ask(page)
        assert workers == ["worker.js", "keep.js", "worker.js"]
        page.evaluate(SPOIL, spoilt)
        come_again(page, address)
        assert page.evaluate(MADE) == 0
        ask(page)
        wait_until_made(page)


@pytest.mark.nightly  # starts Pyodide three times and compiles the kernels twice
def test_the_next_start_computes_on_webgpu(server: Server, page: Page) -> None:
    """Python's memory, which is kept, has no JavaScript objects: those of the GPU are the new start's."""
    address = f"{server.address}?device=webgpu"
    page.goto(address)
    start(page)
    ask(page)
    wait_until_made(page)
    come_again(page, address)
    assert page.evaluate(MADE) == 2
    ask(page)
    expect(page.locator("main")).to_contain_text("webgpu:0")


@pytest.mark.nightly  # starts Pyodide
def test_faults_of_downloads_are_said_and_leave_nothing_wrong(browser: Browser, server: Server, page: Page) -> None:
    """Storage that is full, a connection that breaks off, a file with another hash, one that is no model."""
    record = json.loads((server.folder / "site.json").read_text(encoding="utf-8"))
    record["models"][0]["sha256"] = "0" * 64
    page.route("**/site.json", lambda route: route.fulfill(json=record))
    page.goto(f"{server.address}?device=cpu")
    problem, again = page.get_by_role("alert"), page.get_by_role("button", name=re.compile("Start|Try again"))
    quota = page.context.new_cdp_session(page)
    origin = server.address.removesuffix("/")
    quota.send("Storage.overrideQuotaForOrigin", {"origin": origin, "quotaSize": 3_000_000})
    again.click()
    full = re.compile("storage is full after .* MB|has room for .* MB")  # browsers need not say how much room there is
    expect(problem).to_have_text(full, timeout=SECONDS * 1000)
    quota.send("Storage.overrideQuotaForOrigin", {"origin": origin})

    server.cut = 5_000_000
    again.click()
    expect(problem).to_contain_text("The download broke off after", timeout=SECONDS * 1000)
    expect(problem).to_contain_text("of 6.5 MB. Start again: it goes on from there.")
    server.cut = None
    server.ranges.clear()
    again.click()
    expect(problem).to_contain_text(f"not {'0' * 64}. It was deleted.", timeout=SECONDS * 1000)
    assert re.fullmatch(r"bytes=[1-9]\d{3,}-", str(server.ranges[0]))  # it went on
    expect(problem).to_contain_text(hashlib.sha256(default_model_path().read_bytes()).hexdigest())

    page.locator("#start-model").select_option(label="Another, from an address")
    page.locator("#start-address").fill(f"{server.address}index.html")
    again.click()
    expect(problem).to_contain_text("not a GGUF model. It was deleted.", timeout=SECONDS * 1000)
    page.locator("#start-address").fill("http://127.0.0.1:9/no.gguf")
    again.click()
    expect(problem).to_contain_text("http://127.0.0.1:9/no.gguf was not reached", timeout=SECONDS * 1000)
    names = """async () => {
      const models = await (await navigator.storage.getDirectory()).getDirectoryHandle("bitnet-models");
      const found = [];
      for await (const [name, handle] of models.entries()) if ((await handle.getFile()).size) found.push(name);
      return found;
    }"""
    assert page.evaluate(names) == []


HEAP = "getHeapMax=()=>4294901760"
"""How Pyodide's JavaScript says what its memory may grow to."""


@pytest.mark.nightly  # starts Pyodide three times
def test_a_tab_with_too_little_memory(server: Server, page: Page) -> None:
    """For Python, and for the model beside it. The stored file is as good as before: it answers where there is room."""
    script = (server.folder / "engine/pyodide/pyodide.asm.js").read_text(encoding="utf-8")
    assert script.count(HEAP) == 1
    for megabytes, said in ((30, "does not fit the memory"), (50, "exceed the available memory. Use a smaller model")):
        small = {"content_type": "text/javascript", "body": script.replace(HEAP, f"getHeapMax=()=>{megabytes << 20}")}
        page.route("**/pyodide.asm.js", lambda route, _, small=small: route.fulfill(**small))
        page.goto(f"{server.address}?device=cpu")
        page.get_by_role("button", name="Start").click()
        expect(page.get_by_role("alert")).to_contain_text(said, timeout=SECONDS * 1000)
        page.unroute_all()
    server.ranges.clear()
    page.reload()
    start(page)
    ask(page)
    assert server.ranges == []


MODULE = """async () => {
  const { load } = await import("./bitnet.js");
  const stages = new Set();
  const model = await load({ device: "cpu", context: 256, progress: ({ stage }) => stages.add(stage) });
  const messages = [{ role: "user", content: "What is 17 + 25?" }];
  const pieces = [];
  for await (const piece of model.stream(messages, { max_tokens: 12 })) pieces.push(piece);
  const controller = new AbortController();
  const seen = [];
  let aborted = "";
  try {
    for await (const piece of model.stream(messages, { signal: controller.signal })) {
      seen.push(piece);
      controller.abort();
    }
  } catch (error) {
    aborted = error.name;
  }
  const refused = await model.chat(messages, { temperature: -1 }).catch((error) => error.message);
  const whole = await model.chat(messages);
  const { name, device } = model;
  const receipt = await (await model.fetch("/v1/models")).json();
  model.close();
  const closed = await model.chat(messages).catch((error) => error.message);
  return { name, device, pieces, seen, aborted, refused, whole, closed, stages: [...stages], models: receipt.data };
}"""


@pytest.mark.nightly  # starts Pyodide
def test_the_module_for_other_pages(server: Server, page: Page) -> None:
    """``import { load } from "bitnet"``: chat, stream, abort."""
    page.route("**/mine.html", lambda route: route.fulfill(content_type="text/html", body="<!doctype html><p>mine"))
    page.goto(f"{server.address}mine.html")
    found = page.evaluate(MODULE)
    assert (found["name"], found["device"]) == ("bitnet-demo", "cpu:simd128")
    assert "".join(found["pieces"]) == found["whole"] == ANSWER
    assert len(found["pieces"]) > 1
    assert len(found["seen"]) == 1
    assert found["aborted"] == "AbortError"
    assert "temperature" in found["refused"]
    assert "closed" in found["closed"]
    assert {"python", "numpy", "packages", "model"} <= {*found["stages"]}
    assert [one["id"] for one in found["models"]] == ["bitnet-demo"]
