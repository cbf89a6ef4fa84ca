"""Stored responses: a conversation that goes on, its bounds, and what the official client does with it."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from bitnet.core import Model
from bitnet.server.models import stored

KEY = b"key"


def test_a_conversation_goes_on(script_model: Model, running: Any, scripted: Any) -> None:
    engine: Any = scripted(script_model, lambda prompt: f"answer {len(engine.prompts)}")
    seen = engine.prompts
    with running(script_model, names=("m",)) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        first = client.responses.create(model="m", input="question one", instructions="Be brief.")
        assert (first.output_text, first.to_dict()["store"]) == ("answer 1", True)
        with client.responses.stream(model="m", input="question two", previous_response_id=first.id) as stream:
            second = stream.get_final_response()
        assert second.previous_response_id == first.id
        parts = ["question one", "answer 1", "question two"]
        assert [p for p in parts if p in seen[-1]] == parts
        assert "Be brief." in seen[0]
        assert "Be brief." not in seen[1]  # instructions are each request's own
        third = client.responses.create(model="m", input="question three", previous_response_id=second.id)
        whole = [{"role": "user", "content": "question one"}, {"role": "assistant", "content": "answer 1"},
                 {"role": "user", "content": "question two"}, {"role": "assistant", "content": "answer 2"},
                 {"role": "user", "content": "question three"}]  # fmt: skip
        assert seen[-1] == script_model.tokenizer.decode(script_model.chat_tokens(whole), skip_special=False)
        assert client.responses.retrieve(second.id).output_text == "answer 2"
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.delete(first.id)
        with pytest.raises(openai.BadRequestError) as gone:
            client.responses.create(model="m", input="x", previous_response_id=first.id)
        assert (gone.value.code, gone.value.param) == ("previous_response_not_found", "previous_response_id")
        assert client.responses.create(model="m", input="x", previous_response_id=third.id).status == "completed"
        assert "question one" in seen[-1]  # what was deleted is part of what came after
        unkept = client.responses.create(model="m", input="x", store=False)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(unkept.id)


def test_calls_are_part_of_what_is_stored(script_model: Model, running: Any, scripted: Any) -> None:
    call = json.dumps({"name": "add", "arguments": {"a": 1}})
    engine: Any = scripted(script_model, lambda prompt: call if len(engine.prompts) == 1 else "2")
    seen = engine.prompts
    tool: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
    with running(script_model, names=("m",)) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        first = client.responses.create(model="m", input="add one", tools=[tool])
        (item,) = first.output
        assert item.type == "function_call"
        output: Any = [{"type": "function_call_output", "call_id": item.call_id, "output": "it is two"}]
        second = client.responses.create(model="m", input=output, previous_response_id=first.id, tools=[tool])
        assert second.output_text == "2"
        assert all(part in seen[-1] for part in ("add one", '"arguments": {"a": 1}', "Result of add: it is two"))


def test_count_size_and_age_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("bitnet.server.models.stored.time.monotonic", lambda: clock[0])
    kept = stored.Stored(3)
    for i in range(5):
        kept.put(KEY, {"id": f"r{i}"}, [])
    assert [i for i in range(5) if kept.get(KEY, f"r{i}")] == [2, 3, 4]
    clock[0] += stored.SECONDS / 2
    kept.put(KEY, {"id": "young"}, [])
    clock[0] += stored.SECONDS / 2
    assert kept.get(KEY, "r4") is None
    assert (len(kept), kept.get(KEY, "young") is not None) == (1, True)
    monkeypatch.setattr(stored, "MAX_BYTES", 940)
    kept.put(KEY, {"id": "large", "text": "x" * 900}, [])
    assert (kept.get(KEY, "young"), kept.get(KEY, "large") is not None) == (None, True)
    kept.put(KEY, {"id": "too large", "text": "x" * 2000}, [])
    assert len(kept) == 0
    none = stored.Stored(0)
    none.put(KEY, {"id": "x"}, [])
    assert none.get(KEY, "x") is None


def test_a_response_belongs_to_the_key_that_made_it(demo_model: Model, running: Any) -> None:
    keys = ("one", "two")
    with running(demo_model, names=("m",), api_keys=keys) as server:
        one, two = (openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) for key in keys)
        made = one.responses.create(model="m", input="x", max_output_tokens=1)
        absent = "There is no response"
        with pytest.raises(openai.NotFoundError, match=absent):
            two.responses.retrieve(made.id)
        with pytest.raises(openai.NotFoundError, match=absent):
            two.responses.delete(made.id)
        with pytest.raises(openai.BadRequestError, match=absent):
            two.responses.create(model="m", input="x", previous_response_id=made.id)
        again = {"x-api-key": "one"}  # the same key, sent in the other way
        assert server.client.get(f"/v1/responses/{made.id}", headers=again).json()["id"] == made.id
        assert one.responses.create(model="m", input="x", max_output_tokens=1, previous_response_id=made.id)
        one.responses.delete(made.id)


def test_metadata_is_bounded(demo: Any) -> None:
    def status(metadata: Any) -> int:
        return int(
            demo.client.post(
                "/v1/responses", json={"input": "x", "max_output_tokens": 1, "metadata": metadata}
            ).status_code
        )

    assert status({"a": "x" * 512}) == 200
    wrong: list[Any] = [{"a": "x" * 600}, {str(i): "" for i in range(17)}, {"a": 1}, []]
    assert [status(metadata) for metadata in wrong] == [400] * 4
