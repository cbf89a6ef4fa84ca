"""Time of a static site in headless Chromium from opening its page to the demo model's first text, and to each stage.

    uv run python tools/measure_site.py --pyodide FOLDER [--rounds 5]

FOLDER has Pyodide's files, as for `bitnet web build`. Each round has a profile of its own. Its first visit finds
nothing kept (cold): "Start" is pressed at once, and the question is asked as soon as the page takes one. Once the
site's files are kept, and what the page makes of them, the browser is started again with the same profile, and the
second visit starts by itself (warm). The server is on this machine: what a network takes comes on top of a cold visit.
A visit begins when the browser has come to rest: it prepares windows of its own for half of a second. Times are the
page's own, from its navigation. Processor time is that of all of the browser's processes, which other load stretches
less (Linux only).
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from playwright.sync_api import BrowserType, Page, TimeoutError, sync_playwright

from bitnet.core.errors import BitNetError
from bitnet.core.model.default import default_model_path
from bitnet.server.web.build import build
from bombs.measure import processor_seconds
from folder_server import serving
from running import positive, run_tool

SECONDS = 120
"""Seconds in which a page starts, answers or keeps the site."""
QUESTION = "What is 17 + 25?"
WATCH = """
window.reached = {};
const reach = (name) => name && !(name in reached) && (reached[name] = performance.now() / 1000);
new MutationObserver(() => {
  const status = document.querySelector("dialog.start [role=status]");
  reach(status?.textContent.split(":")[0]);
  if (status === null && "Loading Python …" in reached) reach("takes a question");
  if (document.querySelector("main .assistant .prose")?.textContent.trim()) reach("first text");
}).observe(document, { subtree: true, childList: true, characterData: true });
"""
"""Notes in ``reached`` when the page comes to each stage: seconds since its navigation."""
KEPT = """async () => {
  let count = 0;
  for (const name of await caches.keys()) count += (await (await caches.open(name)).keys()).length;
  return count;
}"""
"""How many files the browser keeps."""
MADE = 2
"""Of these, what it makes for the next start."""
IDLE_SECONDS = 0.03
"""Processor time that a browser at rest may take in half of a second."""
Stages = dict[str, float]
"""Seconds by the name of a stage."""


def browser_seconds(profile: str) -> float:
    """Processor time of the browser that has a profile, and of its child processes."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_text().split("\0")
        except OSError:  # it has ended
            continue
        if f"--user-data-dir={profile}" in command and "--type=" not in command[1]:
            return processor_seconds(int(path.name))
    raise BitNetError(f"No browser runs with the profile {profile}.")


def rest(page: Page, profile: str) -> float:
    """Wait until the browser does nothing, and return the processor time that it has taken.

    Raises:
        BitNetError: It does not come to rest within :data:`SECONDS`.
    """
    taken = [browser_seconds(profile)]
    for _ in range(2 * SECONDS):
        page.wait_for_timeout(500)
        taken.append(browser_seconds(profile))
        if taken[-1] - taken[-2] < IDLE_SECONDS:
            return taken[-1]
    raise BitNetError("The browser does not come to rest.")


def ask(page: Page, address: str, cold: bool) -> Stages:
    """Open the site and ask; the stages that the page came to.

    Raises:
        BitNetError: The page came to no answer; the message has what it shows.
    """
    page.set_default_timeout(SECONDS * 1000)
    page.add_init_script(WATCH)
    page.goto(address)
    if cold:
        page.get_by_role("button", name="Start").click()
    dialog = page.locator("dialog.start")
    dialog.wait_for(state="attached")  # a warm visit begins without it
    dialog.wait_for(state="detached")
    page.get_by_role("textbox", name="Message").fill(QUESTION)
    page.keyboard.press("Enter")
    try:
        page.locator("main .assistant .prose", has_text=re.compile(r"\S")).first.wait_for()
    except TimeoutError as error:
        shown = page.locator("body").inner_text()
        raise BitNetError(f"The page did not answer within {SECONDS} s. It shows:\n{shown}") from error
    found: Stages = page.evaluate("reached")
    return found


def keep(page: Page, files: int) -> None:
    """Wait until the browser keeps the site's files, and what it makes of them.

    Raises:
        BitNetError: It does not, within :data:`SECONDS`.
    """
    until = time.monotonic() + SECONDS
    while (kept := page.evaluate(KEPT)) < files:
        if time.monotonic() > until:
            raise BitNetError(f"The browser keeps {kept} of {files} files.")
        page.wait_for_timeout(200)


def measure(chromium: BrowserType, program: str, address: str, files: int) -> tuple[Stages, Stages]:
    """The stages of a cold visit and of a warm one."""
    found = []
    with tempfile.TemporaryDirectory() as profile:
        for cold in (True, False):
            with chromium.launch_persistent_context(profile, executable_path=program, args=["--no-sandbox"]) as context:
                page = context.new_page()
                before = rest(page, profile)
                stages = ask(page, address, cold)
                found.append(stages | {"processor time": browser_seconds(profile) - before})
                if cold:
                    keep(page, files)
    return found[0], found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pyodide", required=True, help="folder or address of Pyodide's files")
    parser.add_argument("--rounds", type=positive, default=5)
    arguments = parser.parse_args()
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        raise BitNetError("Chromium is not installed.")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "site"
        build(folder, [default_model_path()], arguments.pyodide)
        names = (folder / "sw.js").read_text(encoding="utf-8").splitlines()[1]
        files = len(json.loads(names.removeprefix("const FILES = ").removesuffix(";"))) + MADE
        with serving(folder) as address, sync_playwright() as playwright:
            site = f"{address}?device=cpu"
            rounds = [measure(playwright.chromium, program, site, files) for _ in range(arguments.rounds)]
    print("| until | cold, s | warm, s |")
    print("| --- | --- | --- |")
    for name in rounds[0][0]:
        cells = []
        for visits in zip(*rounds, strict=True):
            times = sorted(visit[name] for visit in visits if name in visit)
            cells.append(f"{statistics.median(times):.1f} ({times[0]:.1f}-{times[-1]:.1f})" if times else "")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    run_tool(main)
