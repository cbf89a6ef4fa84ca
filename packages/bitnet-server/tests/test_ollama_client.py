"""The official ``ollama`` client, over the demo model and over scripted answers."""

from __future__ import annotations

from typing import Any

import ollama
import pytest

from bitnet.core import Model, __version__

QUESTION: Any = {"role": "user", "content": "What is 17 + 25?"}
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def client(demo: Any) -> ollama.Client:
    return ollama.Client(host=demo.url)


def test_chat(client: ollama.Client, demo: Any) -> None:
    answer = client.chat(model="demo", messages=[QUESTION], options=GREEDY)
    expected = demo.model.chat([QUESTION])
    assert answer.message.content == expected.text
    assert (answer.done, answer.done_reason) == (True, "stop")
    assert answer.prompt_eval_count == len(expected.prompt_tokens)
    assert answer.eval_count == len(expected.tokens)
    lines = list(client.chat(model="demo:latest", messages=[QUESTION], options=GREEDY, stream=True))
    assert "".join(line.message.content or "" for line in lines) == expected.text
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]


def test_generate(client: ollama.Client, demo: Any) -> None:
    answer = client.generate(model="demo", prompt="What is 17 + 25?", options=GREEDY)
    assert answer.response == "17 + 25 = 42."
    raw = client.generate(model="demo", prompt="Once upon", raw=True, options={**GREEDY, "num_predict": 7})
    assert raw.response == demo.model.generate("Once upon", max_tokens=7).text
    assert raw.done_reason == "length"


def test_without_a_prompt_it_only_loads_the_model(client: ollama.Client, demo: Any) -> None:
    for more in ({}, {"stream": False}, {"prompt": ""}):
        answer = demo.client.post("/api/generate", json={"model": "demo", **more})
        told = answer.json()
        assert told.pop("created_at").endswith("Z")
        assert told == {"model": "demo", "response": "", "done": True, "done_reason": "load"}
    chat = demo.client.post("/api/chat", json={"model": "demo"}).json()
    assert (chat["message"], chat["done"]) == ({"role": "assistant", "content": ""}, True)
    assert client.chat(model="demo", messages=[]).done_reason == "load"
    assert [line.done_reason for line in client.generate(model="demo", stream=True)] == ["load"]
    assert demo.client.post("/api/generate", json={}).status_code == 400
    assert demo.client.post("/api/chat", json={"model": "demo", "messages": "x"}).status_code == 400
    assert demo.client.post("/api/generate", json={"model": "other"}).status_code == 404


def test_what_there_is(client: ollama.Client, demo: Any) -> None:
    assert [model.model for model in client.list().models] == ["demo"]
    assert [model.model for model in client.ps().models] == ["demo"]
    shown = client.show("demo")
    assert shown.details is not None
    assert shown.details.family == demo.model.config.architecture
    assert demo.client.get("/api/version").json() == {"version": __version__}


def test_errors_are_the_clients_own(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="is not here") as missing:
        client.chat(model="other", messages=[QUESTION])
    assert missing.value.status_code == 404
    for embed in (lambda: client.embed("demo", "x"), lambda: client.embeddings("demo", "x")):
        with pytest.raises(ollama.ResponseError, match="not made for embeddings"):
            embed()
    with pytest.raises(ollama.ResponseError, match=r"options\.top_p is 7"):
        client.chat(model="demo", messages=[QUESTION], options={"top_p": 7})


def test_scripted_lines(script_model: Model, running: Any, scripted: Any) -> None:
    scripted(script_model, "first line\nsecond “line”\n")
    with running(script_model) as server:
        lines = list(ollama.Client(host=server.url).chat(model="bitnet-demo", messages=[QUESTION], stream=True))
    assert "".join(line.message.content or "" for line in lines) == "first line\nsecond “line”\n"
