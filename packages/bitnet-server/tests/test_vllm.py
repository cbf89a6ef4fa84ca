"""Fields that vLLM adds to OpenAI's API: token ids, log-probabilities of prompts, usage with each event."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from bitnet.server.api.openai_chat import ChatAnswer
from bitnet.server.api.openai_completions import CompletionAnswer

ASKED = {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0, "max_tokens": 6}
TEXT = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 6}
PATHS = {"/v1/chat/completions": ASKED, "/v1/completions": TEXT}


def ask(server: Any, path: str, **fields: Any) -> Any:
    answer = server.client.post(path, json={**PATHS[path], **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(server: Any, path: str, **fields: Any) -> list[dict[str, Any]]:
    answer = server.client.post(path, json={**PATHS[path], **fields, "stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def prompt_of(server: Any, path: str) -> list[int]:
    if "chat" in path:
        return list(server.model.chat_tokens(ASKED["messages"]))
    return list(server.model.tokenizer.encode(TEXT["prompt"]))


@pytest.mark.parametrize("path", PATHS)
def test_token_ids(demo: Any, path: str) -> None:
    prompt = prompt_of(demo, path)
    expected = [*demo.model.generate(prompt, max_tokens=6).tokens]
    for n in (1, 2):
        found = ask(demo, path, return_token_ids=True, n=n)
        assert [choice["token_ids"] for choice in found["choices"]] == [expected] * n
        ids = [found["prompt_token_ids"]] if "chat" in path else [c["prompt_token_ids"] for c in found["choices"]]
        assert ids == [prompt] * len(ids)
        seen: dict[int, list[int]] = {i: [] for i in range(n)}
        prompts = []
        for event in events(demo, path, return_token_ids=True, n=n):
            for choice in event["choices"]:
                seen[choice["index"]] += choice.get("token_ids", [])
                prompts += [value["prompt_token_ids"] for value in (event, choice) if "prompt_token_ids" in value]
        assert seen == dict.fromkeys(range(n), expected)
        assert prompts
        assert all(ids == prompt for ids in prompts)
    assert "token_ids" not in json.dumps(events(demo, path))
    plain = ask(demo, path)
    of_prompt = plain if "chat" in path else plain["choices"][0]
    assert (plain["choices"][0]["token_ids"], of_prompt["prompt_token_ids"], of_prompt["prompt_logprobs"]) == (
        None,
    ) * 3


@pytest.mark.parametrize("path", PATHS)
def test_log_probabilities_of_a_prompt(demo: Any, path: str) -> None:
    prompt = prompt_of(demo, path)
    expected = demo.model.generate(prompt, max_tokens=1, prompt_logprobs=3).prompt_logprobs
    found = ask(demo, path, prompt_logprobs=3)
    first, *rows = found["prompt_logprobs"] if "chat" in path else found["choices"][0]["prompt_logprobs"]
    assert first is None
    assert len(rows) == len(prompt) - 1
    for token, row, theirs in zip(prompt[1:], rows, expected, strict=True):
        assert row[str(token)]["logprob"] == pytest.approx(theirs.logprob, abs=1e-4)
        ranked = {t: value["rank"] for t, value in row.items() if value["rank"] is not None}
        assert ranked == {str(t): rank for rank, (t, _) in enumerate(theirs.top, 1)}
        text = demo.model.tokenizer.token_bytes(token).decode("utf-8", "replace")
        assert row[str(token)]["decoded_token"] == text
    assert all(len(row) == 1 for row in _rows(ask(demo, path, prompt_logprobs=0), path))
    for wrong in ({"prompt_logprobs": -1}, {"prompt_logprobs": 21}, {"prompt_logprobs": 1, "stream": True}):
        answer = demo.client.post(path, json={**PATHS[path], **wrong})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt_logprobs")


def _rows(found: Any, path: str) -> Any:
    return (found if "chat" in path else found["choices"][0])["prompt_logprobs"][1:]


@pytest.mark.parametrize(("path", "stream"), [*((path, False) for path in PATHS), ("/v1/completions", True)])
def test_log_probabilities_of_a_prompt_are_written_outside_the_event_loop(
    demo: Any, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    """Those of a prompt of 32,768 tokens take seconds."""
    kind = ChatAnswer if "chat" in path else CompletionAnswer
    threads: list[str] = []

    def noting(real: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*given: Any) -> Any:
            threads.append(threading.current_thread().name)
            return real(*given)

        return noted

    for name in ("whole", "piece"):
        monkeypatch.setattr(kind, name, noting(getattr(kind, name)))
    if stream:
        events(demo, path, echo=True, logprobs=2)
    else:
        ask(demo, path, prompt_logprobs=2)
    first, *others = [name.startswith("bitnet-http") for name in threads]
    assert first
    assert not any(others)
    threads.clear()
    ask(demo, path, logprobs=True if "chat" in path else 2)
    assert not threads[0].startswith("bitnet-http")


def test_echoed_log_probabilities_keep_their_own_number(demo: Any) -> None:
    found = ask(demo, "/v1/completions", echo=True, logprobs=1, prompt_logprobs=5)["choices"][0]
    assert all(len(top) <= 2 for top in found["logprobs"]["top_logprobs"][1:])
    assert all(len(row) >= 5 for row in found["prompt_logprobs"][1:])


@pytest.mark.parametrize("path", PATHS)
def test_usage_with_each_event(demo: Any, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = events(demo, path, stream_options=options, return_token_ids=True)
    counted = 0
    for event in found:
        counted += sum(len(choice.get("token_ids", ())) for choice in event["choices"])
        usage = event["usage"]
        assert usage["prompt_tokens"] == len(prompt_of(demo, path))
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        if event["choices"] and "token_ids" in event["choices"][0]:
            assert usage["completion_tokens"] == counted
    assert counted == found[-1]["usage"]["completion_tokens"] == 6
    assert not any("usage" in event for event in events(demo, path, stream_options={"continuous_usage_stats": True}))


@pytest.mark.parametrize("path", PATHS)
def test_timings_with_each_event(demo: Any, path: str) -> None:
    *found, _ = events(demo, path, timings_per_token=True, stream_options={"include_usage": True})
    timed = [event["timings"] for event in found if "timings" in event]
    assert len(timed) >= len(found) - 1  # the first event of a chat holds its role alone
    numbers = [timing["predicted_n"] for timing in timed]
    assert (numbers, numbers[-1]) == (sorted(numbers), 6)
    assert all(t["prompt_n"] + t["cache_n"] == len(prompt_of(demo, path)) for t in timed)


@pytest.mark.parametrize("path", PATHS)
def test_tokens_named_by_their_ids(demo: Any, path: str) -> None:
    more: dict[str, Any] = {"logprobs": True, "top_logprobs": 2} if "chat" in path else {"logprobs": 2}
    expected = [*demo.model.generate(prompt_of(demo, path), max_tokens=6).tokens]
    logprobs = ask(demo, path, return_tokens_as_token_ids=True, **more)["choices"][0]["logprobs"]
    names = [entry["token"] for entry in logprobs["content"]] if "chat" in path else logprobs["tokens"]
    assert names == [f"token_id:{token}" for token in expected]
    if "chat" not in path:
        drawn = ask(demo, path, return_tokens_as_token_ids=True, temperature=3, logprobs=2)["choices"][0]["logprobs"]
        assert [next(iter(top)) for top in drawn["top_logprobs"]] == drawn["tokens"]


def test_texts_and_conversations_as_tokens(demo: Any) -> None:
    tokenizer, said = demo.model.tokenizer, "Once upon a time, naïve"
    for add in (None, True, False):
        body = {"prompt": said, "return_token_strs": True} | ({} if add is None else {"add_special_tokens": add})
        found = demo.client.post("/tokenize", json=body).json()
        expected = tokenizer.encode(said, add_special=add is not False)
        assert (found["tokens"], found["count"], found["max_model_len"]) == (
            expected,
            len(expected),
            demo.model.context,
        )
        assert found["token_strs"] == [tokenizer.token_bytes(i).decode("utf-8", "replace") for i in expected]
    assert demo.client.post("/tokenize", json={"prompt": said}).json()["token_strs"] is None
    asked = demo.client.post("/tokenize", json={"messages": ASKED["messages"]}).json()
    assert asked["tokens"] == list(demo.model.chat_tokens(ASKED["messages"]))
    info = demo.client.get("/tokenizer_info").json()
    assert (info["chat_template"], info["model_max_length"]) == (demo.model.chat_template.source, demo.model.context)
    for name, ids in (("bos_token", [tokenizer.bos_id]), ("eos_token", tokenizer.eos_ids)):
        body = {"prompt": info[name], "add_special_tokens": False}
        (token,) = demo.client.post("/tokenize", json=body).json()["tokens"]
        assert token in ids
    back = demo.client.post("/detokenize", json={"tokens": tokenizer.encode(said, add_special=False)}).json()
    assert back["prompt"] == back["content"] == said
