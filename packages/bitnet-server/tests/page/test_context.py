"""Conversations that outgrow the model's context, and answers that are cut off."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

pytestmark = pytest.mark.nightly(unless_changed=("packages/bitnet-server",))

COMPLETIONS = "**/v1/chat/completions"


def sent(route: Route) -> list[str]:
    body: Any = route.request.post_data_json
    return [message["content"] for message in body["messages"]]


def count(page: Page, messages: list[dict[str, str]]) -> int:
    """The tokens of a prompt, as the server counts them for another API."""
    return int(
        page.evaluate(
            """async (messages) => {
                const system = messages[0].role === "system" ? messages.shift().content : "";
                const body = JSON.stringify({ model: "bitnet-demo", max_tokens: 1, system, messages });
                const headers = { "Content-Type": "application/json" };
                const answer = await fetch("v1/messages/count_tokens", { method: "POST", headers, body });
                return (await answer.json()).input_tokens;
            }""",
            messages,
        )
    )


def test_the_oldest_exchanges_are_left_out(page: Page, talk: Any) -> None:
    """As few as leave a quarter of the context to the answer; nothing is lost of what is shown and kept."""
    context = page.evaluate("fetch('props').then((answer) => answer.json()).then((props) => props.context)")
    asked: list[Any] = []

    def answer(route: Route) -> None:
        asked.append(route.request.post_data_json)
        talk.reply(route, f"Answer {len(asked)}. " + "word " * (context // 8))

    page.route(COMPLETIONS, answer)
    talk.menu(page, "Options")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_role("button", name="Done").click()
    whole: list[dict[str, str]] = []
    for turn in range(1, 8):
        whole.append({"role": "user", "content": f"Question {turn}"})
        talk.ask(page, f"Question {turn}")
        talk.answered(page, turn)
        system, *kept = asked[-1]["messages"]
        assert system == {"role": "system", "content": "Be brief."}
        assert kept == whole[-len(kept) :]
        assert count(page, [system, *kept]) <= context * 3 / 4
        if len(kept) < len(whole):
            assert count(page, [system, *whole[-len(kept) - 2 :]]) > context * 3 / 4
        whole.append({"role": "assistant", "content": f"Answer {turn}. " + "word " * (context // 8)})
    assert len(asked[-1]["messages"]) < len(whole)
    forgotten = page.locator(".forgotten")
    expect(forgotten).to_have_count(1)
    after = forgotten.locator("xpath=following-sibling::li[1]")
    expect(after).to_contain_text(kept[0]["content"])
    page.reload()
    talk.answered(page, 7)
    expect(page.locator(".forgotten")).to_have_count(1)

    page.get_by_role("button", name="Edit the message").first.click()
    page.get_by_role("textbox", name="Edit the message").fill("Again")
    page.keyboard.press("Enter")
    talk.answered(page, 1)
    assert [m["content"] for m in asked[-1]["messages"]] == ["Be brief.", "Again"]
    expect(page.locator(".forgotten")).to_have_count(0)


def test_five_stories_and_more_with_the_model_itself(page: Page, talk: Any) -> None:
    page.get_by_role("link", name="Settings").click()
    page.get_by_label("Longest answer").fill("150")
    page.get_by_role("link", name="New conversation").first.click()
    page.wait_for_selector("#prompt")
    for turn in range(1, 9):
        talk.ask(page, "Tell me a long story.")
        talk.answered(page, turn)
    expect(page.get_by_role("alert")).to_have_count(0)


def test_the_gauge_says_how_full_the_context_is(page: Page, talk: Any) -> None:
    meter = page.get_by_role("meter", name="Context in use")
    expect(meter).not_to_be_visible()
    talk.ask(page, "What is the capital of France?")
    talk.answered(page)
    context = page.evaluate("fetch('props').then((answer) => answer.json()).then((props) => props.context)")
    used = count(page, [{"role": "user", "content": "What is the capital of France?"}]) + 11
    expect(meter).to_be_visible()
    assert meter.evaluate("one => [one.value, one.min, one.max]") == [used, 0, context]
    text = f"{used} of {context:,} tokens"
    expect(meter).to_have_attribute("aria-valuetext", text)
    expect(page.get_by_text(f"Context: {text}")).to_be_visible()
    page.reload()
    expect(meter).to_have_attribute("aria-valuetext", text)


def stored(talk: Any, page: Page) -> list[tuple[str, str, bool]]:
    """The stored messages of the only conversation: role, text, and whether it is cut off."""
    return [(m["role"], m["content"], bool(m.get("cut"))) for one in talk.stored(page) for m in one["messages"]]


def test_a_server_that_dies_takes_neither_question_nor_answer(
    open_page: Callable[..., Page], mortal: Any, trouble: list[Any], talk: Any
) -> None:
    """It is killed in mid-answer, and the browser's tab is closed, too; a new server goes on with the answer."""
    url, process = mortal()
    page = open_page(expected=("Failed to load resource", url))
    page.goto(url)
    page.wait_for_selector("h1")
    talk.ask(page, "Tell me a story.")
    expect(page.locator(".message.assistant .prose")).to_contain_text(" ")
    for _ in range(50):
        page.wait_for_timeout(100)
        if len(stored(talk, page)) == 2:  # kept while it grows
            break
    process.send_signal(signal.SIGKILL)
    expect(page.get_by_role("alert")).to_contain_text("broke off")
    expect(page.get_by_text("This answer was cut off.")).to_be_visible()
    (question, answer) = stored(talk, page)
    assert question == ("user", "Tell me a story.", False)
    assert answer[0::2] == ("assistant", True)
    assert page.locator(".message.assistant .prose").first.inner_text().split() == answer[1].split()

    mortal()
    page.evaluate("localStorage.setItem('bitnet.settings', JSON.stringify({ max_tokens: '12' }))")  # numpy is slow
    again = page.context.new_page()
    page.close()
    again.goto(url)
    again.get_by_role("navigation", name="Conversations").get_by_role("link").first.click()
    expect(again.get_by_text("This answer was cut off.")).to_be_visible()
    again.get_by_role("button", name="Continue the answer").click()
    expect(again.get_by_text("This answer was cut off.")).to_have_count(0)
    talk.answered(again)
    expect(again.get_by_role("button", name="Send")).to_be_visible()
    (_, whole) = stored(talk, again)
    assert whole[1].startswith(answer[1])
    assert len(whole[1]) > len(answer[1])
    assert not whole[2]


def grow(page: Page) -> None:
    """From now on a completion says a word every 30 ms, without end, until the signal or `window.lose()`."""
    page.evaluate(
        """() => {
            const real = window.fetch;
            window.fetch = (url, options) => {
                if (!String(url).endsWith("chat/completions")) return real(url, options);
                const encoder = new TextEncoder();
                let n = 0;
                const body = new ReadableStream({
                    start(controller) { window.lose = () => controller.error(new TypeError("network error")); },
                    async pull(controller) {
                        await new Promise((resolve) => setTimeout(resolve, 30));
                        const chunk = { choices: [{ index: 0, delta: { content: `word${n++} ` } }] };
                        controller.enqueue(encoder.encode(`data: ${JSON.stringify(chunk)}\\n\\n`));
                    },
                });
                return Promise.resolve(new Response(body));
            };
        }"""
    )


def test_a_reload_in_mid_answer_keeps_what_has_come(page: Page, talk: Any) -> None:
    grow(page)
    talk.ask(page, "Hello")
    expect(page.locator(".message.assistant .prose")).to_contain_text("word3")
    page.reload()
    expect(page.get_by_text("This answer was cut off.")).to_be_visible()
    expect(page.locator(".message.assistant .prose")).to_contain_text("word3")
    page.route(COMPLETIONS, lambda route: talk.reply(route, "A new answer"))
    page.get_by_role("button", name="Answer again").click()
    expect(page.locator(".message.assistant .prose")).to_have_text("A new answer")
    talk.answered(page)
    assert stored(talk, page) == [("user", "Hello", False), ("assistant", "A new answer", False)]


def test_a_part_of_an_answer_stays_beside_the_whole_one(page: Page, talk: Any) -> None:
    """An answer asked for again breaks off: what came of it is a version, and so is the whole answer before it."""
    page.route(COMPLETIONS, lambda route: talk.reply(route, "The old answer"))
    talk.ask(page, "Hello")
    talk.answered(page)
    grow(page)
    page.get_by_role("button", name="Answer again").click()
    expect(page.locator(".message.assistant .prose")).to_contain_text("word3")
    page.wait_for_timeout(1500)
    page.reload()  # kept while it grows
    expect(page.get_by_text("This answer was cut off.")).to_be_visible()
    page.get_by_role("button", name="Earlier version").click()
    expect(page.locator(".message.assistant .prose")).to_have_text("The old answer")
    grow(page)
    page.get_by_role("button", name="Answer again").click()
    expect(page.locator(".message.assistant .prose")).to_contain_text("word3")
    page.evaluate("window.lose()")
    expect(page.get_by_role("alert")).to_contain_text("broke off")
    expect(page.locator(".versions")).to_have_text("3/3")


def test_a_stopped_answer_can_be_continued(page: Page, talk: Any) -> None:
    """The server gets the tokens of the conversation and of the answer's beginning, and its text follows."""
    page.route(
        COMPLETIONS,
        lambda route: route.fulfill(
            content_type="text/event-stream",
            body=talk.sse(
                talk.says("The capital of France"), {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
            ),
        ),
    )
    talk.ask(page, "What is the capital of France?")
    talk.answered(page)
    with page.expect_request("**/v1/completions") as request:
        page.get_by_role("button", name="Continue the answer").click()
    expect(page.locator(".message.assistant .prose")).to_have_text("The capital of France is Paris.")
    expect(page.get_by_role("button", name="Continue the answer")).to_have_count(0)
    body: Any = request.value.post_data_json
    prompt = page.evaluate(
        """async (tokens) => {
            const headers = { "Content-Type": "application/json" };
            const answer = await fetch("detokenize", { method: "POST", headers, body: JSON.stringify({ tokens }) });
            return (await answer.json()).content;
        }""",
        body["prompt"],
    )
    assert "What is the capital of France?" in prompt
    assert prompt.endswith("The capital of France")
    assert json.dumps(stored(talk, page)[1][1]) == '"The capital of France is Paris."'


def test_an_answer_cannot_be_continued_without_the_server(open_page: Callable[..., Page], talk: Any) -> None:
    page = open_page(expected=("Failed to load resource",))
    body = talk.sse(talk.says("Half")).replace("data: [DONE]\n\n", "")
    page.route(COMPLETIONS, lambda route: route.fulfill(content_type="text/event-stream", body=body))
    talk.ask(page, "Hello")
    expect(page.get_by_text("This answer was cut off.")).to_be_visible()
    page.context.set_offline(True)
    page.get_by_role("button", name="Continue the answer").click()
    expect(page.get_by_role("alert")).to_contain_text("The connection to the server was lost")
    assert stored(talk, page) == [("user", "Hello", False), ("assistant", "Half", True)]
