"""Texts of any size: words longer than a phone is wide, and answers of a hundred thousand parts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

import bitnet.server

pytestmark = pytest.mark.nightly(unless_changed=("packages/bitnet-server",))

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
LONG = "unbroken" * 50
RICH = f"""# {LONG}

{LONG} `{LONG}` **{LONG}** [{LONG}](https://x.org/{LONG}) https://x.org/{LONG}

1. {LONG}
   - {LONG}
     - {LONG}

> {LONG}
> > {LONG}

```{LONG}
{LONG}
```

| {LONG} | b |
|---|---|
| {LONG} | {LONG} |
"""
WIDE = """() => [...document.querySelectorAll("body *")]
    .filter((one) => one.checkVisibility({ visibilityProperty: true }) && !one.closest(".visually-hidden, #sidebar"))
    .filter((one) => {
        for (let box = one.parentElement; box; box = box.parentElement) {
            if (box.matches("main, .scroller")) break;
            if (["auto", "scroll", "hidden"].includes(getComputedStyle(box).overflowX)) return false;
        }
        return true;
    })
    .filter((one) => one.getBoundingClientRect().right > innerWidth + 0.5 || one.getBoundingClientRect().left < -0.5)
    .map((one) => `${one.tagName}.${one.className}: ${one.textContent.slice(0, 40)}`)"""
"""What of the page reaches over a side of the screen, except inside boxes that scroll or cut by themselves."""


def fits(page: Page) -> None:
    assert page.evaluate(WIDE) == []
    for scroller in ("html", "main", ".scroller"):
        for one in page.locator(scroller).all():
            width, room = one.evaluate("one => [one.scrollWidth, one.clientWidth]")
            assert width <= room, scroller


@pytest.fixture
def phone(open_page: Callable[..., Page]) -> Page:
    """A phone on which a model, its device and its facts have long names."""
    page = open_page(expected=("Failed to load resource",), **PHONE)
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": LONG}]}))
    page.route("**/metrics", lambda route: route.fulfill(body=f'bitnet_{LONG}{{kind="{LONG}"}} 1\n'))
    backend = {"name": LONG, "distribution": LONG, "version": "1", "status": LONG, "reason": LONG, "hint": LONG}
    device = {"name": f"{LONG}:0", "description": LONG, "vendor": LONG, "type": LONG, "details": {LONG: LONG}}
    listed = {"selected": f"{LONG}:0", "summary": LONG, "backends": [{**backend, "devices": [device]}]}
    page.route("**/devices", lambda route: route.fulfill(json=listed))
    page.reload()
    page.wait_for_selector("h1")
    return page


def answers(page: Page, talk: Any, text: str) -> None:
    said = {**talk.says(text), "model": LONG}
    headers = {"x-bitnet-device": LONG}
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, content_type="text/event-stream", headers=headers, body=talk.sse(said)),
    )


def ask(page: Page, talk: Any, text: str) -> None:
    talk.ask(page, text)
    page.get_by_role("button", name="Send").click()


def test_a_conversation_is_as_wide_as_a_phone(phone: Page, talk: Any) -> None:
    answers(phone, talk, RICH)
    talk.menu(phone, "Options")
    phone.get_by_label("System prompt").fill(LONG)
    fits(phone)
    phone.get_by_role("button", name="Done").click()
    ask(phone, talk, f"{LONG} {LONG}\n{LONG}")
    talk.answered(phone)
    fits(phone)
    phone.get_by_label("Message", exact=True).fill(LONG)
    phone.get_by_role("button", name="Edit the message").click()
    fits(phone)
    talk.menu(phone, "Rename")
    fits(phone)
    phone.reload()
    talk.answered(phone)
    fits(phone)
    phone.get_by_role("button", name="Menu", exact=True).click()
    sidebar = phone.locator("#sidebar").evaluate("one => [one.scrollWidth, one.clientWidth]")
    assert sidebar[0] <= sidebar[1]


def test_an_error_is_as_wide_as_a_phone(phone: Page, talk: Any) -> None:
    error = json.dumps({"error": {"message": LONG, "code": LONG}})
    phone.route("**/v1/chat/completions", lambda route: route.fulfill(status=500, body=error))
    ask(phone, talk, LONG)
    expect(phone.get_by_role("alert")).to_contain_text(LONG[1:])
    fits(phone)


def test_the_other_views_are_as_wide_as_a_phone(phone: Page, server: str, talk: Any) -> None:
    answers(phone, talk, RICH)
    phone.goto(f"{server}#/compare")
    phone.get_by_label("Prompt").fill(LONG)
    phone.get_by_role("button", name="Compare").click()
    expect(phone.locator(".side .facts")).to_have_count(2)
    fits(phone)
    phone.goto(f"{server}#/devices")
    phone.wait_for_selector(".device")
    fits(phone)
    phone.goto(f"{server}#/metrics")
    phone.wait_for_selector(".chart")
    phone.get_by_text("All values").first.click()
    fits(phone)
    phone.goto(f"{server}#/settings")
    phone.get_by_label("System prompt of new conversations").fill(LONG)
    phone.get_by_label("Stop at").fill(LONG)
    fits(phone)


def test_a_receipt_is_as_wide_as_a_phone(phone: Page, talk: Any) -> None:
    said = {**talk.says("Hello"), "x_bitnet_receipt": {LONG: LONG}}
    body = talk.sse(said)
    phone.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body),
    )
    ask(phone, talk, "Hello")
    phone.get_by_role("button", name="Show the receipt").click()
    fits(phone)


MANY = 130_000
"""More than the arguments that a call may have."""
MANY_OF = {
    "paragraphs": "a\n\n" * MANY,
    "list items": "- a\n" * MANY,
    "numbered items": "1. a\n" * MANY,
    "items with paragraphs": "- a\n\n" * MANY,
    "lines of a quote": "> a\n" * MANY,
    "paragraphs of a quote": "> a\n>\n" * MANY,
    "headings": "# a\n" * MANY,
    "rules": "---\n" * MANY,
    "rows": "|a|b|\n|-|-|\n" + "|a|b|\n" * MANY,
    "code blocks": "```\na\n```\n" * MANY,
    "words of code": "```py\n" + "1 " * 24_000 + "\n```",
    "lines of code": "```\n" + "a\n" * MANY + "```",
    "emphases": "*a* " * MANY,
    "code spans": "`a` " * MANY,
    "links": "[a](https://x.org) " * MANY,
    "bare links": "https://x.org " * MANY,
    "emphases in a link": "[" + "*a* " * MANY + "](https://x.org)",
    "emphases in a link that leads nowhere": "[" + "*a* " * MANY + "](javascript:x)",
    "emphases in an emphasis": "**" + "*a* " * MANY + "b**",
    "breaks": "a  \n" * MANY,
    "stars": "*" * 10 * MANY,
    "brackets": "[" * MANY,
    "quotes in quotes": ">" * MANY,
}


AT_ONCE = ("paragraphs", "rows", "emphases in a link that leads nowhere")
"""Those that are tried when the server changes; the others take minutes, and are tried at night."""


@pytest.mark.parametrize(
    "parts", [pytest.param(name, marks=() if name in AT_ONCE else pytest.mark.nightly) for name in MANY_OF]
)
def test_an_answer_of_many_parts(page: Page, parts: str) -> None:
    """Rendered whole, and as text that grows; nothing of the text is lost."""
    text = MANY_OF[parts]
    counted = page.evaluate(
        """async (text) => {
            const { Growing, markdown } = await import("/assets/markdown.js");
            const element = document.createElement("div");
            const growing = new Growing(element);
            growing.show(text.slice(0, text.length / 2));
            growing.show(text, true);
            const whole = markdown(text);
            const letters = (all) => all.textContent.replace(/[^a1]/g, "").length;
            return [letters(whole), letters(element)];
        }""",
        text,
    )
    assert counted[0] == counted[1]
    assert counted[0] >= (MANY if "a" in text else 24_000 if "1" in text else 0)


def test_a_list_of_many_conversations_and_models(page: Page) -> None:
    shown = page.evaluate(
        """async (many) => {
            const { refill } = await import("/assets/dom.js");
            const list = document.createElement("ul");
            refill(list, Array.from({ length: many }, () => document.createElement("li")));
            return list.childElementCount;
        }""",
        MANY,
    )
    assert shown == MANY


def test_no_call_gets_a_list_as_its_arguments() -> None:
    """``f(...list)`` throws RangeError where the list is long; lists go to ``fill`` and ``refill``."""
    for path in (Path(bitnet.server.__file__).parent / "page").rglob("*.js"):
        for line in path.read_text(encoding="utf-8").splitlines():
            called = re.search(r"[\w\])]\([^(){}\[\]]*\.\.\.", line)
            assert called is None or "function" in line, (path.name, line)
