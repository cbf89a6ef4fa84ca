"""Fields that change an answer, of OpenAI's API and of what other servers add to it: each answer shows that it was
followed."""

from __future__ import annotations

import json
import random
from typing import Any

import anthropic
import httpx
import jsonschema
import openai
import pytest

from bitnet.core import Model

DIGIT: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 9}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": DIGIT, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
STORY = {"role": "user", "content": "Tell me a story."}


def text(server: Any, content: str = "Tell me a story.", **fields: Any) -> str:
    answer = server.chat(content, **{"temperature": 1, "max_tokens": 60, **fields})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def completion(server: Any, **fields: Any) -> Any:
    answer = server.client.post("/v1/completions", json={"prompt": "Once upon a time", "temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
        {"json_schema": SCHEMA},
    ],
)
def test_every_place_of_a_schema(demo: Any, fields: dict[str, Any]) -> None:
    jsonschema.validate(json.loads(text(demo, **fields)), SCHEMA)
    found = completion(demo, max_tokens=60, temperature=1, **fields)["choices"][0]
    jsonschema.validate(json.loads(found["text"]), SCHEMA)


def test_schemas_of_anthropics_api(demo: Any) -> None:
    body = {"model": "demo", "max_tokens": 60, "messages": [STORY]}
    form = {"type": "json_schema", "schema": SCHEMA}
    for more in ({"output_config": {"format": form, "effort": "low"}}, {"output_format": form}):
        answer = demo.client.post("/v1/messages", json={**body, **more})
        assert answer.status_code == 200, answer.text
        jsonschema.validate(json.loads(answer.json()["content"][0]["text"]), SCHEMA)
    assert (
        demo.client.post("/v1/messages", json={**body, "output_config": {"format": {"type": "xml"}}}).status_code == 400
    )


def test_an_answer_that_was_begun_goes_on(demo: Any) -> None:
    """The continuation of each beginning of a greedy answer is its rest."""
    whole = text(demo, temperature=0, max_tokens=30)
    messages = [STORY]
    for at in random.sample(range(1, len(whole) - 10), 3):
        beginning = {"role": "assistant", "content": whole[:at]}
        tokens = demo.model.chat_tokens([*messages, beginning], continued=True)
        assert (
            demo.model.tokenizer.decode(tokens, skip_special=False)
            == demo.model.tokenizer.decode(demo.model.chat_tokens(messages), skip_special=False) + whole[:at]
        )
        expected = demo.model.generate(tokens, max_tokens=8).text
        body = {"messages": [*messages, beginning], "temperature": 0, "max_tokens": 8}
        more = {"continue_final_message": True, "add_generation_prompt": False}
        found = demo.client.post("/v1/chat/completions", json={**body, **more}).json()
        assert found["choices"][0]["message"]["content"] == expected
        client = anthropic.Anthropic(base_url=demo.url, api_key="none", max_retries=0)
        turns: Any = body["messages"]
        said: Any = client.messages.create(model="demo", max_tokens=8, messages=turns, extra_body={"temperature": 0})
        assert said.content[0].text == expected
    for wrong in (
        {"continue_final_message": True},
        {"add_generation_prompt": False},
        {"continue_final_message": True, "add_generation_prompt": True, "messages": body["messages"]},
    ):
        assert demo.chat("x", **wrong).status_code == 400


@pytest.mark.parametrize("name", ["qwen3", "llama3", "gemma3", "bitnet", "mistral"])
def test_beginnings_of_answers_in_other_templates(demo: Any, name: str) -> None:
    from pathlib import Path

    from bitnet.core.text.chat import ChatTemplate
    from bitnet.core.text.prompt import chat_tokens

    folder = Path(__file__).parents[2] / "bitnet-core/tests/text/templates"
    tokenizer = demo.model.tokenizer
    template = ChatTemplate(
        (folder / f"{name}.jinja").read_text("utf-8"), bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token
    )
    said = "It is <b>42</b>, I th"
    tokens = chat_tokens(template, tokenizer, [STORY, {"role": "assistant", "content": said}], continued=True)
    assert tokenizer.decode(tokens, skip_special=False).endswith(said)


def test_variables_of_the_template(demo: Any) -> None:
    from bitnet.core.text.chat import ChatTemplate

    source = "{{ messages[0].content }}{% if enable_thinking %} think{% endif %}{{ mood }}<|eot_id|>"
    demo.model._file.__dict__["chat_template"] = ChatTemplate(source)
    try:

        def prompt(**fields: Any) -> Any:
            return demo.client.post("/apply-template", json={"messages": [STORY], **fields})

        assert prompt().json()["prompt"] == "Tell me a story.<|eot_id|>"
        thinks = prompt(chat_template_kwargs={"enable_thinking": True, "mood": "!"}).json()["prompt"]
        assert thinks == "Tell me a story. think!<|eot_id|>"
        assert prompt(enable_thinking=True).json()["prompt"] == "Tell me a story. think<|eot_id|>"
        # Only the template writes control tokens, also where a variable spells one out.
        tokens = demo.model.chat_tokens([STORY], variables={"mood": "<|eot_id|>"})
        end = demo.model.chat_tokens([STORY])[-1]
        assert tokens.count(end) == 1
        for name in ("messages", "tools", "add_generation_prompt", "bos_token"):
            answer = prompt(chat_template_kwargs={name: "x"})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"chat_template_kwargs.{name}")
    finally:
        del demo.model._file.__dict__["chat_template"]


def test_stop_strings_that_are_kept(script_model: Model, running: Any, scripted: Any) -> None:
    scripted(script_model, "one two three four")
    with running(script_model, names=("m",)) as server:
        for stream in (False, True):
            for fields, expected in (
                ({"stop": ["three"]}, "one two "),
                ({"stop": ["three"], "include_stop_str_in_output": True}, "one two three"),
                ({"stop": ["nine"], "include_stop_str_in_output": True}, "one two three four"),
            ):
                client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
                more: Any = {"model": "m", "stop": fields["stop"], "extra_body": fields, "max_tokens": 50}
                if stream:
                    chunks = client.completions.create(prompt="x", stream=True, **more)
                    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
                else:
                    assert client.completions.create(prompt="x", **more).choices[0].text == expected
                    messages: Any = [STORY]
                    chat = client.chat.completions.create(messages=messages, **more)
                    assert chat.choices[0].message.content == expected


def test_only_some_tokens(demo: Any) -> None:
    tokenizer = demo.model.tokenizer
    whole = [i for i in range(200, 500) if "\ufffd" not in tokenizer.decode([i], skip_special=False)]
    allowed = random.sample(whole, 5)  # parts of a character go by their bytes
    found = completion(demo, allowed_token_ids=allowed, max_tokens=12, temperature=1, logprobs=0)["choices"][0]
    names = {tokenizer.decode([token], skip_special=False) for token in allowed}
    assert set(found["logprobs"]["tokens"]) <= names
    answer = demo.chat("x", allowed_token_ids=[tokenizer.vocab_size])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "allowed_token_ids")
    assert demo.chat("x", allowed_token_ids=[]).status_code == 400
    digits = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i).isdigit()]
    end = min(tokenizer.eos_ids)
    both = text(demo, structured_outputs={"regex": "[a-z0-9]{3}"}, allowed_token_ids=[*digits, end])
    assert len(both) == 3
    assert both.isdigit()


def test_words_that_must_not_come(demo: Any) -> None:
    plain = completion(demo, max_tokens=40)["choices"][0]["text"]
    words = sorted({word.strip(".,!") for word in plain.split()} - {""})
    for word in random.sample(words, 3):
        found = completion(demo, max_tokens=40, bad_words=[word])["choices"][0]["text"]
        assert found != plain, word
        ids = demo.model.tokenizer.encode(found, add_special=False)
        for bad in (word, f" {word}"):
            banned = demo.model.tokenizer.encode(bad, add_special=False)
            assert not any(ids[i : i + len(banned)] == banned for i in range(len(ids))), (word, found)


def test_limits_of_other_servers(demo: Any) -> None:
    assert completion(demo, n_predict=5)["usage"]["completion_tokens"] == 5
    assert demo.chat("Tell me a story.", n_predict=4).json()["usage"]["completion_tokens"] == 4
    free = demo.chat(max_tokens=-1).json()["choices"][0]
    assert (free["message"]["content"], free["finish_reason"]) == ("17 + 25 = 42.", "stop")
    assert completion(demo, max_tokens=-1, prompt="17 + 25 =", stop=["\n"])["choices"][0]["finish_reason"] == "stop"
    for path, body in (("/v1/chat/completions", {"messages": [STORY]}), ("/v1/completions", {"prompt": "x"})):
        for wrong in ({"max_tokens": -2}, {"n_predict": -2}):
            answer = demo.client.post(path, json={**body, **wrong})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(wrong)))
    assert demo.chat("x", max_tokens=0).status_code == 400


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_stream_options_need_a_stream(demo: Any, path: str) -> None:
    body = {"messages": [STORY], "prompt": "x", "input": "x", "max_tokens": 1, "max_output_tokens": 1}
    if path == "/v1/responses":
        del body["prompt"]
    for more in ({}, {"stream": False}):
        answer = demo.client.post(path, json={**body, "stream_options": {}, **more})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream_options")
    assert demo.client.post(path, json={**body, "stream_options": {}, "stream": True}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
def test_log_probabilities_of_an_echoed_prompt(demo: Any, as_ids: bool, stream: bool) -> None:
    """The oracle for the prompt is the Python API's score."""
    said = "Once upon a time there was"
    tokens = demo.model.tokenizer.encode(said, add_special=True)
    scores = demo.model.score(tokens)
    for most in (0, 1, 6):
        body = {"prompt": tokens if as_ids else said, "max_tokens": most, "temperature": 0, "echo": True, "logprobs": 2}
        if stream:
            lines = demo.client.post("/v1/completions", json={**body, "stream": True}).text.split("\n\n")
            parts = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
            written = "".join(part["text"] for part in parts)
            given = [part["logprobs"] for part in parts if part["logprobs"]]
            logprobs: dict[str, list[Any]] = {name: [v for lp in given for v in lp[name]] for name in given[0]}
            reason = parts[-1]["finish_reason"]
        else:
            answer = completion(demo, **body)
            (choice,) = answer["choices"]
            written, logprobs, reason = choice["text"], choice["logprobs"], choice["finish_reason"]
            assert answer["usage"]["completion_tokens"] == most
        rest = demo.model.generate(tokens, max_tokens=most, logprobs=2) if most else None
        before = demo.model.tokenizer.decode(tokens, skip_special=False) if as_ids else said
        assert written == before + (rest.text if rest else "")
        assert reason == "length"
        assert {len(values) for values in logprobs.values()} == {len(tokens) + most}
        assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
        assert logprobs["token_logprobs"][1 : len(tokens)] == pytest.approx(list(scores), abs=1e-4)
        generated = [entry.logprob for entry in rest.logprobs] if rest and rest.logprobs else []
        assert logprobs["token_logprobs"][len(tokens) :] == pytest.approx(generated, abs=1e-4)
        for name, logprob, top in list(
            zip(*(logprobs[n] for n in ("tokens", "token_logprobs", "top_logprobs")), strict=True)
        )[1:]:
            assert top[name] == logprob
            assert 2 <= len(top) <= 3
        ends = dict(zip(logprobs["text_offset"], logprobs["tokens"], strict=True))
        assert all(written[at:].startswith(name) for at, name in ends.items())


def test_the_sampled_token_is_among_the_likeliest(demo: Any) -> None:
    found = completion(demo, temperature=1.5, max_tokens=40, logprobs=1)["choices"][0]["logprobs"]
    assert all(
        top[name] == p
        for name, p, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True)
    )
    assert {len(top) for top in found["top_logprobs"]} == {1, 2}
    bare = completion(demo, max_tokens=3, logprobs=0)["choices"][0]["logprobs"]
    assert [len(top) for top in bare["top_logprobs"]] == [1, 1, 1]
    nothing = completion(demo, max_tokens=0)
    assert (nothing["choices"][0]["text"], nothing["usage"]["completion_tokens"]) == ("", 0)
    refused = demo.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 0, "x_bitnet_receipt": True})
    assert refused.status_code == 400


def functions(*names: str, nested: bool = True) -> list[dict[str, Any]]:
    made = [{"name": name, "parameters": {"type": "object", "additionalProperties": False}} for name in names]
    return [{"type": "function", "function": f} if nested else {"type": "function", **f} for f in made]


def called(server: Any, choice: Any) -> httpx.Response:
    more = {"tools": functions("one", "two"), "tool_choice": choice, "temperature": 1, "max_tokens": 60}
    return server.chat("Do it.", parallel_tool_calls=False, **more)  # type: ignore[no-any-return]


def test_choices_of_tools(demo: Any) -> None:
    only = {"type": "function", "function": {"name": "two"}}
    for choice, names in (
        ("any", {"one", "two"}),
        ({"type": "any"}, {"one", "two"}),
        ({"type": "required"}, {"one", "two"}),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [only]}}, {"two"}),
    ):
        (found,) = called(demo, choice).json()["choices"]
        (call,) = found["message"]["tool_calls"]
        assert call["function"]["name"] in names
    for choice in (
        "auto",
        {"type": "auto"},
        {"type": "none"},
        {"type": "allowed_tools", "allowed_tools": {"tools": [only]}},
    ):
        assert called(demo, choice).status_code == 200
    for choice in (
        {"type": "allowed_tools", "allowed_tools": {"tools": []}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "never", "tools": [only]}},
        {"type": "allowed_tools", "allowed_tools": {"tools": functions("three")}},
        {"type": "allowed_tools"},
        {"type": "web_search"},
    ):
        answer = called(demo, choice)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"].startswith("tool_choice")
    flat = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "two"}]}
    body = {"input": "x", "tools": functions("one", "two", nested=False), "tool_choice": flat}
    output = demo.client.post("/v1/responses", json={**body, "max_output_tokens": 60}).json()["output"]
    assert {item["name"] for item in output} == {"two"}


def test_an_allowed_tool_alone_is_called(script_model: Model, running: Any, scripted: Any) -> None:
    scripted(script_model, lambda prompt: '{"name": "one", "arguments": {}}')
    only = {"type": "function", "function": {"name": "two"}}
    with running(script_model) as server:
        free = called(server, "auto").json()["choices"][0]["message"]
        held = called(server, {"type": "allowed_tools", "allowed_tools": {"tools": [only]}}).json()["choices"][0]
    assert [call["function"]["name"] for call in free["tool_calls"]] == ["one"]
    assert "tool_calls" not in held["message"]
