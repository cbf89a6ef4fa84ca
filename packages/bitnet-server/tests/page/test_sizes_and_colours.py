"""The page's features on wide, middle and narrow screens, light and dark.

Each can be reached and is as wide as the screen, and axe finds nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

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
        "content": f"{RICH}\n\n{RICH}\n\n$$\\sum_{{i=1}}^n \\frac{{1}}{{i}}$$\n\nand $x^2$, $\\unknown$.",
        "thought": "Let me think.",
        "rounds": [{"content": "First a look.", "thought": "", "calls": [CALL]}],
        "stats": {"model": "m", "speed": 12.5, "tokens": 20, "prompt": 700, "context": 1024},
        "versions": {"at": 1, "tails": [[{"role": "assistant", "content": "Before."}], None]},
    },
]


def looks_right(page: Page) -> None:
    fits(page)
    assert violations(page) == []


MATRIX = pytest.mark.parametrize(
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


def open_at(open_page: Callable[..., Page], size: tuple[int, int], scheme: str, **options: Any) -> tuple[Page, bool]:
    """A page of that size and colours, and whether it is narrow: a phone."""
    narrow = size[0] < 832
    touch = {"has_touch": True, "is_mobile": True} if narrow else {}
    shape = {"viewport": {"width": size[0], "height": size[1]}, "color_scheme": scheme}
    return open_page(**shape, **touch, **options), narrow


@MATRIX
def test_each_feature(open_page: Callable[..., Page], talk: Any, size: tuple[int, int], scheme: str) -> None:
    page, narrow = open_at(open_page, size, scheme)
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


def answer_mcp(route: Route) -> None:
    """An MCP server of one tool."""
    message: Any = route.request.post_data_json
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    result = {
        "initialize": {
            "protocolVersion": "2025-06-18",
            "capabilities": {},
            "serverInfo": {"name": "t", "version": "1"},
        },
        "tools/list": {"tools": [{"name": "weather", "description": "Of a city", "inputSchema": schema}]},
        "tools/call": {"content": [{"type": "text", "text": "<b>sunny</b> " * 40}]},
    }.get(message["method"], {})
    if "id" in message:
        route.fulfill(json={"jsonrpc": "2.0", "id": message["id"], "result": result})
    else:
        route.fulfill(status=202)


@MATRIX
def test_tools_are_asked_for(
    open_page: Callable[..., Page], server: str, talk: Any, size: tuple[int, int], scheme: str
) -> None:
    page, narrow = open_at(open_page, size, scheme)
    url = f"{server}an-mcp-server-with-a-long-name-for-tools"
    page.route("**/assets/mcp.json", lambda route: route.fulfill(json={"servers": [url]}))
    page.route(url, answer_mcp)
    given = json.dumps({"city": "Paris " * 40})
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "weather", "arguments": given}}
    calls = talk.sse({"model": "m", "choices": [{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": None}]})
    bodies = iter([calls, calls, talk.sse(talk.says("It is sunny."))])
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(content_type="text/event-stream", body=next(bodies)),
    )
    talk.menu(page, "Options")
    page.get_by_label(url).check()
    looks_right(page)
    page.get_by_role("button", name="Done").click()
    talk.ask(page, "How is the weather?")
    if narrow:
        page.get_by_role("button", name="Send").click()
    page.get_by_role("button", name="Allow this call").click()
    expect(page.get_by_role("button", name="Allow this call")).to_be_visible()
    expect(page.locator(".call").first).to_contain_text("Called")
    page.locator(".call summary").first.click()
    looks_right(page)
    page.get_by_role("button", name="Refuse").click()
    talk.answered(page)
    looks_right(page)


HOLD_PULLS = """() => {
    const ask = window.fetch;
    window.fetch = (url, options) => {
        if (!String(url).endsWith("api/pull")) return ask(url, options);
        const line = (name) => JSON.stringify({ status: `pulling ${name}`, total: 1e9, completed: 4e8 }) + "\\n";
        const bytes = new TextEncoder().encode(line("a") + line("b"));
        return Promise.resolve(new Response(new ReadableStream({ start: (to) => to.enqueue(bytes) })));
    };
}"""
"""Downloads that begin and do not go on."""


@MATRIX
def test_models_are_pulled(open_page: Callable[..., Page], size: tuple[int, int], scheme: str) -> None:
    page, _ = open_at(open_page, size, scheme, view="models", expected=("400", "404"))
    long = "a-model-with-a-name-that-is-long" * 3
    status = {"value": "unloaded", "device": "cpu:native", "bytes": 2_000_000_000, "reason": "never asked for"}
    listed = [{"id": long, "status": status}, {"id": "short", "status": {"value": "loaded"}}]
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": listed}))
    page.reload()
    expect(page.get_by_role("list", name="Models").get_by_role("listitem")).to_have_count(2)
    looks_right(page)
    name = page.get_by_label("Pull a model from the Hugging Face Hub")
    name.fill("org/absent")
    page.get_by_role("button", name="Pull", exact=True).click()  # of this server, which has no folder of models
    expect(page.get_by_role("alert")).to_be_visible()
    looks_right(page)
    page.evaluate(HOLD_PULLS)
    name.fill(f"org/{long}")
    page.get_by_role("button", name="Pull", exact=True).click()
    expect(page.get_by_role("progressbar")).to_have_count(2)
    looks_right(page)
    page.get_by_role("button", name="About short").click()
    page.wait_for_selector("dialog[open]")
    looks_right(page)


@MATRIX
def test_pdfs_are_attached(open_page: Callable[..., Page], size: tuple[int, int], scheme: str) -> None:
    """As the page shows them; `test_pdf.py` reads real ones."""
    page, _ = open_at(open_page, size, scheme)
    module = "export const textOfPdf = async (bytes) => (bytes.length > 9 ? 'words '.repeat(900) : '');"
    page.route("**/assets/pdf.js", lambda route: route.fulfill(content_type="text/javascript", body=module))
    files = page.get_by_label("Files to attach")
    for name, content in (("a-scan-with-a-long-name.pdf", b"%PDF-1.7"), ("report-of-the-year.pdf", b"%PDF-1.7 words")):
        files.set_input_files({"name": name, "mimeType": "application/pdf", "buffer": content})
        words = "its pages may be pictures" if "scan" in name else ""
        expect(page.locator(".composer .bad")).to_contain_text(words)
        looks_right(page)
    expect(page.get_by_role("list", name="Attached files")).to_contain_text("tokens")
    page.get_by_role("button", name="report-of-the-year.pdf").first.click()
    expect(page.get_by_role("dialog")).to_contain_text("words words")
    looks_right(page)
