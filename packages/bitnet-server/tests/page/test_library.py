"""All conversations together: search, dates, menus, files, and deletion that is undone."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

PATHS = ("packages/bitnet-server/src/bitnet/server/page", "packages/bitnet-server/tests/page")
pytestmark = pytest.mark.nightly(unless_changed=PATHS)

DAY = 86_400_000


def conversation(name: str, *texts: str, days: float = 0, **more: Any) -> dict[str, Any]:
    """A conversation as it is stored, last changed so many days ago."""
    roles = ("user", "assistant")
    messages = [{"role": roles[nth % 2], "content": text} for nth, text in enumerate(texts)]
    now = time.time() * 1000
    return {
        "id": name.lower().replace(" ", "-"),
        "title": name,
        "named": True,
        "updated": now - days * DAY,
        "system": "",
        "messages": messages,
        **more,
    }


def keep(page: Page, *conversations: dict[str, Any]) -> None:
    page.evaluate("async (all) => (await import('/assets/store.js')).saveAll(all)", list(conversations))
    page.reload()
    page.wait_for_selector(".conversations > *")


def listed(page: Page) -> Any:
    return page.get_by_role("navigation", name="Conversations").get_by_role("link")


def row(page: Page, title: str, entry: str) -> None:
    page.get_by_role("listitem").filter(has=page.get_by_role("link", name=title)).hover()
    page.get_by_role("button", name=f"Menu of “{title}”").click()
    page.get_by_role("menuitem", name=entry).click()


def test_search_finds_words_in_names_messages_and_versions(page: Page) -> None:
    versions = {"at": 1, "tails": [[{"role": "user", "content": "About Zürich"}], None]}
    keep(
        page,
        conversation("Cities", "What of Crème brûlée?", "It is a dessert of Paris"),
        conversation("Rivers", "Which is longest?", "The Nile, in Africa"),
        conversation(
            "Mountains", "Now this", days=1, messages=[{"role": "user", "content": "x", "versions": versions}]
        ),
    )
    field = page.get_by_role("searchbox", name="Search conversations")
    for text, found in {
        "creme BRULEE": ["Cities"],
        "paris dessert": ["Cities"],
        "nile": ["Rivers"],
        "zurich": ["Mountains"],
        "river nile": ["Rivers"],
        "in": ["Rivers", "Mountains"],
        "  ": ["Cities", "Rivers", "Mountains"],
        "<b>": [],
    }.items():
        field.fill(text)
        names = page.locator(".conversations a")
        expect(names).to_have_count(len(found))
        assert sorted(name.split("\n")[0] for name in names.all_inner_texts()) == sorted(found), text
    expect(page.get_by_text("No conversation has these words.")).to_be_visible()
    field.fill("nile")
    expect(page.locator(".snippet")).to_have_text("The Nile, in Africa")
    field.press("Escape")
    expect(listed(page)).to_have_count(3)


def test_conversations_are_listed_by_date(page: Page) -> None:
    keep(
        page,
        *(conversation(name, "a", days=days) for name, days in {"Old": 400, "New": 0, "Week": 4, "Month": 20}.items()),
    )
    expect(listed(page)).to_have_text(["New", "Week", "Month", "Old"])
    headings = page.locator(".conversations h3").all_inner_texts()
    assert headings[:3] == ["Today", "Last 7 days", "Last 30 days"]
    assert headings[3].split()[1].isdigit()


def test_a_row_has_a_menu(page: Page) -> None:
    keep(page, conversation("Cities", "One", "Two"), conversation("Rivers", "Three", "Four"))
    row(page, "Rivers", "Rename")
    page.get_by_label("Name of the conversation").fill("Streams")
    page.keyboard.press("Enter")
    expect(listed(page).filter(has_text="Streams")).to_have_count(1)
    page.get_by_role("button", name="Menu of “Streams”").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("menuitem", name="Rename")).to_be_focused()
    page.keyboard.press("End")
    expect(page.get_by_role("menuitem", name="Delete")).to_be_focused()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Escape")
    expect(page.get_by_role("menu")).to_have_count(0)
    expect(page.get_by_role("button", name="Menu of “Streams”")).to_be_focused()
    with page.expect_download() as download:
        row(page, "Cities", "Save as Markdown")
    assert download.value.suggested_filename == "Cities.md"
    text = download.value.path().read_text(encoding="utf-8")
    assert text.startswith("# Cities\n")
    assert "\n## You\n\nOne\n" in text


def test_deletion_is_undone(page: Page, talk: Any) -> None:
    keep(page, conversation("Cities", "One", "Two"), conversation("Rivers", "Three", "Four"))
    before = talk.stored(page)
    row(page, "Cities", "Delete")
    expect(listed(page)).to_have_text(["Rivers"])
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("h1")).to_have_text("Cities")
    assert talk.stored(page) == before

    page.get_by_label("Message", exact=True).fill("not sent yet")
    talk.menu(page, "Delete")
    expect(page.locator("h1")).to_have_text("New conversation")
    assert len(talk.stored(page)) == 1
    page.get_by_role("button", name="Undo").click()
    expect(page.get_by_label("Message", exact=True)).to_have_value("not sent yet")
    expect(page.locator(".message")).to_have_count(2)

    page.get_by_role("link", name="Settings").click()
    page.get_by_role("button", name="Delete all conversations").click()
    page.get_by_role("button", name="Keep").click()
    assert talk.stored(page) == before
    page.get_by_role("button", name="Delete all conversations").click()
    page.get_by_role("button", name="Delete all", exact=True).click()
    expect(listed(page)).to_have_count(0)
    page.get_by_role("button", name="Undo").click()
    expect(listed(page)).to_have_count(2)
    assert talk.stored(page) == before


def test_a_new_conversation_has_nothing_to_delete(page: Page, talk: Any) -> None:
    """It cannot be deleted, and goes on to be kept."""
    page.get_by_role("button", name="Menu of the conversation").click()
    expect(page.get_by_role("menuitem", name="Delete")).to_be_disabled()
    page.keyboard.press("Escape")
    page.route("**/v1/chat/completions", lambda route: talk.reply(route, "Yes"))
    talk.ask(page, "Are you there?")
    talk.answered(page)
    assert len(talk.stored(page)) == 1


def read(page: Page, name: str, text: str) -> Any:
    return page.evaluate(
        """async ([name, text]) => {
            try {
                return (await import("/assets/transfer.js")).parse(name, text);
            } catch (error) {
                return error.constructor.name === "FormatError" ? error.message : `not caught: ${error}`;
            }
        }""",
        [name, text],
    )


def write(page: Page, kind: str, value: Any) -> str:
    code = "async ([kind, value]) => (await import('/assets/transfer.js'))[kind](value)"
    text: str = page.evaluate(code, [kind, value])
    return text


def test_files_bring_back_what_was_saved(page: Page) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)
    marks = ["<!-- bitnet: user -->", "\\<!-- bitnet: user -->", "\\\\<!-- bitnet: system -->"]
    parts = [*marks, "\n", "\n\n", "# x", "## You", "word", "<b>", "ü", " "]
    for _ in range(60):
        texts = ["".join(draw.choices(parts, k=draw.randrange(1, 9))) + "." for _ in range(draw.randrange(0, 5))]
        one = conversation("A name", *texts, system=draw.choice(["", "Be\nbrief."]))
        (back,) = read(page, "a.md", write(page, "toMarkdown", one)) if texts else [one]
        assert [m["content"] for m in back["messages"]] == texts, seed
        assert [back["title"], back["system"]] == ["A name", one["system"]], seed
        (back,) = read(page, "a.json", write(page, "toJSON", [one]))
        assert [m["content"] for m in back["messages"]] == texts, seed
        assert (back["title"], back["system"], back["updated"]) == ("A name", one["system"], one["updated"]), seed
        assert texts == [] or back["id"] != one["id"]


HEAD = '{"format": "bitnet-conversations", "version": 1, "conversations": ['
BAD = {
    "": "The file is not JSON",
    "[]": "does not hold conversations",
    '{"format": "other"}': "does not hold conversations",
    HEAD.replace("1", "2") + "]}": "has version 2",
    HEAD + "3]}": "Conversation 1 is not an object",
    HEAD + '{"title": " "}]}': "Conversation 1 has no title",
    HEAD + '{"title": "a"}]}': "has no list of messages",
}
MESSAGES = {
    "null": "message 1 is not an object",
    '{"role": "system", "content": "a"}': "is neither of the user nor of the assistant",
    '{"role": "user", "content": ["a"]}': "has no text",
    '{"role": "assistant", "content": "a", "stats": 3}': "is not an object",
    '{"role": "user", "content": "a", "versions": {"at": 0, "tails": [null]}}': "has no list of versions",
    '{"role": "user", "content": "a", "versions": {"at": 1, "tails": [null, []]}}': "which version is shown",
    '{"role": "user", "content": "a", "versions": {"at": 0, "tails": [null, []]}}': "version 2 is empty",
}


def test_files_that_cannot_be_read_say_why_and_change_nothing(page: Page, talk: Any, tmp_path: Path) -> None:
    head = HEAD + '{"title": "a", "messages": ['
    for text, why in (BAD | {f"{head}{one}]}}]}}": why for one, why in MESSAGES.items()}).items():
        assert why in read(page, "a.json", text), text
    assert "has no messages" in read(page, "a.md", "# Title\n\ntext")
    deep: dict[str, Any] = {"role": "user", "content": "a"}
    for _ in range(120):
        deep = {"role": "user", "content": "a", "versions": {"at": 0, "tails": [None, [deep]]}}
    assert "more than 100 deep" in read(page, "a.json", f"{head}{json.dumps(deep)}]}}]}}")

    page.get_by_role("link", name="Settings").click()
    good = tmp_path / "good.json"
    good.write_text(write(page, "toJSON", [conversation("Kept", "One", "Two"), conversation("Two", "x")]), "utf-8")
    bad = tmp_path / "bad.json"
    bad.write_text("{", "utf-8")
    chooser = page.get_by_label("Files with conversations")
    chooser.set_input_files([good, bad])
    expect(page.get_by_text("bad.json: The file is not JSON")).to_be_visible()
    assert talk.stored(page) == []
    chooser.set_input_files([good])
    expect(page.get_by_text("2 conversations are imported.")).to_be_visible()
    expect(listed(page)).to_have_count(2)
    with page.expect_download() as download:
        page.get_by_role("button", name="Save all as JSON").click()
    saved = json.loads(download.value.path().read_text(encoding="utf-8"))
    assert sorted(one["title"] for one in saved["conversations"]) == ["Kept", "Two"]


def test_an_imported_file_runs_nothing(page: Page, talk: Any) -> None:
    hostile = "<img src=x onerror='window.hit = 1'><script>window.hit = 1</script>"
    stats: dict[str, Any] = {
        "model": hostile,
        "device": hostile,
        "finish": hostile,
        "speed": "12",
        "first": {},
        "tokens": None,
    }
    one = conversation(hostile, hostile, hostile)
    one["messages"][1]["stats"] = stats
    keep(page, *read(page, "a.json", write(page, "toJSON", [one])))
    listed(page).first.click()
    expect(page.locator(".message")).to_have_count(2)
    expect(page.locator("h1")).to_have_text(hostile)
    row(page, hostile, "Delete")
    expect(page.locator("#toast")).to_contain_text(hostile[:20])
    assert page.evaluate("window.hit ?? null") is None


def test_other_tabs_list_what_has_changed(page: Page, talk: Any, open_page: Callable[..., Page]) -> None:
    other = page.context.new_page()
    other.goto(page.url)
    expect(other.get_by_text("None yet.")).to_be_visible()
    page.route("**/v1/chat/completions", lambda route: talk.reply(route, "Yes"))
    talk.ask(page, "Are you there?")
    expect(listed(other)).to_have_text(["Are you there?"])
    page.bring_to_front()
    talk.answered(page)
    talk.menu(page, "Delete")
    expect(listed(other)).to_have_count(0)
