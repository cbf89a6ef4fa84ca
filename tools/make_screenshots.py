"""Take the screenshots of the server's page that are in docs/images, from a server that runs.

uv run --group dev bitnet serve --port 8080
uv run --group dev tools/make_screenshots.py http://127.0.0.1:8080/
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Error, Page, expect, sync_playwright

IMAGES = Path(__file__).parent.parent / "docs" / "images"
DESKTOP: dict[str, Any] = {"viewport": {"width": 1200, "height": 760}}
PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 780}, "has_touch": True, "is_mobile": True}
QUESTIONS = ("What is the capital of France?", "Tell me a story.")


def converse(page: Page) -> None:
    for count, question in enumerate(QUESTIONS, 1):
        page.get_by_label("Message", exact=True).fill(question)
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".message.assistant .facts")).to_have_count(count, timeout=60_000)


def compare(page: Page) -> None:
    page.goto(page.url.split("#")[0] + "#/compare")
    page.get_by_label("Prompt").fill(QUESTIONS[1])
    page.get_by_role("button", name="Compare").click()
    expect(page.locator(".side .facts")).to_have_count(2, timeout=60_000)


def devices(page: Page) -> None:
    page.goto(page.url.split("#")[0] + "#/devices")
    page.wait_for_selector(".device", timeout=120_000)


def metrics(page: Page) -> None:
    """Charts of half a minute in which the model answers now and then."""
    page.goto(page.url.split("#")[0] + "#/metrics")
    page.wait_for_selector(".chart")
    for _ in range(8):
        page.evaluate(
            """(content) => fetch("v1/chat/completions", {
                method: "POST",
                headers: { "Content-Type": "application/json" },
                body: JSON.stringify({ messages: [{ role: "user", content }] }),
            }).then((response) => response.text())""",
            QUESTIONS[1],
        )
        page.wait_for_timeout(4000)


SHOTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "page": (converse, DESKTOP),
    "page-dark": (converse, DESKTOP | {"color_scheme": "dark"}),
    "page-phone": (converse, PHONE),
    "page-compare": (compare, DESKTOP),
    "page-devices": (devices, DESKTOP | {"color_scheme": "dark"}),
    "page-metrics": (metrics, DESKTOP),
}


def take(browser: Browser, url: str, name: str) -> None:
    act, options = SHOTS[name]
    with browser.new_context(reduced_motion="reduce", **options) as context:
        page = context.new_page()
        page.goto(url)
        page.wait_for_selector("h1")
        act(page)
        page.evaluate("document.activeElement.blur()")
        page.wait_for_timeout(300)
        path = IMAGES / f"{name}.png"
        page.screenshot(path=path)
        print(f"{path.name}: {path.stat().st_size} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="address of a server that runs, with its last slash")
    parser.add_argument(
        "names", nargs="*", default=list(SHOTS), metavar="NAME", help="screenshots to take; all of them without"
    )
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in SHOTS]:
        parser.error(f"there is no screenshot {unknown[0]}; there are {', '.join(SHOTS)}")
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    if browser_path is None:
        parser.error("there is no Chromium (Debian: apt install chromium)")
    IMAGES.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        try:
            for name in options.names:
                take(browser, options.url, name)
        except Error as error:
            raise SystemExit(f"make_screenshots: error: {error.message}") from None
        browser.close()


if __name__ == "__main__":
    main()
