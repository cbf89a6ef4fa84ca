"""A real ``bitnet serve`` with the demo model, and a real browser."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, Route, expect, sync_playwright

from ports import free_port

BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
START_SECONDS = 60.0
expect.set_options(timeout=20_000)


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., AbstractContextManager[str]]:
    """``serve(*options)`` starts a server, and ends it with its context; the context's value is its address."""

    @contextmanager
    def run(*options: str) -> Iterator[str]:
        port = free_port()
        log = tmp_path_factory.mktemp("serve") / "log.txt"
        command = [sys.executable, "-m", "bitnet.core", "serve", "--port", str(port), "--device", "cpu", "-t", "1"]
        environment = os.environ | {"BITNET_GPU_FAKE": "none"}
        with (
            log.open("wb") as output,
            subprocess.Popen([*command, *options], stdout=output, stderr=output, env=environment) as process,
        ):
            try:
                url = f"http://127.0.0.1:{port}/"
                wait_until_it_answers(url, process, log)
                yield url
            finally:
                process.terminate()

    return run


@pytest.fixture(scope="session")
def server(serve: Callable[..., AbstractContextManager[str]]) -> Iterator[str]:
    """The address of a server that runs."""
    with serve() as url:
        yield url


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Callable[[], tuple[str, subprocess.Popen[bytes]]]]:
    """Starts a slow server that the test may kill, each time at the same address."""
    port = free_port()
    started: list[subprocess.Popen[bytes]] = []

    def start() -> tuple[str, subprocess.Popen[bytes]]:
        log = tmp_path / f"log-{len(started)}.txt"
        command = [sys.executable, "-m", "bitnet.core", "serve", "--port", str(port), "--device", "cpu:numpy"]
        with log.open("wb") as output:
            started.append(subprocess.Popen(command, stdout=output, stderr=output))
        url = f"http://127.0.0.1:{port}/"
        wait_until_it_answers(url, started[-1], log)
        return url, started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def wait_until_it_answers(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(url + "health", timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)
    pytest.fail(f"the server did not start:\n{log.read_text(encoding='utf-8', errors='replace')}")


@pytest.fixture(
    scope="module"
)  # Playwright's event loop runs in this thread: other files' tests have loops of their own
def browser(require_device: Callable[[str, str | None], None]) -> Iterator[Browser]:
    require_device("chromium", None if BROWSER else "there is no Chromium (Debian: apt install chromium)")
    with sync_playwright() as playwright:
        # CI is root in a container, where Chromium's own sandbox cannot start.
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


class Trouble:
    """What the browser complained of: errors, refused scripts and styles, and requests that left the server."""

    def __init__(self, page: Page, server: str) -> None:
        self.said: list[str] = []
        self.left: list[str] = []
        self.expected: tuple[str, ...] = ()
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("request", self._request)
        self.server = server

    def _request(self, request: Request) -> None:
        here = request.url.startswith((self.server, "blob:"))
        if not here and not any(part in request.url for part in self.expected):
            self.left.append(request.url)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not any(part in message.text for part in self.expected):
            self.said.append(message.text)


class Talk:
    """What tests of conversations do, and streamed answers that no model has to give."""

    @staticmethod
    def ask(page: Page, text: str) -> None:
        page.get_by_label("Message", exact=True).fill(text)
        page.keyboard.press("Enter")

    @staticmethod
    def answered(page: Page, times: int = 1) -> str:
        """Waits for so many whole answers; the text of the last."""
        expect(page.locator(".message.assistant .facts")).to_have_count(times)
        return page.locator(".message.assistant .prose").last.inner_text()

    @staticmethod
    def menu(page: Page, entry: str) -> None:
        """Chooses an entry of the menu of the conversation that is shown."""
        page.get_by_role("button", name="Menu of the conversation").click()
        page.get_by_role("menuitem", name=entry).click()

    @staticmethod
    def rename(page: Page, name: str) -> None:
        Talk.menu(page, "Rename")
        page.get_by_label("Name of the conversation").fill(name)
        page.keyboard.press("Enter")

    @staticmethod
    def stored(page: Page) -> list[Any]:
        """The conversations in IndexedDB, read past the page's own code."""
        found: list[Any] = page.evaluate(
            """() => new Promise((resolve) => {
                const request = indexedDB.open("bitnet");
                request.onsuccess = () => {
                    const all = request.result.transaction("conversations").objectStore("conversations").getAll();
                    all.onsuccess = () => resolve(all.result);
                };
            })"""
        )
        return found

    @staticmethod
    def sse(*events: object) -> str:
        return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"

    @staticmethod
    def says(text: str, name: str = "content") -> dict[str, object]:
        return {"model": "m", "choices": [{"index": 0, "delta": {name: text}, "finish_reason": None}]}

    @classmethod
    def reply(cls, route: Route, text: str) -> None:
        route.fulfill(status=200, content_type="text/event-stream", body=cls.sse(cls.says(text)))


@pytest.fixture
def talk() -> type[Talk]:
    return Talk


@pytest.fixture(scope="module")
def watch(server: str) -> Callable[[Page], Trouble]:
    """Notes what the browser complains of in a page from now on."""
    return lambda page: Trouble(page, server)


@pytest.fixture
def trouble() -> list[Trouble]:
    return []


@pytest.fixture
def open_page(browser: Browser, server: str, trouble: list[Trouble]) -> Iterator[Callable[..., Page]]:
    """``open_page(view, **context)`` opens a view in a browser without memory. Any complaint fails the test."""
    contexts = []

    def open_it(view: str = "", expected: tuple[str, ...] = (), **options: object) -> Page:
        wanted: Any = {"viewport": {"width": 1280, "height": 800}, "reduced_motion": "reduce", **options}
        context = browser.new_context(**wanted)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        noted = Trouble(page, server)
        noted.expected = expected
        trouble.append(noted)
        page.goto(f"{server}#/{view}")
        page.wait_for_selector("h1")
        return page

    yield open_it
    for context in contexts:
        context.close()
    for noted in trouble:
        assert not noted.said, "the console has errors"
        assert not noted.left, "the page asked another server"


@pytest.fixture
def page(open_page: Callable[..., Page]) -> Page:
    """The page with a new conversation."""
    return open_page()
