"""The official ``anthropic`` client, over the demo model and over scripted answers."""

from __future__ import annotations

from typing import Any, Literal

import anthropic
import pytest
from pydantic import BaseModel

from bitnet.core import Model

GREEDY = {"temperature": 0}  # the client's newest versions have no argument for it
QUESTION: Any = {"role": "user", "content": "What is 17 + 25?"}


def text_of(message: Any) -> str:
    (block,) = message.content
    return str(block.text)


@pytest.fixture(scope="module")
def client(demo: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=demo.url, api_key="none", max_retries=0)


def test_message(client: anthropic.Anthropic, demo: Any) -> None:
    answer = client.messages.create(model="demo", max_tokens=50, messages=[QUESTION], extra_body=GREEDY)
    expected = demo.model.chat([QUESTION])
    assert [block.text for block in answer.content if block.type == "text"] == [expected.text]
    assert answer.stop_reason == "end_turn"
    assert answer.usage.output_tokens == len(expected.tokens)
    cached = answer.usage.cache_read_input_tokens or 0
    assert answer.usage.input_tokens + cached == len(expected.prompt_tokens)


def test_stream(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model="demo", max_tokens=50, messages=[QUESTION], extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == text_of(final) == "17 + 25 = 42."
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens == 11


def test_length_and_system(client: anthropic.Anthropic, demo: Any) -> None:
    blocks: Any = [{"type": "text", "text": "Be brief."}]
    answer = client.messages.create(
        model="demo",
        max_tokens=3,
        system=blocks,
        messages=[QUESTION],
        extra_body=GREEDY,
    )
    expected = demo.model.chat([{"role": "system", "content": "Be brief."}, QUESTION], max_tokens=3)
    assert text_of(answer) == expected.text
    assert answer.stop_reason == "max_tokens"


def test_count_tokens(client: anthropic.Anthropic, demo: Any) -> None:
    found = client.messages.count_tokens(model="demo", messages=[QUESTION])
    assert found.input_tokens == len(demo.model.chat_tokens([QUESTION]))


def test_errors_are_the_clients_own(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", max_tokens=5, messages=[QUESTION])
    with pytest.raises(anthropic.BadRequestError, match="temperature is 3") as wrong:
        client.messages.create(model="demo", max_tokens=5, messages=[QUESTION], extra_body={"temperature": 3})
    assert wrong.value.body == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "temperature is 3; it must be in 0 … 1."},
    }
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    with pytest.raises(anthropic.BadRequestError, match="reads only text"):
        client.messages.create(model="demo", max_tokens=5, messages=[{"role": "user", "content": [image]}])


def test_a_stop_sequence_is_named(script_model: Model, running: Any, scripted: Any) -> None:
    scripted(script_model, "one two three four")
    with running(script_model) as server:
        client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
        for stop, text in (("three", "one two "), ("never", "one two three four")):
            answer = client.messages.create(
                model="bitnet-demo",
                max_tokens=50,
                messages=[QUESTION],
                stop_sequences=[stop],
            )
            assert text_of(answer) == text
            assert answer.stop_sequence == (stop if stop == "three" else None)
            assert answer.stop_reason == ("stop_sequence" if stop == "three" else "end_turn")


class Sum(BaseModel):
    """What the model is held to."""

    sum: Literal["7", "8"]
    why: Literal["added", "guessed"]


def test_objects_are_parsed(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": "demo", "max_tokens": 100, "messages": [{"role": "user", "content": "What is 3 + 4?"}]}
    found = client.messages.parse(**asked, output_format=Sum)
    assert isinstance(found.parsed_output, Sum)
    with client.messages.stream(**asked, output_format=Sum) as stream:
        last = stream.get_final_message()
    assert isinstance(last.parsed_output, Sum)
