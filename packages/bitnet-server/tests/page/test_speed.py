"""The page is quick: its first paint, and typing where there is much to read. The best of some tries counts,
as other programs use the machine, too."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.nightly  # bounds of time, for a machine that nobody else uses

MAX_PAINT_MS = 200
MAX_FRAME_MS = 50
TRIES = 8
CONVERSATIONS, MESSAGES = 10, 200
ANSWER = """Some **words** with `code` and [a link](https://x.org), {0}.

- one
- two

```python
def f(x):  # why
    return "a" + 1
```

| a | b |
|---|--:|
| 1 | {0} |
"""


def conversation(number: int) -> dict[str, Any]:
    texts = [f"Question {n}" if n % 2 == 0 else ANSWER.format(n) for n in range(MESSAGES)]
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    head = {"id": f"c{number}", "title": f"Talk {number}", "named": True, "system": ""}
    return {**head, "updated": time.time() * 1000, "messages": messages}


def test_the_first_paint_comes_at_once(browser: Browser, server: str) -> None:
    def paint() -> float:
        with browser.new_page() as page:
            page.goto(server)
            page.wait_for_selector("h1")
            return float(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))

    assert best(paint, MAX_PAINT_MS) <= MAX_PAINT_MS


def best(measure: Callable[[], float], wanted: float) -> float:
    """The least of TRIES measurements, or the first that is at most ``wanted``."""
    found: list[float] = []
    while len(found) < TRIES and (not found or found[-1] > wanted):
        found.append(measure())
    print("milliseconds:", found)
    return min(found)


def longest_frame(page: Page, act: Any) -> float:
    """The longest time between two frames while `act` is done, in milliseconds."""
    page.evaluate(
        """() => {
            window.longest = 0;
            window.watching = true;
            let last = performance.now();
            const frame = (now) => {
                window.longest = Math.max(window.longest, now - last);
                last = now;
                if (window.watching) requestAnimationFrame(frame);
            };
            requestAnimationFrame((now) => { last = now; requestAnimationFrame(frame); });
        }"""
    )
    act()
    return float(page.evaluate("() => { window.watching = false; return window.longest; }"))


def test_typing_is_smooth_among_ten_long_conversations(page: Page) -> None:
    all_of_them = [conversation(number) for number in range(CONVERSATIONS)]
    page.evaluate("async (all) => (await import('/assets/store.js')).saveAll(all)", all_of_them)
    page.reload()
    page.get_by_role("link", name="Talk 3").click()
    page.wait_for_function(f"document.querySelectorAll('.message').length === {MESSAGES}")
    page.get_by_label("Message", exact=True).focus()
    typing = best(
        lambda: longest_frame(page, lambda: page.keyboard.type("words and more words ", delay=15)), MAX_FRAME_MS
    )
    page.keyboard.press("Control+k")
    searching = best(lambda: longest_frame(page, lambda: page.keyboard.type("question 1", delay=15)), MAX_FRAME_MS)
    assert max(typing, searching) <= MAX_FRAME_MS
