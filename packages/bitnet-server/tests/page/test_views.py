"""The page's other views, and what holds for all: accessible, small, nothing from elsewhere, and right on a phone."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import urllib.request
from collections.abc import Callable
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

import bitnet.server

CHANGED = pytest.mark.nightly(unless_changed=("packages/bitnet-server",))
PAGE = Path(bitnet.server.__file__).parent / "page"
MAX_BYTES = 150_000
MAX_BYTES_ON_DEMAND = 550_000
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True, "device_scale_factor": 2}
VIEWS = {
    "": "New conversation",
    "models": "Models",
    "compare": "Compare",
    "devices": "Devices",
    "metrics": "Metrics",
    "settings": "Settings",
}
RICH = """# Title

Text with `code`, [link](https://x.org) and

1. one
2. two
   - [ ] three

> quote

```python
def f(x):  # why
    return "a" + 1
```

| a | b |
|---|--:|
| 1 | 2 |
"""


def violations(page: Page) -> list[str]:
    """What axe finds, all of its rules on but those that are not about accessibility."""
    page.evaluate((files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    return [
        f"{one['id']}: {node['html'][:200]} {node['failureSummary']}"
        for one in found["violations"]
        for node in one["nodes"]
    ]


@CHANGED
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_nothing(open_page: Callable[..., Page], view: str, scheme: str) -> None:
    page = open_page(view, color_scheme=scheme)
    expect(page.locator("h1")).to_have_text(VIEWS[view])
    if view == "devices":
        page.wait_for_selector(".device", timeout=60_000)
    if view == "metrics":
        page.wait_for_selector(".chart")
        page.get_by_text("All values").first.click()
    assert violations(page) == []


@CHANGED
@pytest.mark.parametrize(("scheme", "options"), [("light", {}), ("dark", {}), ("light", PHONE)])
def test_axe_finds_nothing_in_a_conversation(
    open_page: Callable[..., Page], scheme: str, options: dict[str, object], talk: Any
) -> None:
    page = open_page(expected=("Failed to load resource",), color_scheme=scheme, **options)
    page.route("**/v1/chat/completions", lambda route: talk.reply(route, RICH))
    talk.ask(page, "Hello")
    if options:
        page.get_by_role("button", name="Send").click()
    talk.answered(page)
    assert violations(page) == []
    page.get_by_role("button", name="Edit the message").click()
    assert violations(page) == []
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Menu of the conversation").click()
    assert violations(page) == []
    page.get_by_role("menuitem", name="Options").click()
    assert violations(page) == []
    page.get_by_role("button", name="Done").click()
    talk.menu(page, "About the model")
    page.wait_for_selector(".pairs")
    assert violations(page) == []
    page.get_by_role("button", name="Close").click()
    page.keyboard.press("Control+/")
    assert violations(page) == []
    page.get_by_role("button", name="Close").click()
    page.get_by_role("button", name="Answer again").click()
    page.wait_for_selector(".versions")
    talk.answered(page)
    page.get_by_role("button", name="Show the answer as written").click()
    assert violations(page) == []
    page.get_by_role("button", name="Show the answer as written").click()
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.get_by_role("button", name="Answer again").click()
    page.wait_for_selector(".problem")
    assert violations(page) == []
    cut = talk.sse(talk.says("Half")).replace("data: [DONE]\n\n", "")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=cut))
    talk.ask(page, "word " * 800)
    if options:
        page.get_by_role("button", name="Send").click()
    page.wait_for_selector(".cut")
    expect(page.locator(".forgotten")).to_have_count(1)
    assert violations(page) == []


@CHANGED
def test_compare(page: Page) -> None:
    page.get_by_role("link", name="Compare").click()
    page.get_by_label("Prompt").fill("What is the capital of France?")
    with page.expect_request("**/v1/chat/completions"):
        page.get_by_role("button", name="Compare").click()
    expect(page.locator(".side .facts")).to_have_count(2)
    expect(page.locator(".side .prose")).to_have_text(["The capital of France is Paris."] * 2)
    expect(page.locator(".verdict")).to_have_text("The answers are too short to say which is faster.")
    page.get_by_label("Prompt").fill("Tell me a story.")
    page.get_by_role("button", name="Compare").click()
    expect(page.locator(".verdict")).to_have_text(re.compile(r"[AB] was [\d.]+ times as fast this time|about as fast"))
    expect(page.get_by_role("button", name="Compare")).to_be_visible()


@CHANGED
def test_compare_asks_each_side_for_its_own_model(page: Page, talk: Any) -> None:
    listed = {"data": [{"id": "first"}, {"id": "second"}]}
    page.route("**/v1/models", lambda route: route.fulfill(json=listed))
    asked: list[str] = []

    def answer(route: Any) -> None:
        asked.append(route.request.post_data_json["model"])
        talk.reply(route, f"I am {asked[-1]}.")

    page.route("**/v1/chat/completions", answer)
    page.reload()
    page.wait_for_selector("h1")
    page.get_by_role("link", name="Compare").click()
    page.get_by_label("Prompt").fill("Who are you?")
    page.get_by_role("button", name="Compare").click()
    expect(page.locator(".side .prose")).to_have_text(["I am first.", "I am second."])
    assert asked == ["first", "second"]


@CHANGED
def test_devices_are_those_of_the_server(open_page: Callable[..., Page], server: str) -> None:
    page = open_page("devices")
    page.wait_for_selector(".device", timeout=60_000)
    with urllib.request.urlopen(f"{server}devices", timeout=60) as response:
        devices = json.load(response)
    names = {device["name"] for backend in devices["backends"] for device in backend["devices"]}
    assert names
    assert set(page.locator(".device h3 code").all_inner_texts()) == names
    assert page.locator(".device.chosen h3 code").inner_text() == devices["selected"]
    assert devices["selected"].startswith("cpu:")
    assert set(page.locator(".backend h2").evaluate_all("all => all.map((one) => one.firstChild.data)")) == {
        b["name"] for b in devices["backends"]
    }


@CHANGED
def test_metrics_are_drawn(page: Page, server: str) -> None:
    """A counter's rate is what it grew by in the time between two readings."""
    grown = iter([100, 100 + 84, 100 + 2 * 84, 100 + 3 * 84])
    last = [0]

    def text(route: Any) -> None:
        last[0] = next(grown, last[0] + 84)
        body = "# HELP bitnet_tokens_total Tokens by kind\n# TYPE bitnet_tokens_total counter\n"
        body += f'bitnet_tokens_total{{kind="generated"}} {last[0]}\n'
        body += "# TYPE bitnet_requests_running gauge\nbitnet_requests_running 3\n"
        body += "# TYPE bitnet_queue_seconds histogram\n" + "".join(
            f'bitnet_queue_seconds_bucket{{le="{edge}"}} {count}\n'
            for edge, count in (("1", 0), ("2", last[0]), ("+Inf", last[0]))
        )
        route.fulfill(body=body, content_type="text/plain")

    page.route("**/metrics", text)
    page.clock.install(time=0)
    page.clock.pause_at(1000)
    page.get_by_role("link", name="Metrics").click()
    expect(page.get_by_role("img", name="Requests, last 3")).to_be_visible()
    page.clock.run_for(2000)
    expect(page.get_by_role("img", name="Tokens, last generated: 42 /s")).to_be_visible()
    expect(page.get_by_role("img", name="Queue, last median: 1.5 s; 95 %: 1.95 s")).to_be_visible()
    assert page.locator(".chart polyline").count() >= 4


@CHANGED
def test_the_servers_own_metrics_are_drawn(page: Page) -> None:
    page.get_by_role("link", name="Metrics").click()
    for title in ("Tokens", "Requests", "Time to first token", "KV cache"):
        expect(page.get_by_role("heading", name=title, exact=True)).to_be_visible()


@CHANGED
@pytest.mark.parametrize("view", VIEWS)
def test_a_phone_scrolls_in_one_direction(open_page: Callable[..., Page], view: str) -> None:
    page = open_page(view, **PHONE)
    page.wait_for_timeout(300)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate("document.querySelector('main').scrollWidth") <= 390
    small = page.evaluate(
        """() => [...document.querySelectorAll("button, a.button, select, main input, main textarea")]
            .filter((one) => one.checkVisibility({ visibilityProperty: true }))
            .map((one) => [one.outerHTML.slice(0, 80), (one.closest("label") ?? one).getBoundingClientRect()])
            .filter(([, box]) => box.height < 32 || box.width < 32)"""
    )
    assert small == []


@CHANGED
def test_a_phone_has_one_row_above_the_conversation(open_page: Callable[..., Page], talk: Any) -> None:
    page = open_page(**PHONE)
    talk.rename(page, "A conversation with a name that is longer than a phone is wide")
    page.reload()
    page.wait_for_selector("h1")
    row = ["#menu", "h1", "select.model", "[aria-label='Menu of the conversation']", "#top a"]
    boxes: list[Any] = [page.locator(place).bounding_box() for place in row]
    assert all(box["y"] >= 0 and box["y"] + box["height"] <= 56 for box in boxes), boxes
    assert all(left["x"] + left["width"] <= right["x"] + 1 for left, right in pairwise(boxes)), boxes
    scroller: Any = page.locator(".scroller").bounding_box()
    dock: Any = page.locator(".dock").bounding_box()
    assert scroller["y"] <= 56
    assert dock["y"] + dock["height"] <= 844


@CHANGED
def test_the_drawer_of_a_phone(open_page: Callable[..., Page]) -> None:
    page = open_page(**PHONE)
    menu = page.get_by_role("button", name="Menu", exact=True)
    expect(page.get_by_role("link", name="Devices")).not_to_be_visible()
    menu.click()
    expect(menu).to_have_attribute("aria-expanded", "true")
    expect(page.get_by_role("button", name="Close the menu")).to_be_focused()
    page.keyboard.press("Escape")
    expect(menu).to_be_focused()
    menu.click()
    page.get_by_role("link", name="Settings").click()
    expect(page.locator("h1")).to_have_text("Settings")
    expect(page.get_by_role("link", name="Devices")).not_to_be_visible()
    expect(page.get_by_label("API key")).to_be_editable()


@CHANGED
def test_the_switch_of_colours_is_kept(open_page: Callable[..., Page]) -> None:
    page = open_page("settings", color_scheme="light")
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.get_by_label("Dark").check()
    dark = page.evaluate(background)
    assert dark != light
    page.reload()
    page.wait_for_selector("h1")
    assert page.evaluate(background) == dark
    page.get_by_label("As the system").check()
    for scheme, colour in (("dark", dark), ("light", light)):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        page.wait_for_function(f"() => {background} === {json.dumps(colour)}")


@CHANGED
def test_scripts_and_styles_in_the_page_are_refused(open_page: Callable[..., Page], server: str) -> None:
    """The policy that the page is served with holds in the browser: this is the counter-check of “no complaint”."""
    page = open_page(expected=("Content Security Policy", "violates", "Refused", "blocked", "evil.example"))
    page.evaluate(
        """async () => {
            const refused = window.refused = [];
            addEventListener("securitypolicyviolation", (event) => refused.push(event.effectiveDirective));
            const script = document.createElement("script");
            try { script.textContent = "window.hit = 1"; } catch { refused.push("trusted types, script"); }
            document.body.append(script);
            const paragraph = document.createElement("p");
            try { paragraph.innerHTML = "<b>x</b>"; } catch { refused.push("trusted types, innerHTML"); }
            await fetch("https://evil.example/").catch(() => 0);
            const picture = new Image();
            picture.src = "https://evil.example/x.png";
        }"""
    )
    page.wait_for_function("() => ['connect-src', 'img-src'].every((one) => refused.includes(one))")
    assert page.evaluate("window.hit ?? null") is None
    assert "trusted types, innerHTML" in page.evaluate("refused")


@CHANGED
def test_the_first_paint_waits_for_no_other_request(server: str) -> None:
    """Style sheets are in the page, by hashes in its policy, and scripts come after what is painted."""
    with urllib.request.urlopen(server, timeout=60) as response:
        html, policy = response.read(), response.headers["content-security-policy"]
    head, _, body = html.partition(b"<body>")
    assert not re.search(rb"<link [^>]*(?:stylesheet|preload)|<script", head)
    styles = re.findall(rb"<style>(.*?)</style>", head, re.DOTALL)
    assert b"".join(styles) == b"".join(
        (PAGE / f"assets/{name}.css").read_bytes() for name in ("base", "chat", "views")
    )
    for style in styles:
        assert f"'sha256-{base64.b64encode(hashlib.sha256(style).digest()).decode()}'" in policy
    assert "unsafe" not in policy
    assert body.index(b"<main") < body.index(b"<script")


def test_the_page_is_small_and_asks_nobody_else() -> None:
    """What is loaded at the start; the libraries in ``vendor`` are loaded when they are needed."""
    contents = {path.relative_to(PAGE).as_posix(): path.read_bytes() for path in PAGE.rglob("*") if path.is_file()}
    assert "index.html" in contents
    sizes = {name: len(gzip.compress(content, 9)) for name, content in contents.items()}
    on_demand = {name for name in contents if name.startswith("assets/vendor/")}
    later = sum(sizes[name] for name in on_demand)
    start = sum(sizes.values()) - later
    print(f"{start} bytes compressed at the start, {later} on demand")
    assert start <= MAX_BYTES
    assert later <= MAX_BYTES_ON_DEMAND
    for name in on_demand:
        del contents[name]
    for name, content in contents.items():
        text = content.decode()
        addresses = set(re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", text)) - {"http://www.w3.org"}
        assert not addresses, (name, addresses)
        assert "innerHTML" not in text, name
        assert "style=" not in text, name


def test_every_asset_that_is_named_is_there() -> None:
    on_demand = set()
    for path in PAGE.rglob("*.js"):
        text = path.read_text(encoding="utf-8")
        later = set(re.findall(r'import\("\./([^"]+)"\)', text))
        for name in {*later, *re.findall(r'from "\./([^"]+)"', text)}:
            if name.startswith("vendor/"):  # of a package that was built (tools/vendor_page.py)
                continue
            assert (path.parent / name).is_file(), (path.name, name)
        on_demand |= later
    preloaded = re.findall(
        r'rel="modulepreload" href="assets/([^"]+)"', (PAGE / "index.html").read_text(encoding="utf-8")
    )
    assert preloaded == sorted({path.name for path in PAGE.glob("assets/*.js")} - {"main.js"} - on_demand), (
        "a chain of requests"
    )
    icons = set(re.findall(r'<symbol id="icon-(\w+)"', (PAGE / "index.html").read_text(encoding="utf-8")))
    used = set()
    for path in PAGE.rglob("*.js"):
        used |= set(re.findall(r'\b(?:icon|button)\("(\w+)"', path.read_text(encoding="utf-8")))
    assert used
    assert used <= icons
