"""Log-probabilities of an answer: those of its tokens, without those of the thought before it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bitnet.core import load_model
from bitnet.core.text.chat import ChatTemplate

TEMPLATE = Path(__file__).parents[2] / "bitnet-core/tests/text/templates/qwen3.jinja"
ASKED = [{"role": "user", "content": "Why?"}]
ANSWERS = ["It is so. 😀 é", "<b>bold</b>", "< 3", "😀", "\n\nIndented", "<think"]
THOUGHTS = ["", "I think, é 😀 <b>.", "short"]


@pytest.fixture(scope="module")
def server(running: Any, scripted: Any) -> Iterator[Any]:
    with load_model(device="cpu", max_seqs=2, threads=1) as model:
        model._file.__dict__["chat_template"] = ChatTemplate(
            TEMPLATE.read_text("utf-8"), bos_token="<s>", eos_token="</s>"
        )
        engine = scripted(model, "")
        with running(model, names=("m",)) as found:
            found.engine = engine
            yield found


def events(server: Any, path: str, body: Any) -> list[Any]:
    answer = server.client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    lines = answer.text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")] or [json.loads(x) for x in lines]


def chat(server: Any) -> Iterator[tuple[str, Any]]:
    body = {"messages": ASKED, "logprobs": True, "top_logprobs": 2}
    (choice,) = server.client.post("/v1/chat/completions", json=body).json()["choices"]
    yield choice["message"]["content"], choice["logprobs"]["content"]
    choices = [c for e in events(server, "/v1/chat/completions", body) for c in e["choices"]]
    listed = [one for c in choices for one in (c["logprobs"] or {"content": ()})["content"]]
    yield "".join(c["delta"].get("content") or "" for c in choices), listed


def response(server: Any) -> Iterator[tuple[str, Any]]:
    body = {"input": ASKED, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    made = server.client.post("/v1/responses", json=body).json()
    (part,) = made["output"][-1]["content"]
    yield part["text"], part["logprobs"]
    found = events(server, "/v1/responses", body)
    deltas = [e for e in found if e["type"] == "response.output_text.delta"]
    (done,) = (e for e in found if e["type"] == "response.output_text.done")
    assert found[-1]["response"]["output"][-1]["content"][0]["logprobs"] == done["logprobs"]
    listed = [one for e in deltas for one in e["logprobs"]]
    assert done["logprobs"][: len(listed)] == listed
    yield done["text"], done["logprobs"]


def ollama(server: Any) -> Iterator[tuple[str, Any]]:
    body = {"model": "m", "messages": ASKED, "logprobs": True, "top_logprobs": 2}
    made = server.client.post("/api/chat", json={**body, "stream": False}).json()
    yield made["message"]["content"], made["logprobs"]
    lines = events(server, "/api/chat", body)
    listed = [one for line in lines for one in line.get("logprobs", ())]
    yield "".join(line["message"]["content"] for line in lines), listed


@pytest.mark.parametrize("ask", [chat, response, ollama])
def test_only_those_of_the_answer_are_listed(server: Any, ask: Any) -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    for answer in ANSWERS:
        thought = chance.choice(THOUGHTS)
        server.engine.script = lambda _, t=thought, a=answer: (f"<think>\n{t}\n</think>\n\n" if t else "") + a
        for text, listed in ask(server):
            where = (seed, thought, answer, [one["token"] for one in listed])
            assert text == (answer.lstrip() if thought else answer), where
            data = b"".join(bytes(one["bytes"]) for one in listed).decode()
            assert data.strip() == answer.strip(), where
            assert all(len(one["top_logprobs"]) == 2 for one in listed), where


def test_a_request_may_list_no_others(server: Any) -> None:
    server.engine.script = lambda _: "Yes."
    made = server.client.post("/v1/responses", json={"input": ASKED, "top_logprobs": 0}).json()
    assert [one["top_logprobs"] for one in made["output"][-1]["content"][0]["logprobs"]] != []
    assert made["output"][-1]["content"][0]["logprobs"][0]["top_logprobs"] == []
    without = server.client.post("/v1/responses", json={"input": ASKED}).json()
    assert without["output"][-1]["content"][0]["logprobs"] == []
    assert server.client.post("/v1/responses", json={"input": ASKED, "top_logprobs": 21}).status_code == 400
