"""The view of the server's models: their states, and a model that is pulled from a hub of our own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from bitnet.core.model.default import default_model_path

from ..test_ollama_library import hub as _hub
from ..test_ollama_library import on_the_hub

PATHS = ("packages/bitnet-server/src/bitnet/server/page", "packages/bitnet-server/tests/page")
pytestmark = pytest.mark.nightly(unless_changed=PATHS)
hub = _hub


@pytest.fixture
def folder_page(
    hub: Any, browser: Browser, tmp_path: Path, serve: Callable[..., AbstractContextManager[str]]
) -> Iterator[Page]:
    """The view of the models of a server with a models folder, which has one."""
    folder = tmp_path / "models"
    folder.mkdir()
    shutil.copy(default_model_path(), folder / "here.gguf")
    with serve("--models", str(folder)) as url, browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{url}#/models")
        yield page


def pull(page: Page, name: str) -> None:
    page.get_by_label("Pull a model from the Hugging Face Hub").fill(name)
    page.get_by_role("button", name="Pull", exact=True).click()


def test_a_model_is_pulled_and_chosen(hub: Any, folder_page: Page) -> None:
    page = folder_page
    models = page.get_by_role("list", name="Models")
    expect(models.get_by_role("listitem")).to_contain_text(["unloaded"])
    size = len(on_the_hub(hub, "org/name", "name.gguf"))
    hub.stall = size // 2
    pull(page, "org/name")
    downloads = page.get_by_role("list", name="Downloads")
    expect(downloads).to_contain_text(f"{size // 2 / 1e6:.1f} MB of {size / 1e6:.1f} MB")
    bar = float(page.get_by_role("progressbar").evaluate("(bar) => bar.value"))
    assert abs(bar - 0.5) < 0.01
    page.get_by_role("link", name="Settings").click()  # the download goes on
    page.get_by_role("link", name="Models").click()
    expect(page.get_by_role("progressbar")).to_be_visible()
    page.get_by_role("button", name="Stop pulling org/name").click()
    expect(downloads).not_to_be_visible()
    hub.stall = None
    hub.go_on.set()
    pull(page, "org/name")
    expect(models).to_contain_text("org/name")
    expect(downloads).not_to_be_visible()
    page.get_by_role("link", name="New conversation", exact=True).first.click()
    page.get_by_label("Model", exact=True).select_option("org/name")
    page.get_by_label("Message", exact=True).fill("What is 17 + 25?")
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant .prose")).to_contain_text("42", timeout=60_000)
    page.get_by_role("link", name="Models").click()
    expect(models.get_by_role("listitem").filter(has_text="org/name")).to_contain_text("loaded")
    page.get_by_role("button", name="About org/name").click()
    expect(page.get_by_role("dialog")).to_contain_text("tokens")


def test_what_cannot_be_pulled_says_why(folder_page: Page) -> None:
    page = folder_page
    pull(page, "org/absent")
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("org/absent")
    expect(alert.get_by_role("button", name="Try again")).to_be_visible()
    page.get_by_role("button", name="Close this message").click()
    expect(alert).to_have_count(0)
    pull(page, "not a name")
    expect(alert).to_contain_text("not a name")


def test_a_server_of_fixed_models_says_what_to_do(open_page: Callable[..., Page]) -> None:
    page = open_page("models", expected=("400",))
    expect(page.get_by_role("list", name="Models")).to_contain_text("bitnet-demo")
    pull(page, "org/name")
    expect(page.get_by_role("alert")).to_contain_text("start it with --models FOLDER")


@pytest.mark.parametrize("ending", ["", '{"error": "the disk is full"}\n', '{"status": "pull'])
def test_a_download_that_breaks_off_is_not_taken_for_whole(open_page: Callable[..., Page], ending: str) -> None:
    page = open_page("models")
    line = json.dumps({"status": "pulling x", "total": 10, "completed": 10})

    def answer(route: Route) -> None:
        route.fulfill(content_type="application/x-ndjson", body=f"{line}\n{ending}")

    page.route("**/api/pull", answer)
    pull(page, "org/<b>")
    expect(page.get_by_role("alert")).to_contain_text("The disk is full" if "disk" in ending else "broke off")
    expect(page.get_by_role("list", name="Downloads")).to_contain_text("org/<b>")
