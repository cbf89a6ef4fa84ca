"""Thoughts in the four APIs, streamed and whole, wherever tokens and chunks cut them."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import anthropic
import ollama
import openai
import pytest

from bitnet.core import load_model
from bitnet.core.text.chat import ChatTemplate
from bitnet.server.api import ollama_models

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}"
    "{{ m.content }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}assistant: "
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% elif opens %}<think>\n{% endif %}{% endif %}"
)
THOUGHT, ANSWER = "17 + 25 is 40 + 2,\n\nso < 43 </thin king>", "It is 42. <think> is a tag."
SAID = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
ASKED: Any = [{"role": "user", "content": "What is 17 + 25?"}]


class Split(NamedTuple):
    """An answer's two parts."""

    thought: str
    answer: str


class Cut:
    """Encodes each of some pieces of a text by itself, so that tokens end where the pieces do."""

    def __init__(self, tokenizer: Any, chance: random.Random) -> None:
        self._tokenizer, self._chance = tokenizer, chance

    def encode(self, text: str, **options: Any) -> list[int]:
        places = sorted(self._chance.sample(range(1, len(text)), self._chance.randrange(len(text))))
        pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
        return [token for piece in pieces for token in self._tokenizer.encode(piece, **options)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.fixture(scope="module")
def thinking_server(running: Any, scripted: Any) -> Iterator[Any]:
    with load_model(device="cpu", max_seqs=4, threads=1) as model:
        file: Any = model._file
        file.__dict__["chat_template"] = ChatTemplate(TEMPLATE)
        engine = scripted(model, SAID)
        with running(model, names=("thinker",)) as server:
            server.engine = engine
            yield server


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def chat(server: Any, stream: bool, **fields: Any) -> Split:
    found = server.client.post("/v1/chat/completions", json={"messages": ASKED, "stream": stream, **fields})
    assert found.status_code == 200, found.text
    if not stream:
        message = found.json()["choices"][0]["message"]
        assert message.get("reasoning") == message.get("reasoning_content")
        return Split(message.get("reasoning_content", ""), message["content"])
    deltas = [c["delta"] for event in events(found.text) for c in event["choices"]]
    assert all(d.get("reasoning") == d.get("reasoning_content") for d in deltas)
    return Split(*("".join(d.get(name, "") for d in deltas) for name in ("reasoning", "content")))


def response(server: Any, stream: bool, **fields: Any) -> Split:
    found = server.client.post("/v1/responses", json={"input": ASKED, "stream": stream, **fields})
    assert found.status_code == 200, found.text
    done = events(found.text) if stream else []
    items = (done[-1]["response"] if stream else found.json())["output"]
    parts = [(i.get("content") or i["summary"])[0]["text"] for i in items]
    split = Split("".join(parts[:-1]), parts[-1])
    if stream:
        names = ("response.reasoning_text.delta", "response.output_text.delta")
        said = ("".join(e["delta"] for e in done if e["type"] == name) for name in names)
        assert Split(*said) == split
    return split


def message(server: Any, stream: bool, **fields: Any) -> Split:
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    body = {"model": "thinker", "max_tokens": 400, "messages": ASKED, "stream": stream, **thinking, **fields}
    found = server.client.post("/v1/messages", json=body)
    assert found.status_code == 200, found.text
    if not stream:
        blocks = found.json()["content"]
        return Split(*("".join(b.get(name, "") for b in blocks) for name in ("thinking", "text")))
    deltas = [e["delta"] for e in events(found.text) if e["type"] == "content_block_delta"]
    return Split(*("".join(d.get(name, "") for d in deltas) for name in ("thinking", "text")))


def ollama_chat(server: Any, stream: bool, **fields: Any) -> Split:
    body = {"model": "thinker", "messages": ASKED, "stream": stream, **fields}
    found = server.client.post("/api/chat", json=body)
    assert found.status_code == 200, found.text
    said = [json.loads(line)["message"] for line in found.text.splitlines()]
    return Split(*("".join(m.get(name, "") for m in said) for name in ("thinking", "content")))


APIS = (chat, response, message, ollama_chat)


def same_in_all(server: Any, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    monkeypatch.setattr(server.engine, "tokenizer", Cut(server.model.tokenizer, chance))
    for _ in range(splits):
        for ask in APIS:
            for stream in (False, True):
                assert ask(server, stream) == Split(THOUGHT, ANSWER), (ask, stream)


def test_random_splits_give_the_same_blocks(thinking_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    same_in_all(thinking_server, 8, monkeypatch)


@pytest.mark.nightly
def test_two_hundred_random_splits(thinking_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    same_in_all(thinking_server, 200, monkeypatch)


def test_a_thought_that_the_template_opens(thinking_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thinking_server.engine, "script", lambda _: SAID.removeprefix("<think>\n"))
    for stream in (False, True):
        assert chat(thinking_server, stream, chat_template_kwargs={"opens": True}) == Split(THOUGHT, ANSWER)


@pytest.mark.parametrize("budget", [None, 0])
def test_the_prompt_that_is_shown_is_a_chats(
    thinking_server: Any, monkeypatch: pytest.MonkeyPatch, budget: int | None
) -> None:
    settings = thinking_server.state.settings
    monkeypatch.setattr(thinking_server.service.shared, "settings", replace(settings, reasoning_budget=budget))
    opens = {"chat_template_kwargs": {"opens": True}}
    continued: Any = {"continue_final_message": True, "messages": [*ASKED, {"role": "assistant", "content": "It is"}]}
    said = []
    for fields in (
        {},
        opens,
        {"enable_thinking": False},
        {"enable_thinking": True, **opens},
        {"thinking": {"type": "disabled"}},
        {"thinking_token_budget": 0, **opens},
        {"reasoning_effort": "none"},
        continued,
    ):
        body = {"messages": ASKED, **fields}
        shown = thinking_server.client.post("/apply-template", json=body).json()["prompt"]
        answer = thinking_server.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert thinking_server.engine.prompts[-1] == shown, fields
        said.append(shown)
    assert len(set(said)) == (4 if budget is None else 3)
    unanswered = {"messages": ASKED, "add_generation_prompt": False}
    shown = thinking_server.client.post("/apply-template", json=unanswered).json()["prompt"]
    assert f"{shown}assistant: " == said[0].removesuffix("<think>\n\n</think>\n\n")
    assert thinking_server.client.post("/v1/chat/completions", json=unanswered).status_code == 400


def test_what_switches_thinking_off(thinking_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thinking_server.engine, "script", lambda _: ANSWER)
    off: list[tuple[Any, dict[str, Any]]] = [
        (chat, {"reasoning_effort": "none"}),
        (chat, {"enable_thinking": False}),
        (chat, {"chat_template_kwargs": {"enable_thinking": False}}),
        (chat, {"thinking": {"type": "disabled"}}),
        (chat, {"thinking_token_budget": 0}),
        (response, {"reasoning": {"effort": "none"}}),
        (message, {"thinking": None}),
        (message, {"thinking": {"type": "disabled"}}),
        (ollama_chat, {"think": False}),
    ]
    for ask, fields in off:
        assert ask(thinking_server, False, **fields) == Split("", ANSWER)
        assert thinking_server.engine.prompts[-1].endswith("<think>\n\n</think>\n\n"), fields
    assert ollama_chat(thinking_server, False, think=True).answer == ANSWER
    assert not thinking_server.engine.prompts[-1].endswith("</think>\n\n")


@pytest.mark.parametrize(
    "fields", [{"thinking_token_budget": 5}, {"thinking": {"type": "enabled", "budget_tokens": 5}}]
)
def test_a_budget_ends_the_thought_and_usage_counts_it(thinking_server: Any, fields: dict[str, Any]) -> None:
    found = thinking_server.chat(**fields).json()
    assert found["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5
    assert THOUGHT.startswith(found["choices"][0]["message"]["reasoning"].rstrip())


@pytest.mark.parametrize("stream", [False, True])
def test_a_thought_may_be_left_out_of_the_answer(thinking_server: Any, stream: bool) -> None:
    """The model still thinks, which usage counts."""
    assert chat(thinking_server, stream, include_reasoning=True) == Split(THOUGHT, ANSWER)
    assert chat(thinking_server, stream, include_reasoning=False) == Split("", ANSWER)
    fields = {"stream": stream, "stream_options": {"include_usage": True}} if stream else {}
    found = thinking_server.chat(include_reasoning=False, **fields)
    last = events(found.text)[-1] if stream else found.json()
    assert last["usage"]["completion_tokens_details"]["reasoning_tokens"] > 10
    assert "reasoning_content" not in found.text


@pytest.mark.parametrize("budget", [0, 7, None])
def test_the_server_bounds_thoughts_of_requests_that_say_nothing(
    thinking_server: Any, running: Any, budget: int | None
) -> None:
    """``--reasoning-budget``: a request's own budget goes before it."""
    thinking_server.engine.script = lambda prompt: ANSWER if prompt.endswith("</think>\n\n") else SAID
    whole = len(thinking_server.model.tokenizer.encode(THOUGHT, add_special=False))
    with running(thinking_server.model, names=("thinker",), reasoning_budget=budget) as server:
        for ask in (chat, response, ollama_chat):
            found = ask(server, False)
            assert bool(found.thought) == (budget != 0), ask
            assert (found.thought == THOUGHT) == (budget is None), ask
        counted = server.chat().json()["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert counted == budget if budget is not None else abs(counted - whole) <= 2
        own = server.chat(thinking_token_budget=3).json()["usage"]
        assert own["completion_tokens_details"]["reasoning_tokens"] == 3


def test_a_template_is_tried_while_others_are_answered(
    thinking_server: Any, running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first request with an effort finds out what the template knows, which may take long."""
    slow, tried, go_on = ChatTemplate(TEMPLATE), threading.Event(), threading.Event()

    def switch_of(*_: Any) -> None:
        tried.set()
        assert go_on.wait(20)

    with running(thinking_server.model, names=("m",)) as server, ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr("bitnet.core.text.chat.switch_of", switch_of)
        monkeypatch.setitem(server.model._file.__dict__, "chat_template", slow)
        asked = pool.submit(server.chat, reasoning_effort="low")
        assert tried.wait(60)
        assert server.client.get("/health/live").status_code == 200
        assert not asked.done()
        go_on.set()
        assert asked.result().status_code == 200


def test_thoughts_of_earlier_turns_reach_the_template(thinking_server: Any) -> None:
    prompts = thinking_server.engine.prompts
    user = {"role": "user", "content": "And?"}
    for name in ("reasoning_content", "reasoning"):
        said = {"role": "assistant", "content": "42", name: "so"}
        thinking_server.client.post("/v1/chat/completions", json={"messages": [*ASKED, said, user]})
        assert "assistant: [so]42" in prompts[-1]
    ollama_chat(
        thinking_server, False, messages=[*ASKED, {"role": "assistant", "content": "42", "thinking": "so"}, user]
    )
    assert "assistant: [so]42" in prompts[-1]
    blocks = [
        {"type": "thinking", "thinking": "so", "signature": "x"},
        {"type": "redacted_thinking", "data": "xyz"},
        {"type": "text", "text": "42"},
    ]
    message(thinking_server, False, messages=[*ASKED, {"role": "assistant", "content": blocks}, user])
    assert "assistant: [so]42" in prompts[-1]
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "so"}]}
    response(thinking_server, False, input=[*ASKED, reasoning, {"role": "assistant", "content": "42"}, user])
    assert "assistant: [so]42" in prompts[-1]
    first = thinking_server.client.post("/v1/responses", json={"input": ASKED}).json()
    response(thinking_server, False, previous_response_id=first["id"])
    assert f"assistant: [{THOUGHT}]{ANSWER}" in prompts[-1]


def test_official_clients_read_thoughts(thinking_server: Any) -> None:
    url = thinking_server.url
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        deltas = [
            c.choices[0].delta for c in client.chat.completions.create(model="thinker", messages=ASKED, stream=True)
        ]
        assert "".join(getattr(d, "reasoning_content", "") for d in deltas) == THOUGHT
        for summary in (None, "auto"):
            reasoning: Any = {"effort": "medium", "summary": summary}
            with client.responses.stream(model="thinker", input=ASKED, reasoning=reasoning) as stream:
                done = stream.get_final_response()
            item, said = done.output
            assert item.type == "reasoning"
            parts: Any = item.summary if summary else item.content
            assert [part.text for part in parts] == [THOUGHT]
            assert (said.type, done.output_text) == ("message", ANSWER)
            assert done.usage is not None
            assert done.usage.output_tokens_details.reasoning_tokens > 0
    with anthropic.Anthropic(base_url=url, api_key="x", max_retries=0) as other:
        thinking: Any = {"type": "enabled", "budget_tokens": 1024}
        with other.messages.stream(model="thinker", max_tokens=2000, messages=ASKED, thinking=thinking) as events_:
            final = events_.get_final_message()
        first, second = final.content
        assert (first.type, first.type == "thinking" and first.thinking, second.type) == ("thinking", THOUGHT, "text")
        assert first.type == "thinking"
        assert first.signature
        history: Any = [*ASKED, {"role": "assistant", "content": final.content}, {"role": "user", "content": "And?"}]
        again = other.messages.create(model="thinker", max_tokens=2000, messages=history, thinking=thinking)
        assert [block.type for block in again.content] == ["thinking", "text"]
    theirs = ollama.Client(host=url)
    answered = theirs.chat(model="thinker", messages=ASKED, think=True)
    assert (answered.message.thinking, answered.message.content) == (THOUGHT, ANSWER)
    made = theirs.generate(model="thinker", prompt="Hi", think=True)
    assert (made.thinking, made.response) == (THOUGHT, ANSWER)


def test_ollama_clients_learn_which_models_think(
    thinking_server: Any, demo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = ollama_models
    facts = module.facts_of
    with monkeypatch.context() as patched:  # the file of the model that thinks is the demo's
        patched.setattr(module, "facts_of", lambda file: replace(facts(file), template=TEMPLATE))
        assert "thinking" in (ollama.Client(host=thinking_server.url).show("thinker").capabilities or ())
    assert "thinking" not in (ollama.Client(host=demo.url).show("demo").capabilities or ())


def test_a_model_that_does_not_think_says_so(demo: Any) -> None:
    body = {"model": "demo", "messages": ASKED, "think": True}
    refused = demo.client.post("/api/chat", json=body)
    assert refused.status_code == 400
    assert "does not think" in refused.json()["error"]


def test_a_form_is_that_of_the_answer(thinking_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thinking_server.engine, "script", lambda _: f"{THOUGHT}</think>never")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 42}}}
    fields = {"response_format": form, "chat_template_kwargs": {"opens": True}}
    assert chat(thinking_server, False, **fields) == Split(THOUGHT, "42")
