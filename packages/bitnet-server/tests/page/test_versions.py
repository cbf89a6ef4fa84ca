"""Versions of messages: nothing that was asked or answered is lost by asking again, editing, or an error."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

PATHS = ("packages/bitnet-server/src/bitnet/server/page", "packages/bitnet-server/tests/page")
pytestmark = pytest.mark.nightly(unless_changed=PATHS)

COMPLETIONS = "**/v1/chat/completions"
ASSISTANT = ".message.assistant .prose"


@pytest.fixture
def asked(page: Page, talk: Any) -> list[list[str]]:
    """What the model was told each time; its nth answer is “Answer n.”."""
    prompts: list[list[str]] = []

    def answer(route: Route) -> None:
        body: Any = route.request.post_data_json
        prompts.append([message["content"] for message in body["messages"]])
        talk.reply(route, f"Answer {len(prompts)}.")

    page.route(COMPLETIONS, answer)
    return prompts


def texts(page: Page) -> list[str]:
    return page.locator(".message .bubble, .message .prose").all_inner_texts()


def edit(page: Page, name: str, text: str, finish: str, nth: int = 0) -> None:
    page.get_by_role("button", name=name).nth(nth).click()
    page.get_by_role("textbox", name=name).fill(text)
    page.locator(".edit").get_by_role("button", name=finish, exact=True).click()


def test_answers_and_exchanges_stay_as_versions(page: Page, talk: Any, asked: list[list[str]]) -> None:
    talk.ask(page, "One")
    talk.answered(page)
    talk.ask(page, "Two")
    talk.answered(page, 2)
    page.get_by_role("button", name="Answer again").click()
    expect(page.locator(ASSISTANT).last).to_have_text("Answer 3.")
    expect(page.locator(".versions")).to_have_text("2/2")
    edit(page, "Edit the message", "Three", "Send")
    expect(page.locator(ASSISTANT)).to_have_text(["Answer 4."])
    assert asked[-1] == ["Three"]
    expect(page.locator(".versions")).to_have_text("2/2")

    page.get_by_role("button", name="Earlier version").click()
    expect(page.locator(ASSISTANT)).to_have_text(["Answer 1.", "Answer 3."])
    assert texts(page) == ["One", "Answer 1.", "Two", "Answer 3."]
    expect(page.locator(".versions")).to_have_text(["1/2", "2/2"])
    page.get_by_role("button", name="Earlier version").last.click()
    expect(page.locator(ASSISTANT).last).to_have_text("Answer 2.")
    page.reload()
    expect(page.locator(ASSISTANT)).to_have_text(["Answer 1.", "Answer 2."])
    talk.ask(page, "Four")
    talk.answered(page, 3)
    assert asked[-1] == ["One", "Answer 1.", "Two", "Answer 2.", "Four"]
    page.get_by_role("button", name="Later version").first.click()
    expect(page.locator(ASSISTANT)).to_have_text(["Answer 4."])
    page.get_by_role("button", name="Earlier version").click()
    expect(page.locator(ASSISTANT)).to_have_text(["Answer 1.", "Answer 2.", "Answer 5."])


def test_an_answer_is_edited_and_continued(page: Page, talk: Any, asked: list[list[str]]) -> None:
    talk.ask(page, "What is the capital of France?")
    talk.answered(page)
    edit(page, "Edit the answer", "My own answer", "Keep")
    expect(page.locator(ASSISTANT)).to_have_text("My own answer")
    expect(page.locator(".facts")).to_contain_text("edited by you")
    expect(page.locator(".versions")).to_have_text("2/2")
    talk.ask(page, "More")
    talk.answered(page, 2)
    assert asked[-1] == ["What is the capital of France?", "My own answer", "More"]
    edit(page, "Edit the answer", "Another", "Keep")
    expect(page.locator(ASSISTANT)).to_have_text(["Another"])
    page.get_by_role("button", name="Earlier version").click()
    expect(page.locator(ASSISTANT)).to_have_text(["My own answer", "Answer 2."])
    page.get_by_role("button", name="Later version").click()

    edit(page, "Edit the answer", "The capital of France", "Keep and continue", 0)
    expect(page.locator(ASSISTANT)).to_have_text("The capital of France is Paris.")  # the model itself
    expect(page.locator(".versions")).to_have_text("4/4")


def test_a_question_edited_while_it_is_answered_keeps_what_has_come(page: Page, talk: Any) -> None:
    page.evaluate(
        """() => {
            const real = window.fetch;
            window.fetch = (url, { signal, ...options } = {}) => {
                if (!String(url).endsWith("chat/completions") || window.quick) return real(url, { signal, ...options });
                const chunk = { choices: [{ index: 0, delta: { content: "half an answer" } }] };
                const start = (controller) => {
                    controller.enqueue(new TextEncoder().encode(`data: ${JSON.stringify(chunk)}\\n\\n`));
                    signal.addEventListener("abort", () => controller.error(signal.reason));
                };
                return Promise.resolve(new Response(new ReadableStream({ start })));
            };
        }"""
    )
    talk.ask(page, "One")
    expect(page.locator(ASSISTANT)).to_have_text("half an answer")
    page.evaluate("window.quick = true")
    page.route(COMPLETIONS, lambda route: talk.reply(route, "A whole answer"))
    edit(page, "Edit the message", "Two", "Send")
    expect(page.locator(ASSISTANT)).to_have_text("A whole answer")
    page.get_by_role("button", name="Earlier version").click()
    expect(page.locator(ASSISTANT)).to_have_text("half an answer")
    expect(page.get_by_role("button", name="Continue the answer")).to_be_visible()


def test_a_question_that_was_never_answered_stays_a_version(open_page: Callable[..., Page], talk: Any) -> None:
    page = open_page(expected=("429",))
    page.route(COMPLETIONS, lambda route: route.fulfill(status=429, body="{}"))
    talk.ask(page, "One")
    expect(page.get_by_role("alert")).to_be_visible()
    page.route(COMPLETIONS, lambda route: talk.reply(route, "The answer"))
    talk.ask(page, "Two")
    talk.answered(page)
    page.get_by_role("button", name="Earlier version").click()
    expect(page.locator(".bubble")).to_have_text("One")
    expect(page.get_by_role("button", name="Answer", exact=True)).to_be_visible()


def test_an_answer_is_shown_as_written(page: Page, talk: Any) -> None:
    page.route(COMPLETIONS, lambda route: talk.reply(route, "**bold** <b>\n\n- one"))
    talk.ask(page, "One")
    talk.answered(page)
    button = page.get_by_role("button", name="Show the answer as written")
    button.click()
    assert page.locator(".raw").inner_text() == "**bold** <b>\n\n- one"
    expect(button).to_have_attribute("aria-pressed", "true")
    button.click()
    expect(page.locator(".prose strong")).to_have_text("bold")


def test_random_changes_lose_no_message(page: Page) -> None:
    """A model of the tree in Python says which paths there are; each can be shown, and each message is kept."""
    seed = random.randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)
    names = iter(range(10_000))
    steps: list[tuple[str, int, int]] = []
    tree: dict[int, list[int]] = {-1: []}  # each message's next ones, by name
    shown: dict[int, int] = {}  # which of them is shown
    paths = []

    def path() -> list[int]:
        found = [-1]
        while tree[found[-1]]:
            found.append(tree[found[-1]][shown[found[-1]]])
        return found

    for _ in range(150):
        now = path()
        act = draw.choice(["add", "fork", "choose"])
        index = draw.randrange(len(now)) if act != "add" else len(now) - 1
        parent = now[index]
        if act == "choose" and tree[parent]:
            shown[parent] = draw.randrange(len(tree[parent]))
            steps.append(("choose", index, shown[parent]))
        else:
            name = next(names)
            tree[parent].append(name)
            tree[name] = []
            shown[parent] = len(tree[parent]) - 1
            steps.append(("add", index, name))
        paths.append(path()[1:])
    got = page.evaluate(
        """async (steps) => {
            const { choose, everything, setAside } = await import("/assets/branches.js");
            const messages = [];
            const paths = steps.map(([act, index, value]) => {
                if (act === "choose") choose(messages, index, value);
                else {
                    const versions = index < messages.length ? setAside(messages, index) : undefined;
                    messages.push({ content: value, versions });
                }
                return messages.map(({ content }) => content);
            });
            return [paths, everything(messages).map(({ content }) => content).sort((a, b) => a - b)];
        }""",
        steps,
    )
    assert got[0] == paths, seed
    assert got[1] == sorted(name for name in tree if name >= 0), seed
