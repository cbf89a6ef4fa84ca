"""A site of ``bitnet web build`` in headless Firefox, whose WebAssembly computes: Firefox for Linux has no WebGPU."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bitnet.core import load_model

FIREFOX = shutil.which("firefox-esr") or shutil.which("firefox")
SECONDS = 300
"""Seconds in which something happens on a busy machine."""
QUESTIONS = ["What is 17 + 25?", "What is 8 + 5?"]
ENTER = "\ue007"


class Firefox:
    """A tab of Firefox, driven by Marionette, the protocol of Firefox's own tests and of geckodriver.

    Args:
        connection: To the port that Firefox has chosen.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(SECONDS)
        self._stream, self._count = connection.makefile("rwb"), 0
        self._receive()  # who it is
        self.call("NewSession")

    def call(self, command: str, **values: Any) -> Any:
        """The result of a WebDriver command."""
        self._count += 1
        words = json.dumps([0, self._count, f"WebDriver:{command}", values]).encode()
        self._stream.write(b"%d:%b" % (len(words), words))
        self._stream.flush()
        _, number, error, result = self._receive()
        assert number == self._count
        assert error is None, error
        return result

    def _receive(self) -> Any:
        length = b""
        while (digit := self._stream.read(1)) != b":":
            assert digit, "Firefox has ended"
            length += digit
        return json.loads(self._stream.read(int(length)))

    def goto(self, url: str) -> None:
        self.call("Navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """The value of JavaScript, awaited."""
        return self.call("ExecuteScript", script=f"return {expression};", args=[])["value"]

    def wait(self, expression: str, problem: str = "null") -> None:
        """Wait until an expression is true. One that names a problem, once it is true, fails the test."""
        end = time.monotonic() + SECONDS
        while not self.evaluate(f"Boolean({expression})"):
            said = self.evaluate(problem)
            assert not said, said
            assert time.monotonic() < end, f"not within {SECONDS} s: {expression}\n{self.text()}"
            time.sleep(0.2)

    def wait_for(self, promise: str) -> None:
        """Wait until an expression resolves to what is true."""
        end = time.monotonic() + SECONDS
        while not self.evaluate(promise):
            assert time.monotonic() < end, f"not within {SECONDS} s: {promise}\n{self.text()}"
            time.sleep(0.2)

    def text(self) -> str:
        return str(self.evaluate("document.body.innerText"))

    def press(self, keys: str) -> None:
        """Type into what has the focus."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self.call("PerformActions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])


@contextmanager
def started(profile: Path) -> Iterator[Firefox]:
    """Firefox with a profile in an empty folder, until the context ends."""
    (profile / "user.js").write_text('user_pref("marionette.port", 0);', encoding="utf-8")
    log, port = profile / "log", profile / "MarionetteActivePort"
    words = [str(FIREFOX), "--headless", "--marionette", "--profile", str(profile), "about:blank"]
    with log.open("w") as out, subprocess.Popen(words, stdout=out, stderr=out) as process:
        try:
            end = time.monotonic() + SECONDS
            while not (port.exists() and port.read_text()):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.1)
            with socket.create_connection(("127.0.0.1", int(port.read_text()))) as connection:
                yield Firefox(connection)
        finally:
            process.kill()


@pytest.fixture
def firefox(tmp_path: Path, require_device: Callable[[str, str | None], None]) -> Iterator[Firefox]:
    require_device("firefox", None if FIREFOX else "Firefox is not installed")
    with started(tmp_path) as opened:
        yield opened


MADE = """caches.keys().then(async (names) => {
  const name = names.find((name) => name.startsWith("bitnet-start"));
  return Boolean(name) && (await (await caches.open(name)).keys()).length === 2;
})"""
"""Whether what the next start takes is made."""


@pytest.mark.parametrize("starts", [1, pytest.param(2, marks=pytest.mark.nightly)])  # each some 20 s
def test_the_demo_model_answers(firefox: Firefox, built_address: str, starts: int) -> None:
    """As on the CPU, after the site has said that there is no WebGPU. What was started starts again by itself."""
    firefox.goto(built_address)
    firefox.wait("document.querySelector('dialog.start dl')?.textContent.includes('The processor computes')")
    assert "This browser has no WebGPU" in firefox.text()
    firefox.evaluate("document.querySelector('dialog.start button.primary').click()")
    for number, question in enumerate(QUESTIONS[:starts]):
        firefox.wait("!document.querySelector('dialog.start')", "document.querySelector('.start-problem')?.textContent")
        firefox.evaluate("document.querySelector('main textarea').focus()")
        firefox.press(question + ENTER)
        with load_model(device="cpu") as model:
            answer = model.chat([{"role": "user", "content": question}]).text
        firefox.wait(f"document.querySelector('main').innerText.includes({json.dumps(answer)})")
        firefox.wait("document.querySelector('main').innerText.includes('cpu:simd128')")
        assert number == 0 or firefox.evaluate(MADE)  # what is of no use is deleted
        if starts > 1:
            firefox.wait_for(MADE)
        firefox.goto(f"{built_address}?again#")
