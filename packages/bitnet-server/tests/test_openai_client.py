"""The official ``openai`` client, over the demo model and over scripted answers."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest

from bitnet.core import Model

QUESTION: Any = [{"role": "user", "content": "What is 17 + 25?"}]


@pytest.fixture(scope="module")
def client(demo: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0)


def test_chat(client: openai.OpenAI, demo: Any) -> None:
    answer = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0)
    expected = demo.model.chat(QUESTION)
    assert answer.choices[0].message.content == expected.text == "17 + 25 = 42."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(expected.prompt_tokens)
    assert answer.usage.completion_tokens == len(expected.tokens)
    assert answer.system_fingerprint is not None
    assert answer.system_fingerprint.endswith(demo.model.device.name)


def test_chat_stream_with_usage_and_logprobs(client: openai.OpenAI, demo: Any) -> None:
    stream = client.chat.completions.create(
        model="demo",
        messages=QUESTION,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=2,
    )
    chunks = list(stream)
    expected = demo.model.chat(QUESTION, logprobs=2)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected.text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    found = [e for c in chunks if c.choices and (lp := c.choices[0].logprobs) for e in lp.content or ()]
    assert expected.logprobs is not None
    assert [e.logprob for e in found] == pytest.approx([e.logprob for e in expected.logprobs], abs=1e-6)
    assert [len(e.top_logprobs) for e in found] == [2] * len(expected.tokens)
    assert b"".join(bytes(e.bytes or ()) for e in found).decode() == expected.text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(expected.tokens)


def test_sampling_is_the_engines_own(client: openai.OpenAI, demo: Any) -> None:
    options: Any = {"temperature": 0.9, "top_p": 0.8, "seed": 5, "frequency_penalty": 0.5, "max_tokens": 24, "n": 3}
    story: Any = [{"role": "user", "content": "Tell me a story."}]
    answer = client.chat.completions.create(model="demo", messages=story, **options)
    expected = demo.model.generate_batch([demo.model.chat_tokens(story)], **options)
    assert [c.message.content for c in answer.choices] == [c.text for c in expected]
    assert len({c.text for c in expected}) == 3
    assert answer.usage.completion_tokens == sum(len(c.tokens) for c in expected)


def test_completions(client: openai.OpenAI, demo: Any) -> None:
    tokens = demo.model.tokenizer.encode("The cat", add_special=True)
    answer = client.completions.create(
        model="demo", prompt=["Once upon a time", "The cat"], max_tokens=5, temperature=0, logprobs=3
    )
    expected = demo.model.generate_batch(["Once upon a time", tokens], max_tokens=5, logprobs=3)
    assert [c.text for c in answer.choices] == [c.text for c in expected]
    for choice, completion in zip(answer.choices, expected, strict=True):
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == pytest.approx([e.logprob for e in completion.logprobs or ()], abs=1e-6)
    echoed = client.completions.create(model="demo", prompt=tokens, max_tokens=5, temperature=0, echo=True)
    assert echoed.choices[0].text == "<|begin_of_text|>The cat" + expected[1].text
    chunks = list(client.completions.create(model="demo", prompt="The cat", max_tokens=5, temperature=0, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == expected[1].text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_offsets_in_a_stream_are_those_of_the_whole_answer(script_model: Model, running: Any, scripted: Any) -> None:
    """Text that may begin a stop string is held back, and its tokens are not."""
    scripted(script_model, "one two three four five six seven")
    body = {"prompt": "x", "logprobs": 0, "max_tokens": 50, "stop": ["two thrill", "five six"], "temperature": 0}
    with running(script_model) as server:
        (whole,) = server.client.post("/v1/completions", json=body).json()["choices"]
        lines = server.client.post("/v1/completions", json={**body, "stream": True}).text.split("\n\n")
    parts = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    assert "".join(part["text"] for part in parts) == whole["text"] == "one two three four "
    found = [part["logprobs"] for part in parts if part["logprobs"]]
    for name in ("tokens", "text_offset"):
        assert [value for logprobs in found for value in logprobs[name]] == whole["logprobs"][name]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"])
def test_a_top_p_of_zero_takes_the_likeliest_token(demo: Any, path: str) -> None:
    text: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell me a story."}]}
    if path == "/v1/responses":
        text = {"input": text["messages"]}
    most = {"max_tokens": 24, "max_output_tokens": 24}

    def ask(**options: float) -> Any:
        body = {"model": "demo", "stream": False, **text, **most, **options}
        answer = demo.client.post(path, json={**body, "options": {"num_predict": 24, **options}})
        assert answer.status_code == 200, answer.text
        content = answer.json()
        found = content.get("choices") or content.get("content") or content.get("message") or content.get("output")
        return re.findall('"(?:text|content)": ("[^"]*")', json.dumps(found))

    greedy = ask(temperature=0)
    assert greedy
    assert [ask(temperature=1, top_p=0) for _ in range(3)] == [greedy] * 3


def test_log_probabilities_of_responses(client: openai.OpenAI, demo: Any) -> None:
    asked: Any = {"model": "demo", "input": "What is 17 + 25?", "temperature": 0}
    answer = client.responses.create(**asked, top_logprobs=2, include=["message.output_text.logprobs"])
    found = answer.output[-1].content[0].logprobs
    expected = demo.model.chat(QUESTION, logprobs=2).logprobs
    assert [e.logprob for e in found or ()] == pytest.approx([e.logprob for e in expected], abs=1e-6)
    other: Any = ["reasoning.encrypted_content"]
    assert client.responses.create(model="demo", input="x", include=other, max_output_tokens=1).id


def test_responses(client: openai.OpenAI, demo: Any) -> None:
    answer = client.responses.create(model="demo", input="What is 17 + 25?", temperature=0)
    assert answer.output_text == "17 + 25 = 42."
    assert answer.status == "completed"
    assert answer.usage is not None
    assert answer.usage.output_tokens == len(demo.model.chat(QUESTION).tokens)
    with client.responses.stream(model="demo", input=QUESTION, temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == "17 + 25 = 42."
    cut = client.responses.create(model="demo", input="Tell me a story.", max_output_tokens=3)
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=QUESTION)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="demo", messages=QUESTION, top_p=2)
    assert wrong.value.param == "top_p"
    with pytest.raises(openai.BadRequestError, match="must be a list of token ids") as wrong:
        client.completions.create(model="demo", prompt="x", extra_body={"stop_token_ids": [-5]})
    assert wrong.value.param == "stop_token_ids"
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model="demo", prompt="word " * 5000)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="x")


def test_what_a_scripted_model_says_arrives_whole(script_model: Model, running: Any, scripted: Any) -> None:
    scripted(script_model, lambda prompt: "naïve 😀\n\n“quoted” " + ("yes" if "unicode" in prompt else "no"))
    with running(script_model) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        for question, end in (("unicode?", "yes"), ("else?", "no")):
            messages: Any = [{"role": "user", "content": question}]
            stream = client.chat.completions.create(model="bitnet-demo", messages=messages, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            assert text == "naïve 😀\n\n“quoted” " + end
            stopped = client.chat.completions.create(model="bitnet-demo", messages=messages, stop=["“quo"])
            assert stopped.choices[0].message.content == "naïve 😀\n\n"
