"""Requests as Zed and Continue send them, by their public sources, and JetBrains' AI Assistant by its documentation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from bitnet.core import Model

FILE = "17 and 25"
TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Reads a file.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string", "description": "The file's path."}},
            "required": ["path"],
        },
    },
}
CALL = json.dumps({"name": "read_file", "arguments": {"path": "numbers.txt"}})
ARGUMENTS = {"path": "numbers.txt"}


def zed(messages: list[Any], **more: Any) -> dict[str, Any]:
    """Zed's ``openai_compatible`` provider."""
    return {
        "model": "m",
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 200,
        "stop": [],
        "temperature": 1.0,
        "prompt_cache_key": "thread-1",
        "reasoning_effort": "medium",
        **more,
    }


def continued(messages: list[Any], **more: Any) -> dict[str, Any]:
    """Continue's provider ``openai``."""
    usage = {"include_usage": True}
    return {"model": "m", "messages": messages, "stream": True, "stream_options": usage, "max_tokens": 200, **more}


def assistant(messages: list[Any], **more: Any) -> dict[str, Any]:
    """An OpenAI-compatible provider of JetBrains' AI Assistant: a chat without anything that some servers lack."""
    return {"model": "m", "messages": messages, "stream": True, **more}


@pytest.fixture
def server(script_model: Model, running: Any, scripted: Any) -> Iterator[Any]:
    scripted(
        script_model, lambda prompt: "It is 42." if FILE in prompt else CALL if "read_file" in prompt else "Hello."
    )
    with running(script_model, names=("m",), api_keys=("key",)) as found:
        yield found


def streamed(server: Any, body: dict[str, Any], **headers: str) -> tuple[dict[str, Any], dict[str, int]]:
    """The message and the usage that a client puts together from a stream's deltas."""
    answer = server.client.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    *lines, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: ")]
    assert done == "[DONE]"
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    usage: dict[str, int] = {}
    for chunk in map(json.loads, lines):
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            for piece in delta.get("tool_calls", ()):
                if piece["index"] == len(message["tool_calls"]):
                    function = {"name": "", "arguments": ""}
                    message["tool_calls"].append({"id": piece["id"], "type": "function", "function": function})
                function = message["tool_calls"][piece["index"]]["function"]
                for name, text in piece["function"].items():
                    function[name] += text
    return message, usage


@pytest.mark.parametrize(
    ("asks", "headers"),
    [
        (zed, {"Authorization": "Bearer key"}),
        (assistant, {"Authorization": "Bearer key", "Accept": "text/event-stream", "Cache-Control": "no-store"}),
        (continued, {"Authorization": "Bearer key", "x-api-key": "key", "Accept": "application/json"}),
    ],
)
def test_an_editors_conversation(server: Any, asks: Any, headers: dict[str, str]) -> None:
    said: list[Any] = [{"role": "system", "content": "You help."}, {"role": "user", "content": "Hi."}]
    message, usage = streamed(server, asks(said), **headers)
    assert message["content"] == "Hello."
    if "stream_options" in asks(said):
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    parts = [{"type": "text", "text": "Read "}, {"type": "text", "text": "numbers.txt."}]
    said = [said[0], {"role": "user", "content": parts}]
    for more in ({"tool_choice": "auto"}, {"tool_choice": TOOL}, {"tool_choice": "required"}, {}):
        message, _ = streamed(server, asks(said, tools=[TOOL], parallel_tool_calls=False, **more), **headers)
        (call,) = message["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("read_file", ARGUMENTS)
    asked = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "I read it."}
    for content in (FILE, [{"type": "text", "text": FILE}]):
        answered = [*said, asked, {"role": "tool", "content": content, "tool_call_id": call["id"]}]
        message, _ = streamed(server, asks(answered, tools=[TOOL]), **headers)
        assert (message["content"], message["tool_calls"]) == ("It is 42.", [])
        again = [*answered, {"role": "assistant", "content": "It is 42."}, {"role": "user", "content": "And now?"}]
        message, _ = streamed(server, asks(again, tools=[TOOL], tool_choice="none"), **headers)
        assert message["content"] == "It is 42."


@pytest.mark.parametrize("path", ["/v1/models", "/api/tags"])
def test_jetbrains_assistant_tries_a_connection_and_lists_models(server: Any, path: str) -> None:
    """By the models' list: of an OpenAI-compatible provider or LM Studio, and of Ollama. A wrong key is told."""
    listed = server.client.get(path, headers={"Authorization": "Bearer key"}).json()
    assert "m" in [model.get("id", model.get("model")) for model in listed.get("data", listed.get("models"))]
    assert server.client.get(path, headers={"Authorization": "Bearer other"}).status_code == 401


def test_jetbrains_assistant_chats_with_an_ollama_server(server: Any) -> None:
    said = [{"role": "system", "content": "You help."}, {"role": "user", "content": "Hi."}]
    body = {"model": "m", "messages": said, "stream": True}
    answer = server.client.post("/api/chat", json=body, headers={"Authorization": "Bearer key"})
    *parts, last = map(json.loads, answer.text.splitlines())
    assert "".join(part["message"]["content"] for part in parts) == "Hello."
    assert last["done"]


def test_continue_completes_in_the_midst_of_a_file(server: Any) -> None:
    """A model that was not trained to fill gaps gets a plain completion: the prompt, and words at which to stop."""
    body = {"model": "m", "prompt": "def add(a, b):", "max_tokens": 20, "temperature": 0.01, "stop": ["\n\n"]}
    answer = server.client.post(
        "/v1/completions", json={**body, "stream": True}, headers={"Authorization": "Bearer key"}
    )
    assert answer.status_code == 200
    assert answer.text.endswith("data: [DONE]\n\n")
