"""Decode speed of a static site's engine on a browser's GPU, and of the native WebGPU device, in turns.

    python tools/measure_site_gpu.py --pyodide FOLDER [-m MODEL] [--browser PROGRAM] [--flags=FLAGS] [--rounds 5]

FOLDER has Pyodide's files, as for `bitnet web build`. The site's page loads the model with the browser's WebGPU device
and asks this tool's server for work, so the browser needs no driver beside it: any Chromium will do, without a network.
Both engines continue the same prompt by the same options; rates are by the engines' own clocks, from the first token to
the last. What the browser says of its adapter is printed before the model is loaded, what it logs goes to stderr.
The default flags are for Vulkan and EGL on Linux without a display: both loaders must find the driver by themselves, as
a variable that names a driver's file keeps Chromium from its own. Chromium's software device is had by
`--flags="--headless=new --no-sandbox --enable-unsafe-webgpu --use-webgpu-adapter=swiftshader"`.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import queue
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from bitnet.core import Model, load_model
from bitnet.core.errors import BitNetError
from bitnet.core.model.default import default_model_path
from bitnet.server.web.build import build
from folder_server import Quiet
from running import positive, run_tool

FLAGS = (
    "--headless=new --no-sandbox --enable-unsafe-webgpu --ignore-gpu-blocklist --enable-features=Vulkan "
    "--use-vulkan=native --disable-vulkan-surface --use-gl=angle --use-angle=gl-egl"
)
CONTEXT = 512
SAMPLING = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 7, "ignore_eos": True}
"""All of it is said, since the site's server has llama.cpp's defaults."""
PAGE = """<!doctype html>
<script type="module">
import { load } from "./bitnet.js";

const post = async (path, value) => (await fetch(path, { method: "POST", body: JSON.stringify(value) })).json();
let last = 0;
const progress = ({ stage, done, total }) => {
  if (done !== total && performance.now() - last < 1000) return;
  last = performance.now();
  post("progress", [stage, done ?? "", total ?? ""].join(" "));
};
const seen = async () => {
  if (!navigator.gpu) return null;
  const adapter = await navigator.gpu.requestAdapter({ powerPreference: "high-performance" })
    ?? await navigator.gpu.requestAdapter();
  if (adapter === null) return null;
  const { vendor, architecture, device, description, isFallbackAdapter } = adapter.info;
  const { maxBufferSize, maxStorageBufferBindingSize } = adapter.limits;
  return { vendor, architecture, device, description, isFallbackAdapter, features: [...adapter.features],
           maxBufferSize, maxStorageBufferBindingSize };
};
try {
  await post("turn", { browser: navigator.userAgent, webgpu: Boolean(navigator.gpu), adapter: await seen() });
  const model = await load({ device: "webgpu", context: CONTEXT, progress });
  let work = await post("turn", { device: model.device });
  for (;;) {
    const body = JSON.stringify({ model: model.name, return_tokens: true, cache_prompt: false, ...work });
    const headers = { "Content-Type": "application/json" };
    const answer = await model.fetch("/completion", { method: "POST", headers, body });
    if (!answer.ok) throw new Error(await answer.text());
    const { tokens, timings } = await answer.json();
    work = await post("turn", { tokens, rate: timings.predicted_per_second });
  }
} catch (error) {
  await post("turn", { error: error.message });
}
</script>
"""


class Turns:
    """The page's part of a measurement: it posts what it found, and is answered with its next work."""

    def __init__(self, seconds: float) -> None:
        self._found: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._work: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._seconds = seconds

    def take(self, found: dict[str, Any]) -> dict[str, Any]:
        """What the page posted; returns its next work, for which it waits."""
        self._found.put(found)
        return self._work.get()

    def give(self, work: dict[str, Any]) -> None:
        """The page's next work."""
        self._work.put(work)

    def found(self, browser: subprocess.Popen[bytes]) -> dict[str, Any]:
        """What the page posts next.

        Raises:
            BitNetError: The page failed, the browser ended, or the time has passed.
        """
        until = time.monotonic() + self._seconds
        while time.monotonic() < until:
            if (status := browser.poll()) is not None:
                raise BitNetError(f"The browser ended with status {status}; what it logged is above.")
            try:
                found = self._found.get(timeout=0.5)
            except queue.Empty:
                continue
            if "error" in found:
                raise BitNetError(f"The page failed: {found['error']}")
            return found
        raise BitNetError(f"The page posted nothing for {self._seconds:g} s; what the browser logged is above.")


class Handler(Quiet):
    """Serves the site, and takes what its page posts."""

    def __init__(self, *args: Any, turns: Turns, **options: Any) -> None:
        self._turns = turns
        super().__init__(*args, **options)

    def do_POST(self) -> None:
        posted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/turn":
            answer = self._turns.take(posted)
        else:
            answer = {}
            note(f"page: {posted}")
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


BEGAN = time.monotonic()


def note(text: str) -> None:
    """Say on stderr how far it is."""
    print(f"{time.monotonic() - BEGAN:6.1f} s  {text}", file=sys.stderr, flush=True)


@contextmanager
def opened(folder: Path, program: str, flags: str, turns: Turns) -> Iterator[subprocess.Popen[bytes]]:
    """In this context, a browser with an empty profile shows the page of a site."""
    handler = functools.partial(Handler, turns=turns, directory=str(folder))
    scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with scratch as profile, ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}/measure.html"
        words = [program, f"--user-data-dir={profile}", "--no-first-run", *shlex.split(flags), address]
        browser = subprocess.Popen(words, stdout=sys.stderr)
        try:
            yield browser
        finally:
            browser.terminate()
            try:
                browser.wait(10)
            except subprocess.TimeoutExpired:
                browser.kill()
            server.shutdown()


def native_turn(model: Model, prompt: str, tokens: int) -> tuple[list[int], float]:
    """Tokens, and tokens a second, of the native device."""
    done = model.generate(prompt, max_tokens=tokens, **SAMPLING)  # type: ignore[arg-type]
    return list(done.tokens), done.timings.decode_tokens_per_second or 0.0


def measure(
    folder: Path, given: argparse.Namespace, program: str
) -> tuple[str, str, list[tuple[float, float]], list[int]]:
    """The two devices; the rates of browser and native device in each round; how many first tokens were the same."""
    turns = Turns(given.seconds)
    rates: list[tuple[float, float]] = []
    same: list[int] = []
    with opened(folder, program, given.flags, turns) as browser:
        seen = turns.found(browser)
        note(json.dumps(seen))
        if seen["adapter"] is None:
            reason = "offers no adapter" if seen["webgpu"] else "has no WebGPU"
            raise BitNetError(f"The browser {reason}.", hint="Try other --flags; what the browser logged is above.")
        adapter = " ".join(filter(None, (seen["adapter"][n] for n in ("vendor", "architecture", "description"))))
        turns.give({})
        device = turns.found(browser)["device"]
        note(f"the page computes on {device}: {adapter}")
        if not device.startswith("webgpu"):
            raise BitNetError(f"The page computes on {device}, not on WebGPU.")
        with load_model(given.model, device=given.native, context=CONTEXT, max_seqs=1) as model:
            note(f"native: {model.device.name}: {model.device.description}")
            for turn in range(given.rounds + 1):  # the first one warms up
                prompt = f"Tell me story {turn} about a dog."

                def ask_page(prompt: str = prompt) -> tuple[list[int], float]:
                    turns.give({"prompt": prompt, "n_predict": given.tokens, **SAMPLING})
                    found = turns.found(browser)
                    return found["tokens"], found["rate"]

                if turn % 2:
                    page, own = ask_page(), native_turn(model, prompt, given.tokens)
                else:
                    own, page = native_turn(model, prompt, given.tokens), ask_page()
                note(f"{turn}: browser {page[1]:.1f}, native {own[1]:.1f} tokens/s")
                for where, (tokens, _) in (("browser", page), ("native device", own)):
                    if len(tokens) != given.tokens:
                        raise BitNetError(f"The {where} made {len(tokens)} tokens, not {given.tokens}.")
                if turn:
                    rates.append((page[1], own[1]))
                    pairs = zip(page[0], own[0], strict=True)
                    same.append(sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
            native = f"{model.device.name}, {model.device.description}"
    return f"{device} of the browser, {adapter}", native, rates, same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, default=default_model_path(), help="GGUF file [the demo model]")
    parser.add_argument("--pyodide", required=True, help="folder or address of Pyodide's files")
    parser.add_argument("--native", default="webgpu:0", help="the device that is compared [webgpu:0]")
    parser.add_argument("--browser", help="program [Chromium or Chrome on the PATH]")
    parser.add_argument("--flags", default=FLAGS, help=f"of the browser [{FLAGS}]")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--tokens", type=positive, default=128, help="of a decode")
    parser.add_argument("--seconds", type=positive, default=600, help="in which the page loads, or answers [600]")
    given = parser.parse_args()
    program = given.browser or shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        raise BitNetError("Chromium is not installed.", hint="Name a browser with --browser.")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "site"
        build(folder, [given.model], given.pyodide)
        (folder / "measure.html").write_text(PAGE.replace("CONTEXT", str(CONTEXT)), encoding="utf-8")
        note("the site is built")
        browser, native, rates, same = measure(folder, given, program)
    print("| device | decode, tokens/s |")
    print("| --- | --- |")
    for name, column in zip((browser, native), zip(*rates, strict=True), strict=True):
        print(f"| {name} | {statistics.median(column):.1f} ({min(column):.1f}-{max(column):.1f}) |")
    ratios = sorted(page / own for page, own in rates)
    print(f"\nbrowser by native: {statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})")
    print(f"first tokens that were the same, of {given.tokens}: {same}")


if __name__ == "__main__":
    run_tool(main)
