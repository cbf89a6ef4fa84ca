"""Reading and writing with ease: code as files, the latest answer, keys, and notices."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect

PATHS = ("packages/bitnet-server/src/bitnet/server/page", "packages/bitnet-server/tests/page")
pytestmark = pytest.mark.nightly(unless_changed=PATHS)

COMPLETIONS = "**/v1/chat/completions"


@pytest.mark.parametrize(
    ("language", "name"),
    [("python", "code.py"), ("", "code.txt"), ("c++", "code.cpp"), ("../../x", "code.txt"), ("toml", "code.toml")],
)
def test_code_is_downloaded(page: Page, talk: Any, language: str, name: str) -> None:
    code = "def f():\n    return '<b>'"
    page.route(COMPLETIONS, lambda route: talk.reply(route, f"Here:\n\n```{language}\n{code}\n```"))
    talk.ask(page, "Code")
    talk.answered(page)
    with page.expect_download() as download:
        page.get_by_role("button", name=f"Download the {language or 'text'} code").click()
    assert download.value.suggested_filename == name
    assert download.value.path().read_text(encoding="utf-8") == code


def test_one_jumps_to_the_latest(page: Page, talk: Any) -> None:
    page.route(COMPLETIONS, lambda route: talk.reply(route, "word\n\n" * 100))
    talk.ask(page, "One")
    talk.answered(page)
    jump = page.get_by_role("button", name="Jump to the latest")
    expect(jump).to_be_hidden()
    page.locator(".scroller").evaluate("one => (one.scrollTop = 0)")
    jump.click()
    expect(jump).to_be_hidden()
    assert page.locator(".scroller").evaluate("one => one.scrollHeight - one.scrollTop - one.clientHeight") < 2


def test_a_long_conversation_opens_at_its_end_and_lays_out_what_is_seen(page: Page) -> None:
    """Messages of any heights, of which most are out of sight and cost nothing until they are scrolled to."""
    draw = random.Random(seed := random.randrange(2**32))
    print("seed", seed)
    sizes = [draw.choice((1, 5, 60)) for _ in range(200)]
    messages = [
        {"role": ("user", "assistant")[n % 2], "content": f"Message {n}. " + "word\n\n" * size}
        for n, size in enumerate(sizes)
    ]
    head = {"id": "c1", "title": "Long", "named": True, "system": "", "updated": 1e12}
    page.evaluate("async (one) => (await import('/assets/store.js')).saveAll([one])", {**head, "messages": messages})
    page.reload()
    page.get_by_role("link", name="Long").click()
    expect(page.locator(".message")).to_have_count(200)
    left = "(one) => one.scrollHeight - one.scrollTop - one.clientHeight"
    page.wait_for_timeout(300)
    assert page.locator(".scroller").evaluate(left) < 5
    seen = """() => [...document.querySelectorAll('.message')].map((one) =>
        one.querySelector('.place').checkVisibility({ contentVisibilityAuto: true }))"""
    shown = page.evaluate(seen)
    assert shown[-1]
    assert sum(shown) < 60
    hundredth = page.get_by_text("Message 100.", exact=False).first
    for _ in range(3):  # what comes into sight gets its height, by which what is below it moves
        hundredth.scroll_into_view_if_needed()
        page.wait_for_timeout(200)
    expect(hundredth).to_be_in_viewport()
    assert page.evaluate(seen)[100]
    page.get_by_role("button", name="Jump to the latest").click()
    page.wait_for_timeout(300)
    assert page.locator(".scroller").evaluate(left) < 5


def test_keys(page: Page, talk: Any) -> None:
    page.route(COMPLETIONS, lambda route: talk.reply(route, "Yes"))
    message = page.get_by_label("Message", exact=True)
    talk.ask(page, "One")
    talk.answered(page)
    page.keyboard.press("ArrowUp")
    editing = page.get_by_role("textbox", name="Edit the message")
    expect(editing).to_be_focused()
    editing.fill("Two")
    page.keyboard.press("Control+Enter")
    expect(page.locator(".bubble")).to_have_text("Two")
    talk.answered(page)
    page.keyboard.press("Control+k")
    expect(page.get_by_role("searchbox")).to_be_focused()
    page.keyboard.press("Shift+Escape")
    expect(message).to_be_focused()
    page.keyboard.press("Control+Shift+O")
    expect(page.locator("h1")).to_have_text("New conversation")
    page.keyboard.press("Control+Shift+Backspace")  # there is nothing to delete
    page.get_by_role("navigation", name="Conversations").get_by_role("link").first.click()
    expect(page.locator(".bubble")).to_have_text("Two")
    page.keyboard.press("Control+/")
    dialog = page.get_by_role("dialog", name="Keyboard shortcuts")
    expect(dialog).to_contain_text("Search conversations")
    page.keyboard.press("Control+Shift+Backspace")  # the list is open: nothing else hears keys
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    assert len(talk.stored(page)) == 1
    page.keyboard.press("Control+Shift+Backspace")
    expect(page.get_by_role("button", name="Undo")).to_be_visible()
    assert talk.stored(page) == []


def test_a_long_answer_that_ends_out_of_sight_is_told(open_page: Callable[..., Page], talk: Any) -> None:
    """With the browser's notices replaced: a test has no desktop to look at."""
    page = open_page("settings")
    page.context.grant_permissions(["notifications"])
    page.evaluate(
        """() => {
            window.told = [];
            window.Notification = class {
                static permission = "granted";
                static requestPermission() { return Promise.resolve("granted"); }
                constructor(title, { body }) { window.told.push([title, body]); }
            };
        }"""
    )
    page.get_by_label("Tell me when an answer").check()
    page.get_by_role("link", name="New conversation", exact=True).first.click()
    for seconds, hidden in ((1, True), (60, False), (60, True)):
        page.evaluate(
            """([seconds, hidden]) => {
                Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
                const real = performance.now.bind(performance);
                window.late = 0;
                performance.now = () => real() + window.late;
                window.longer = () => (window.late = seconds * 1000);
            }""",
            [seconds, hidden],
        )

        def answer(route: Any) -> None:
            page.evaluate("window.longer()")
            talk.reply(route, "Yes")

        page.unroute(COMPLETIONS)
        page.route(COMPLETIONS, answer)
        talk.ask(page, f"After {seconds} s")
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        page.wait_for_function("() => !document.querySelector('.waiting')")
    page.wait_for_function("() => window.told.length")
    assert page.evaluate("window.told") == [["The answer is complete", "After 1 s"]]


def test_notices_that_the_browser_refuses_say_so(open_page: Callable[..., Page]) -> None:
    page = open_page("settings")
    page.evaluate("() => { Notification.requestPermission = () => Promise.resolve('denied'); }")
    page.get_by_label("Tell me when an answer").click()
    expect(page.get_by_text("The browser does not allow notices")).to_be_visible()
    expect(page.get_by_label("Tell me when an answer")).not_to_be_checked()
