"""What a conversation has of its own, and what the page says about the model, the context and the key."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

PATHS = ("packages/bitnet-server/src/bitnet/server/page", "packages/bitnet-server/tests/page")
pytestmark = pytest.mark.nightly(unless_changed=PATHS)

COMPLETIONS = "**/v1/chat/completions"


@pytest.fixture
def page(open_page: Callable[..., Page]) -> Page:
    """The server knows no models but its own: it cannot count the tokens of those that tests make up."""
    return open_page(expected=("404",))


@pytest.fixture
def bodies(page: Page, talk: Any) -> list[Any]:
    """The requests' bodies; each gets an answer."""
    seen: list[Any] = []

    def answer(route: Route) -> None:
        seen.append(route.request.post_data_json)
        talk.reply(route, f"Answer {len(seen)}.")

    page.route(COMPLETIONS, answer)
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": "first"}, {"id": "second"}]}))
    page.reload()
    page.wait_for_selector("h1")
    return seen


def test_a_conversation_has_its_own_model_sampling_and_prompt(page: Page, talk: Any, bodies: list[Any]) -> None:
    page.get_by_role("link", name="Settings").click()
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Top k").fill("40")
    page.get_by_role("link", name="New conversation", exact=True).first.click()
    page.get_by_label("Model", exact=True).select_option("second")
    talk.menu(page, "Options")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.25")
    page.get_by_label("Stop at").fill("END")
    page.get_by_role("button", name="Done").click()
    talk.ask(page, "One")
    talk.answered(page)
    page.get_by_role("link", name="New conversation", exact=True).first.click()
    page.get_by_label("Model", exact=True).select_option("first")
    talk.ask(page, "Two")
    talk.answered(page)
    page.get_by_role("navigation", name="Conversations").get_by_role("link", name="One").click()
    expect(page.locator("h1")).to_have_text("One")
    page.reload()
    expect(page.get_by_label("Model", exact=True)).to_have_value("second")
    talk.ask(page, "Three")
    talk.answered(page, 2)
    for body, model, own in zip(bodies, ("second", "first", "second"), (True, False, True), strict=True):
        assert body["model"] == model
        assert (body["temperature"], body["top_k"]) == (0.25 if own else 0.5, 40)
        assert body.get("stop") == (["END"] if own else None)
        assert (body["messages"][0]["content"] == "Be brief.") == own
    saved = talk.stored(page)
    copies = page.evaluate(
        """async (all) => {
            const { parse, toJSON } = await import("/assets/transfer.js");
            return parse("a.json", toJSON(all));
        }""",
        saved,
    )
    for one, copy in zip(saved, copies, strict=True):
        assert (copy["model"], copy.get("sampling")) == (one["model"], one.get("sampling"))


def test_prompt_presets(page: Page, talk: Any, bodies: list[Any]) -> None:
    talk.menu(page, "Options")
    page.get_by_label("System prompt").fill("You are a pirate.\n<b>Arr</b>")
    page.get_by_role("button", name="Keep as preset").click()
    page.get_by_label("Name of the preset").fill("Pirate")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Preset", exact=True)).to_have_value("Pirate")
    page.get_by_label("System prompt", exact=True).fill("")
    page.get_by_role("button", name="Done").click()
    page.reload()
    talk.menu(page, "Options")
    page.get_by_label("Preset", exact=True).select_option("Pirate")
    page.get_by_role("button", name="Done").click()
    talk.ask(page, "One")
    talk.answered(page)
    assert bodies[0]["messages"][0] == {"role": "system", "content": "You are a pirate.\n<b>Arr</b>"}
    page.get_by_role("link", name="Settings").click()
    page.get_by_role("button", name="Delete the preset “Pirate”").click()
    expect(page.get_by_text("None yet. The options")).to_be_visible()
    page.get_by_role("button", name="Undo").click()
    page.get_by_text("Pirate", exact=True).click()
    expect(page.get_by_text("<b>Arr</b>")).to_be_visible()


def test_the_gauge_says_what_happens_when_the_context_is_full(page: Page, talk: Any) -> None:
    talk.ask(page, "What is the capital of France?")
    talk.answered(page)
    page.get_by_role("button", name="Context:").click()
    context = page.evaluate("fetch('props').then((answer) => answer.json()).then((props) => props.context)")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(f"at most {context:,} tokens at once")
    expect(dialog).to_contain_text(f"75 % of it ({context * 3 // 4:,} tokens)")


def test_the_model_is_described(page: Page, server: str, talk: Any) -> None:
    talk.menu(page, "About the model")
    request = urllib.request.Request(f"{server}api/show", json.dumps({"model": "bitnet-demo"}).encode())
    with urllib.request.urlopen(request, timeout=20) as response:
        shown = json.load(response)
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(shown["details"]["parameter_size"])
    expect(dialog).to_contain_text(shown["details"]["quantization_level"])
    expect(dialog).to_contain_text(shown["details"]["family"])
    dialog.get_by_text("Chat template").click()
    assert dialog.locator("pre").inner_text() == shown["template"]
    page.get_by_role("button", name="Close").click()
    page.route("**/api/show", lambda route: route.fulfill(status=404, json={"error": "gone"}))


ANSWERS = {"capital": "Paris", "17 + 25": "42", "strawberry": "3 times", "fox": "fox"}


def test_the_demo_model_can_answer_what_is_suggested(page: Page, talk: Any) -> None:
    page.get_by_role("link", name="Settings").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Longest answer").fill("40")
    page.get_by_role("link", name="New conversation", exact=True).first.click()
    ideas = page.locator(".ideas button")
    expect(ideas).to_have_count(len(ANSWERS))
    for nth, (word, right) in enumerate(ANSWERS.items()):
        expect(ideas.nth(nth)).to_contain_text(word)
        ideas.nth(nth).click()
        assert right in talk.answered(page), word
        page.get_by_role("link", name="New conversation", exact=True).first.click()


def test_other_models_get_other_suggestions(page: Page, bodies: list[Any]) -> None:
    expect(page.locator(".ideas button")).to_have_count(3)
    expect(page.get_by_role("button", name="Why is the sky blue?")).to_be_visible()


def test_a_key_is_checked(open_page: Callable[..., Page]) -> None:
    page = open_page("settings", expected=("Failed to load resource",))
    page.get_by_role("button", name="Check the key").click()
    result = page.locator("#s-server ~ form [role=status]")
    expect(result).to_have_text("The server asks for no key.")
    page.get_by_label("API key").fill("any")
    page.get_by_label("API key").press("Enter")
    expect(result).to_have_text("The server asks for no key; any is accepted.")

    def guard(route: Route) -> None:
        right = route.request.headers.get("authorization") == "Bearer right"
        error = {"error": {"message": "The API key is missing or wrong.", "code": "invalid_api_key"}}
        route.fulfill(status=200 if right else 401, json={"data": [{"id": "first"}]} if right else error)

    page.route("**/v1/models", guard)
    for key, text in {
        "wrong": "The server does not accept this key.",
        "right": "The server accepts this key.",
        "": "The server asks for a key.",
    }.items():
        page.get_by_label("API key").fill(key)
        page.get_by_role("button", name="Check the key").click()
        expect(result).to_contain_text(text)
    page.get_by_role("link", name="New conversation", exact=True).first.click()
    expect(page.get_by_role("alert")).to_contain_text("The server asks for an API key")
    page.get_by_role("link", name="Enter the key").click()
    page.get_by_label("API key").fill("right")
    page.get_by_label("API key").press("Enter")
    expect(result).to_contain_text("accepts")
    page.get_by_role("link", name="New conversation", exact=True).first.click()
    expect(page.get_by_label("Model", exact=True)).to_have_value("first")
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_server_that_cannot_be_asked_for_models_says_so(open_page: Callable[..., Page]) -> None:
    page = open_page(expected=("Failed to load resource",))
    page.route("**/v1/models", lambda route: route.abort())
    page.reload()
    expect(page.get_by_role("alert")).to_contain_text("The connection to the server was lost")
    expect(page.get_by_label("Model", exact=True)).to_have_text("No model")
    page.unroute("**/v1/models")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".ideas button")).not_to_have_count(0)
