"""Files that go along with a message: their text, its size, and what is no text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

PATHS = ("packages/bitnet-server/src/bitnet/server/page", "packages/bitnet-server/tests/page")
pytestmark = pytest.mark.nightly(unless_changed=PATHS)


@pytest.fixture
def prompts(page: Page, talk: Any) -> list[list[str]]:
    """What the model was told each time."""
    seen: list[list[str]] = []

    def answer(route: Route) -> None:
        body: Any = route.request.post_data_json
        seen.append([message["content"] for message in body["messages"]])
        talk.reply(route, "Yes")

    page.route("**/v1/chat/completions", answer)
    return seen


def attach(page: Page, *files: Path) -> None:
    page.get_by_label("Files to attach").set_input_files(list(files))


def test_text_files_go_along(page: Page, talk: Any, prompts: list[list[str]], tmp_path: Path) -> None:
    code = tmp_path / "code.py"
    code.write_text("print('ü <b>')\n```\nfence\n````\n", encoding="utf-8")
    other = tmp_path / "other.txt"
    other.write_text("to be taken away", encoding="utf-8")
    attach(page, code, other)
    files = page.get_by_role("list", name="Attached files")
    count = page.evaluate(
        """async (content) => {
            const body = JSON.stringify({ content });
            return (await (await fetch("tokenize", { method: "POST", body })).json()).tokens.length;
        }""",
        code.read_text(encoding="utf-8"),
    )
    expect(files).to_contain_text(f"code.py{count} tokens")
    page.get_by_role("button", name="Take other.txt away").click()
    talk.ask(page, "What is this?")
    talk.answered(page)
    sent = "code.py:\n`````\nprint('ü <b>')\n```\nfence\n````\n`````\n\nWhat is this?"
    assert prompts == [[sent]]
    expect(files).to_have_count(1)  # that of the message
    page.reload()
    page.get_by_role("button", name="code.py").click()
    assert page.get_by_label("Text of code.py").inner_text() == code.read_text(encoding="utf-8")
    page.get_by_role("button", name="Close").click()
    page.get_by_role("button", name="Edit the message").click()
    page.get_by_role("textbox", name="Edit the message").fill("Again")
    page.keyboard.press("Enter")
    expect(page.locator(".versions")).to_have_text("2/2")
    talk.answered(page)
    assert prompts[-1] == [sent.replace("What is this?", "Again")]
    page.get_by_role("searchbox").fill("fence")
    expect(page.locator(".conversations a")).to_have_count(1)
    copy = page.evaluate(
        """async (all) => {
            const { parse, toJSON } = await import("/assets/transfer.js");
            return parse("a.json", toJSON(all))[0].messages[0].files;
        }""",
        talk.stored(page),
    )
    assert copy == talk.stored(page)[0]["messages"][0]["files"]


def test_a_file_alone_is_sent(page: Page, talk: Any, prompts: list[list[str]], tmp_path: Path) -> None:
    file = tmp_path / "notes.md"
    file.write_text("One", encoding="utf-8")
    attach(page, file)
    expect(page.get_by_role("list", name="Attached files")).to_be_visible()
    page.get_by_role("button", name="Send").click()
    talk.answered(page)
    assert prompts == [["notes.md:\n```\nOne\n```"]]
    expect(page.locator("h1")).to_have_text("notes.md")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\x89PNG\r\n\0", "is neither a text in UTF-8 nor a PDF"),
        (b"\xff\xfe", "is neither a text in UTF-8 nor a PDF"),
        (b"a\0b", "is neither a text in UTF-8 nor a PDF"),
        (b" \n", "has no text"),
    ],
)
def test_what_is_no_text_is_refused(page: Page, tmp_path: Path, content: bytes, why: str) -> None:
    file = tmp_path / "<b>.png"
    file.write_bytes(content)
    attach(page, file)
    expect(page.get_by_role("alert")).to_contain_text(f"<b>.png {why}")
    expect(page.get_by_role("list", name="Attached files")).to_have_count(0)


def test_files_are_dropped_and_pasted(page: Page) -> None:
    for kind, name in (("drop", "dataTransfer"), ("paste", "clipboardData")):
        page.locator("#prompt").evaluate(
            """(field, [kind, name]) => {
                const data = new DataTransfer();
                data.items.add(new File(["text"], `${kind}.txt`));
                const init = { bubbles: true, cancelable: true, [name]: data };
                field.dispatchEvent(kind === "drop" ? new DragEvent(kind, init) : new ClipboardEvent(kind, init));
            }""",
            [kind, name],
        )
        expect(page.get_by_role("button", name=f"Take {kind}.txt away")).to_be_visible()
