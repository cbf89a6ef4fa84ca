"""Conversations in a browser, with the demo model behind a real server.

Long, because each thing that a person does in a conversation is a test of its own, on one open page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

pytestmark = pytest.mark.nightly(unless_changed=("packages/bitnet-server",))

STORY = "Tell me a story."


def test_an_answer_says_how_fast_and_where_it_was_made(page: Page, talk: Any) -> None:
    talk.ask(page, "What is the capital of France?")
    assert talk.answered(page).startswith("The capital of France is ")  # the rest is drawn
    facts = page.locator(".facts").inner_text()
    assert re.search(r"[\d.]+ tokens/s", facts), facts
    assert re.search(r"first after [\d.]+ m?s", facts), facts
    assert "11 tokens" in facts
    assert re.search(r"cpu:\w+", facts), facts


def test_text_grows_while_it_is_generated_and_can_be_stopped(open_page: Callable[..., Page], talk: Any) -> None:
    """A server that never ends its answer: the page shows what came, and Stop closes the connection."""
    page = open_page()
    page.evaluate(
        """() => {
            const real = window.fetch;
            window.fetch = (url, options) => {
                if (!String(url).endsWith("chat/completions")) return real(url, options);
                const encoder = new TextEncoder();
                let n = 0;
                const body = new ReadableStream({
                    async pull(controller) {
                        await new Promise((resolve) => setTimeout(resolve, 30));
                        const chunk = { choices: [{ index: 0, delta: { content: `word${n++} ` } }] };
                        const lines = `data: ${JSON.stringify(chunk)}\\r\\n\\r\\n: ping\\r\\n\\r\\n`;
                        controller.enqueue(encoder.encode(lines));
                    },
                });
                const { signal } = options;
                signal.addEventListener("abort", () => (window.aborted = true));
                const start = (side) => signal.addEventListener("abort", () => side.error(signal.reason));
                const cut = new TransformStream({ start });
                return Promise.resolve(new Response(body.pipeThrough(cut)));
            };
        }"""
    )
    talk.ask(page, STORY)
    prose = page.locator(".message.assistant .prose")
    expect(prose).to_contain_text("word3")
    early = len(prose.inner_text())
    page.wait_for_timeout(300)
    assert len(prose.inner_text()) > early
    page.get_by_role("button", name="Stop").click()
    talk.answered(page)
    assert page.evaluate("window.aborted") is True
    end = page.locator(".message.assistant .prose").inner_text()
    page.wait_for_timeout(200)
    assert page.locator(".message.assistant .prose").inner_text() == end
    assert "stopped by you" in page.locator(".facts").inner_text()
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_stop_ends_the_generation_on_the_server(page: Page, talk: Any) -> None:
    talk.ask(page, STORY)
    page.wait_for_selector(".message.assistant .prose > *")
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    for _ in range(50):
        metrics = page.evaluate("fetch('metrics').then((r) => r.text())")
        if re.search(r"^bitnet_requests_running 0\.0$", metrics, re.M):
            return
        page.wait_for_timeout(100)
    pytest.fail("the server goes on generating")


def test_regenerate_and_edit(page: Page, talk: Any) -> None:
    bodies: list[Any] = []

    def answer(route: Route) -> None:
        bodies.append(route.request.post_data_json)
        talk.reply(route, f"Answer {len(bodies)}.")

    page.route("**/v1/chat/completions", answer)
    talk.ask(page, "One")
    assert talk.answered(page) == "Answer 1."
    talk.ask(page, "Two")
    assert talk.answered(page, 2) == "Answer 2."
    page.get_by_role("button", name="Answer again").click()
    expect(page.locator(".message.assistant .prose").last).to_have_text("Answer 3.")
    assert talk.answered(page, 2) == "Answer 3."
    said = [[m["content"] for m in body["messages"]] for body in bodies]
    assert said[2] == said[1] == ["One", "Answer 1.", "Two"]

    page.get_by_role("button", name="Edit the message").first.click()
    page.get_by_role("textbox", name="Edit the message").fill("Three")
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant .prose")).to_have_text(["Answer 4."])
    assert [m["content"] for m in bodies[3]["messages"]] == ["Three"]
    (kept,) = talk.stored(page)
    assert [m["content"] for m in kept["messages"]] == ["Three", "Answer 4."]


def test_conversations_are_kept_renamed_and_deleted(page: Page, talk: Any) -> None:
    talk.ask(page, "What is the capital of France?")
    talk.answered(page)
    page.get_by_role("link", name="New conversation", exact=True).first.click()
    talk.ask(page, "What is the capital of Italy?")
    talk.answered(page)
    page.reload()
    assert "Rome" in talk.answered(page)
    listed = page.get_by_role("navigation", name="Conversations").get_by_role("link")
    expect(listed).to_have_text(["What is the capital of Italy?", "What is the capital of France?"])

    listed.nth(1).click()
    expect(page.locator("h1")).to_have_text("What is the capital of France?")
    talk.rename(page, "Paris")
    expect(listed).to_have_text(["Paris", "What is the capital of Italy?"])

    talk.menu(page, "Delete")
    expect(listed).to_have_text(["What is the capital of Italy?"])
    assert [one["title"] for one in talk.stored(page)] == ["What is the capital of Italy?"]


def test_what_is_written_and_not_sent_is_kept(page: Page, talk: Any) -> None:
    """Each conversation's own words, over a reload and other views, until they are sent or the conversation deleted."""
    message = page.get_by_label("Message", exact=True)
    links = page.get_by_role("link", name="New conversation", exact=True)
    message.fill("first words\nof two lines")
    page.reload()
    expect(message).to_have_value("first words\nof two lines")
    talk.ask(page, "What is the capital of France?")
    talk.answered(page)
    expect(message).to_have_value("")
    message.fill("words for France")
    links.first.click()
    expect(message).to_have_value("")
    message.fill("words for another")
    page.get_by_role("navigation", name="Conversations").get_by_role("link").first.click()
    expect(message).to_have_value("words for France")
    page.reload()
    expect(message).to_have_value("words for France")
    talk.menu(page, "Delete")
    expect(message).to_have_value("words for another")

    talk.rename(page, "Named")
    page.reload()
    expect(page.locator("h1")).to_have_text("Named")
    expect(message).to_have_value("words for another")
    links.first.click()
    expect(message).to_have_value("")
    assert page.evaluate("Object.keys(sessionStorage).length") == 1


def test_a_reload_right_after_a_name_shows_that_conversation(page: Page, talk: Any) -> None:
    """The reload is asked for in the very turn of the event loop in which the name is given."""
    expect(page.locator(".conversations > *")).not_to_have_count(0)  # the list is read: the database is open
    for name in ("first", "second", "third"):
        page.get_by_role("link", name="New conversation", exact=True).first.click()
        talk.menu(page, "Rename")
        page.get_by_label("Name of the conversation").fill(name)
        with page.expect_event("load"):
            page.evaluate("document.querySelector('dialog form').requestSubmit(); location.reload();")
        page.wait_for_selector("h1")
        expect(page.locator("h1")).to_have_text(name)


COMPLETIONS = "**/v1/chat/completions"


def test_a_conversation_deleted_while_it_is_answered_stays_deleted(page: Page, talk: Any) -> None:
    page.route(COMPLETIONS, lambda route: None)  # no answer ever comes
    talk.ask(page, STORY)
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    expect(page.get_by_role("navigation", name="Conversations").get_by_role("link")).to_have_count(1)
    talk.menu(page, "Delete")
    expect(page.locator("h1")).to_have_text("New conversation")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    assert talk.stored(page) == []


def test_an_answer_is_kept_until_there_is_a_new_one(open_page: Callable[..., Page], talk: Any) -> None:
    page = open_page(expected=("429",))
    page.route(COMPLETIONS, lambda route: talk.reply(route, "The old answer"))
    talk.ask(page, STORY)
    talk.answered(page)
    page.unroute(COMPLETIONS)
    page.route(COMPLETIONS, lambda route: route.fulfill(status=429, body="{}"))
    page.get_by_role("button", name="Answer again").click()
    expect(page.locator(".problem")).to_be_visible()
    assert [message["content"] for message in talk.stored(page)[0]["messages"]] == [STORY, "The old answer"]
    page.unroute(COMPLETIONS)
    page.route(COMPLETIONS, lambda route: talk.reply(route, "The new answer"))
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".message.assistant .prose")).to_have_text("The new answer")
    talk.answered(page)
    assert [message["content"] for message in talk.stored(page)[0]["messages"]] == [STORY, "The new answer"]


def test_a_browser_that_keeps_nothing_gets_answers(page: Page, talk: Any) -> None:
    page.evaluate(
        "() => { IDBObjectStore.prototype.put = () => { throw new DOMException('', 'QuotaExceededError'); }; }"
    )
    talk.ask(page, "What is the capital of France?")
    assert talk.answered(page).startswith("The capital of France is ")  # the rest is drawn


def test_a_view_that_loads_late_does_not_replace_a_later_one(page: Page, talk: Any) -> None:
    talk.ask(page, "What is the capital of France?")
    talk.answered(page)
    page.get_by_role("link", name="Settings").click()
    expect(page.locator("h1")).to_have_text("Settings")
    page.evaluate(
        """() => {
            const get = IDBObjectStore.prototype.get;
            IDBObjectStore.prototype.get = function (key) {
                const late = {};
                const real = get.call(this, key);
                real.onsuccess = () => setTimeout(() => {
                    late.result = real.result;
                    late.onsuccess();
                    document.body.dataset.loaded = "yes";
                }, 500);
                return late;
            };
        }"""
    )
    page.get_by_role("navigation", name="Conversations").get_by_role("link").first.click()
    page.get_by_role("link", name="Devices").click()
    expect(page.locator("h1")).to_have_text("Devices")
    expect(page.locator("body")).to_have_attribute("data-loaded", "yes")
    expect(page.locator("h1")).to_have_text("Devices")


def test_settings_are_what_the_server_is_asked_with(page: Page, talk: Any) -> None:
    page.get_by_role("link", name="Settings").click()
    page.get_by_label("System prompt of new conversations").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.25")
    page.get_by_label("Longest answer").fill("7")
    page.get_by_label("Stop at").fill("END\nSTOP")
    page.get_by_label("API key").fill("secret-1")
    page.get_by_label("Ask for a receipt").check()
    page.get_by_role("link", name="New conversation").first.click()
    page.wait_for_selector("#prompt")
    with page.expect_request("**/v1/chat/completions") as request:
        talk.ask(page, "Hello")
    body: Any = request.value.post_data_json
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert (body["temperature"], body["max_tokens"], body["stop"]) == (0.25, 7, ["END", "STOP"])
    assert body["x_bitnet_receipt"] is True
    assert not {"top_p", "top_k", "min_p", "seed"} & body.keys()
    assert request.value.headers["authorization"] == "Bearer secret-1"
    assert page.evaluate("sessionStorage.getItem('bitnet.key')") == "secret-1"
    assert "secret-1" not in page.evaluate("JSON.stringify(localStorage)")


def test_a_receipt_is_shown_and_downloaded(page: Page, talk: Any) -> None:
    page.get_by_role("link", name="Settings").click()
    page.get_by_label("Ask for a receipt").check()
    page.get_by_role("link", name="New conversation").first.click()
    page.wait_for_selector("#prompt")
    talk.ask(page, "What is the capital of France?")
    talk.answered(page)
    page.get_by_role("button", name="Show the receipt").click()
    with page.expect_download() as download:
        page.get_by_role("dialog").get_by_role("button", name="Download").click()
    receipt = json.loads(download.value.path().read_text(encoding="utf-8"))
    assert receipt == json.loads(page.get_by_label("The receipt as JSON").inner_text())
    assert "device" in json.dumps(receipt)


@pytest.mark.parametrize(
    ("status", "headers", "title"),
    [
        (429, {"Retry-After": "3"}, "The server is busy"),
        (503, {}, "The server is not ready"),
        (401, {}, "The server asks for an API key"),
        (400, {}, "The server refused the request"),
        (0, {}, "The connection to the server was lost"),
    ],
)
def test_errors_are_told_kindly_and_can_be_tried_again(
    open_page: Callable[..., Page], status: int, headers: dict[str, str], title: str, talk: Any
) -> None:
    page = open_page(expected=("Failed to load resource",))
    error = json.dumps({"error": {"message": "why it <b>failed</b>.", "code": "x"}})

    def refuse(route: Route) -> None:
        if status:
            route.fulfill(status=status, headers=headers, content_type="application/json", body=error)
        else:
            route.abort("connectionrefused")

    page.route("**/v1/chat/completions", refuse)
    talk.ask(page, "What is the capital of France?")
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text(title)
    if status:
        expect(alert).to_contain_text("Why it <b>failed</b>.")
    if headers:
        expect(alert).to_contain_text("wait 3 s")
    page.unroute("**/v1/chat/completions")
    page.get_by_role("button", name="Try again").click()
    assert talk.answered(page).startswith("The capital of France is ")  # the rest is drawn
    expect(alert).to_have_count(0)


def test_an_error_has_its_icons_where_the_server_is_gone(open_page: Callable[..., Page], talk: Any) -> None:
    page = open_page(expected=("Failed to load resource",))
    page.context.set_offline(True)
    talk.ask(page, "Hello")
    expect(page.get_by_role("alert")).to_contain_text("The connection to the server was lost")
    for place in (".problem > .icon", ".problem button .icon", ".composer .primary .icon"):
        assert page.locator(place).evaluate("icon => icon.firstChild.getBBox().width") > 0, place


def test_a_conversation_that_is_too_long_has_a_way_on(open_page: Callable[..., Page], talk: Any) -> None:
    """Asking again would be refused again."""
    page = open_page(expected=("Failed to load resource",))
    talk.ask(page, "word " * 10_000)
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("This is too long for the model.")
    expect(alert).to_contain_text("Edit an earlier message, or begin a new conversation.")
    alert.get_by_role("link", name="New conversation").click()
    talk.ask(page, "What is the capital of France?")
    assert talk.answered(page).startswith("The capital of France is ")  # the rest is drawn
    expect(alert).to_have_count(0)


@pytest.mark.parametrize(
    "ending", ["", 'data: {"error": {"message": "The device was lost.", "code": "device_error"}}\n\n']
)
def test_an_answer_that_breaks_off_is_not_taken_for_whole(page: Page, ending: str, talk: Any) -> None:
    body = f"data: {json.dumps(talk.says('Half of it'))}\n\n{ending}"
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body)
    )
    talk.ask(page, "Hello")
    expect(page.get_by_role("alert")).to_contain_text("The device was lost." if ending else "broke off")
    expect(page.locator(".message.assistant .prose")).to_have_text("Half of it")
    expect(page.get_by_text("This answer was cut off.")).to_be_visible()
    (kept,) = talk.stored(page)
    assert [(m["role"], m.get("cut")) for m in kept["messages"]] == [("user", None), ("assistant", True)]


def test_a_lost_server_is_noticed_and_found_again(open_page: Callable[..., Page]) -> None:
    page = open_page(expected=("Failed to load resource",))
    page.route("**/health", lambda route: route.abort("connectionrefused"))
    page.evaluate("dispatchEvent(new Event('offline'))")
    expect(page.locator("#notice")).to_contain_text("connection to the server was lost")
    page.unroute("**/health")
    page.evaluate("dispatchEvent(new Event('online'))")
    expect(page.locator("#notice")).to_be_empty()


def test_keyboard_alone(page: Page, talk: Any) -> None:
    """From opening the page to a second answer, then to another view and back, without a pointer."""
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    page.keyboard.type("What is the capital of France?")
    page.keyboard.press("Shift+Enter")
    page.keyboard.press("Backspace")
    page.keyboard.press("Enter")
    talk.answered(page)
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    tab_to(page, "Answer again", "Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    talk.answered(page)
    tab_to(page, "Skip to the content", "Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    talk.answered(page)  # it is still shown
    tab_to(page, "Skip to the content", "Shift+Tab")
    tab_to(page, "Devices", "Tab")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("Devices")
    expect(page.locator("h1")).to_be_focused()


def tab_to(page: Page, name: str, key: str) -> None:
    for _ in range(40):
        page.keyboard.press(key)
        focused = page.evaluate(
            "document.activeElement.getAttribute('aria-label') || document.activeElement.textContent"
        )
        if focused == name:
            return
    pytest.fail(f"{name} cannot be reached with {key}")


def test_a_screen_reader_hears_paragraphs_not_tokens(page: Page, talk: Any) -> None:
    text = "First paragraph.\n\nSecond one."
    pieces = [talk.says(letter) for letter in text]
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, content_type="text/event-stream", body=talk.sse(*pieces)),
    )
    talk.ask(page, "Hello")
    talk.answered(page)
    heard = page.locator("#announcer p").all_inner_texts()
    assert heard == ["The model is answering", "First paragraph.", "Second one.", "The answer is complete"]


THOUGHT = "17 + 25 is <b>40</b> + 2.\nSo 42."


@pytest.mark.parametrize("size", [(1440, 900), (1024, 768), (390, 800)], ids=str)
def test_a_thought_is_folded_and_goes_back_with_the_next_question(
    open_page: Callable[..., Page], talk: Any, size: tuple[int, int]
) -> None:
    page = open_page(viewport={"width": size[0], "height": size[1]})
    asked: list[Any] = []

    def answer(route: Route) -> None:
        asked.append(route.request.post_data_json)
        half = len(THOUGHT) // 2
        events = [talk.says(part, "reasoning_content") for part in (THOUGHT[:half], THOUGHT[half:])]
        body = talk.sse(*events, talk.says("It is "), talk.says("42."))
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", answer)
    talk.ask(page, "What is 17 + 25?")
    assert talk.answered(page) == "It is 42."
    thought = page.locator(".thought")
    expect(thought.locator("summary")).to_have_text(re.compile(r"^Thought for [\d.]+ m?s$"))
    expect(thought.locator("p")).to_be_hidden()
    thought.locator("summary").click()
    expect(thought.locator("p")).to_be_visible()
    assert thought.locator("p").inner_text() == THOUGHT, "markup is shown, not made"
    page.wait_for_function("document.documentElement.scrollWidth <= innerWidth")
    talk.ask(page, "And times two?")
    talk.answered(page, 2)
    sent = asked[-1]["messages"]
    assert sent[1] == {"role": "assistant", "content": "It is 42.", "reasoning_content": THOUGHT}
    page.wait_for_function("() => !document.querySelector('.waiting')")
    assert talk.stored(page)[0]["messages"][1]["thought"] == THOUGHT
    page.reload()
    expect(page.locator(".thought")).to_have_count(2)


def test_a_thought_without_an_answer_says_so(page: Page, talk: Any) -> None:
    events = talk.sse(talk.says(THOUGHT, "reasoning_content"))
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, content_type="text/event-stream", body=events),
    )
    talk.ask(page, "What is 17 + 25?")
    expect(page.locator(".problem")).to_contain_text("The model thought, and ended before it answered.")
