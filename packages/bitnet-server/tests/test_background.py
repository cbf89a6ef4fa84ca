"""Responses that nobody waits for: polled, cancelled, deleted and failed, with the official client; and their input."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from bitnet.core import DeviceError, load_model


@pytest.fixture(scope="module")
def server(running: Any, scripted: Any) -> Iterator[Any]:
    with load_model(device="cpu", max_seqs=2, threads=1) as model:
        engine = scripted(model, lambda prompt: "Yes, it is." * (30 if "long" in prompt else 1))
        with running(model, names=("m",)) as found:
            found.engine = engine
            found.api = openai.OpenAI(base_url=f"{found.url}/v1", api_key="none", max_retries=0)
            yield found


@pytest.fixture(autouse=True)
def fast(server: Any) -> None:
    server.engine.seconds = 0.0


def ended(server: Any, id: str) -> Any:
    """The response once it is no longer in progress."""
    for _ in range(400):
        found = server.api.responses.retrieve(id)
        if found.status not in ("queued", "in_progress"):
            return found
        time.sleep(0.02)
    raise AssertionError("it goes on and on")


def idle(server: Any) -> bool:
    """Whether the engine has nothing to do, soon."""
    for _ in range(400):
        if not server.engine._scheduler.sequences and not server.state.admission.present:
            return True
        time.sleep(0.02)
    return False


def test_it_is_polled_and_goes_on(server: Any) -> None:
    advance, opened = server.engine.advance, threading.Event()
    server.engine.advance = lambda deliver: opened.wait(60) and advance(deliver)
    first = server.api.responses.create(model="m", input="long?", background=True, max_output_tokens=60)
    assert (first.status, first.background, first.output) == ("queued", True, [])
    with pytest.raises(openai.BadRequestError, match="still computed"):
        server.api.responses.create(model="m", input="x", previous_response_id=first.id)
    opened.set()
    found = ended(server, first.id)
    assert (found.status, found.usage.output_tokens) == ("incomplete", 60)
    assert found.output_text.startswith("Yes, it is.Yes")
    later = server.api.responses.create(model="m", input="And?", previous_response_id=first.id)
    assert later.status == "completed"
    assert found.output_text in server.engine.prompts[-1]
    assert server.api.responses.cancel(first.id).status == "incomplete"  # it stays as it is


def test_it_is_cancelled(server: Any) -> None:
    server.engine.seconds = 0.02
    first = server.api.responses.create(model="m", input="long?", background=True)
    assert server.api.responses.cancel(first.id).status == "cancelled"
    assert server.api.responses.cancel(first.id).status == "cancelled"
    assert idle(server)
    assert server.api.responses.retrieve(first.id).status == "cancelled"


def test_it_is_deleted(server: Any) -> None:
    server.engine.seconds = 0.02
    first = server.api.responses.create(model="m", input="long?", background=True)
    server.api.responses.delete(first.id)
    assert idle(server)
    with pytest.raises(openai.NotFoundError):
        server.api.responses.retrieve(first.id)


def test_what_cannot_be_in_the_background(server: Any) -> None:
    api = server.api
    with pytest.raises(openai.BadRequestError, match="stored"):
        api.responses.create(model="m", input="x", background=True, store=False)
    with pytest.raises(openai.BadRequestError, match="polled"):
        api.responses.create(model="m", input="x", background=True, stream=True)
    waited_for = api.responses.create(model="m", input="x")
    with pytest.raises(openai.BadRequestError, match="background: true"):
        api.responses.cancel(waited_for.id)
    with pytest.raises(openai.NotFoundError):
        api.responses.cancel("resp_unknown")


def test_input_is_listed(server: Any) -> None:
    api = server.api
    text = api.responses.create(model="m", input="Is it?")
    (item,) = api.responses.input_items.list(text.id).data
    assert (item.role, item.content[0].text) == ("user", "Is it?")
    given: Any = [{"role": "user", "content": f"question {i}"} for i in range(5)]
    given.insert(1, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"})
    given.insert(2, {"type": "function_call_output", "call_id": "c", "output": "27"})
    several = api.responses.create(model="m", input=given)
    listed = [*api.responses.input_items.list(several.id, limit=2, order="asc")]  # the client asks for all pages
    assert [one.type for one in listed[:3]] == ["message", "function_call", "function_call_output"]
    assert [one.content[0].text for one in listed if one.type == "message"] == [f"question {i}" for i in range(5)]
    assert len({one.id for one in listed}) == 7
    assert [one.id for one in api.responses.input_items.list(several.id)] == [one.id for one in listed][::-1]
    with pytest.raises(openai.NotFoundError):
        api.responses.input_items.list("resp_unknown")


def test_a_failure_is_found(server: Any) -> None:
    """The last test: the engine has failed."""
    server.engine.failure = DeviceError("It burns.", device="cpu")
    first = server.api.responses.create(model="m", input="x", background=True)
    found = ended(server, first.id)
    assert found.status == "failed"
    assert found.error.message
