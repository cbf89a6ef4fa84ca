"""A site of ``bitnet web build`` in headless Chromium: starting, answers, faults, and without a connection."""

from __future__ import annotations

import functools
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
from bitnet.server.web.build import build

SECONDS = 300
"""Seconds in which something happens on a busy machine."""
QUESTION, ANSWER = "What is 17 + 25?", "17 + 25 = 42."


class Server(ThreadingHTTPServer):
    """Serves a site, with ranges.

    Attributes:
        cut: Bytes after which the model's download breaks off; None: it does not.
        ranges: What parts of the model were asked for; None: all of it.
    """

    cut: int | None = None

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, with_numpy: Path) -> Path:
    """The site."""
    made = tmp_path_factory.mktemp("built") / "site"
    sizes = build(made, [default_model_path()], str(with_numpy))
    assert sum(sizes.values()) - sizes["models"] < 15e6
    return made


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    with serving(folder) as running:
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
    expect(needs).to_contain_text("10 MB for the engine")
    expect(needs).to_contain_text("6 MB for the model")
    assert server.ranges == []
    start(page)
    ask(page)
    assert server.ranges == [None]
