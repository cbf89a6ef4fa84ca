"""The page's features on wide, middle and narrow screens, light and dark.

Each can be reached and is as wide as the screen, and axe finds nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from .test_sizes import fits
from .test_views import RICH, violations

PATHS = ("packages/bitnet-server/src/bitnet/server/page", "packages/bitnet-server/tests/page")
SIZES = [(1440, 900), (1024, 768), (390, 844)]
CALL = {"id": "c1", "name": "weather", "arguments": '{"city": "Paris"}', "result": "<b>sunny</b>", "state": "called"}
MESSAGES: list[dict[str, Any]] = [
    {
        "role": "user",
        "content": "Look at this.",
        "files": [{"name": "a-file-with-a-long-name.txt", "text": "x", "tokens": 1}],
    },
    {
        "role": "assistant",
        "content": f"{RICH}\n\n$$\\sum_{{i=1}}^n \\frac{{1}}{{i}}$$\n\nand $x^2$, $\\unknown$.",
        "thought": "Let me think.",
        "rounds": [{"content": "First a look.", "thought": "", "calls": [CALL]}],
        "stats": {"model": "m", "speed": 12.5, "tokens": 20, "prompt": 700, "context": 1024},
        "versions": {"at": 1, "tails": [[{"role": "assistant", "content": "Before."}], None]},
    },
]


def looks_right(page: Page) -> None:
    fits(page)
    assert violations(page) == []


@pytest.mark.parametrize(
    ("size", "scheme"),
    [
        pytest.param(
            size,
            scheme,
            marks=pytest.mark.nightly(unless_changed=PATHS)
            if (size[0] == 390) == (scheme == "dark")
            else pytest.mark.nightly,
        )
        for size in SIZES
        for scheme in ("light", "dark")
    ],
    ids=str,
)
def test_each_feature(open_page: Callable[..., Page], talk: Any, size: tuple[int, int], scheme: str) -> None:
    narrow = size[0] < 832
    touch = {"has_touch": True, "is_mobile": True} if narrow else {}
    page = open_page(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, **touch)
    looks_right(page)
    one = {
        "id": "c1",
        "title": "A look at a file with a name",
        "named": True,
        "system": "Be brief.",
        "messages": MESSAGES,
    }
    old = {**one, "id": "c2", "title": "An older one", "updated": 1e12}
    page.evaluate(
        "async (all) => (await import('/assets/store.js')).saveAll(all)", [{**one, "updated": time.time() * 1000}, old]
    )
    page.goto(page.url.split("#")[0] + "#/chat/c1")
    page.wait_for_selector(".message.assistant")
    page.locator(".call summary").click()
    page.locator(".thought summary").click()
    looks_right(page)
    page.get_by_role("button", name="Context:").click()
    looks_right(page)
    page.keyboard.press("Escape")
    for entry in ("Options", "About the model", "Rename"):
        talk.menu(page, entry)
        page.wait_for_selector("dialog[open]")
        looks_right(page)
        page.keyboard.press("Escape")
    page.get_by_role("button", name="Edit the answer").click()
    looks_right(page)
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Earlier version").click()
    expect(page.locator(".prose")).to_have_text("Before.")
    page.get_by_label("Files to attach").set_input_files({"name": "b.txt", "mimeType": "text/plain", "buffer": b"text"})
    expect(page.get_by_role("button", name="Take b.txt away")).to_be_visible()
    looks_right(page)
    if narrow:
        page.get_by_role("button", name="Menu", exact=True).click()
    page.get_by_role("searchbox").fill("thought weather look")
    expect(page.get_by_text("No conversation has these words.")).to_be_visible()
    page.get_by_role("searchbox").fill("look file")
    expect(page.locator(".conversations a")).to_have_count(2)
    assert violations(page) == []
    page.locator(".conversations a").last.click()
    expect(page.locator("h1")).to_have_text("An older one")
    talk.menu(page, "Delete")
    expect(page.get_by_role("button", name="Undo")).to_be_visible()
    looks_right(page)
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("h1")).to_have_text("An older one")
