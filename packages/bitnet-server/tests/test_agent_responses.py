"""What programming agents send to ``/v1/responses``, in the shapes of Codex's requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from bitnet.core import load_model
from bitnet.core.text.chat import ChatTemplate

TEMPLATE = (Path(__file__).parents[2] / "bitnet-core/tests/text/templates/qwen3.jinja").read_text("utf-8")
COMMAND = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}
RUN = {"type": "function", "name": "exec_command", "description": "Run.", "strict": False, "parameters": COMMAND}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" LF'}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edit files.", "format": GRAMMAR}
FIRST: dict[str, Any] = {
    "model": "gpt-5.5",
    "input": [
        {
            "type": "message",
            "id": "msg_0",
            "role": "developer",
            "content": [{"type": "input_text", "text": "You code."}],
        },
        {"type": "message", "id": "msg_1", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    ],
    "tools": [
        RUN,
        {"type": "namespace", "name": "agents", "description": "", "tools": [{**RUN, "name": "spawn"}]},
        PATCH,
        {"type": "tool_search"},
        {"type": "web_search", "external_web_access": False},
        {"type": "local_shell"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "x",
    "text": {"verbosity": "low"},
    "client_metadata": {"session_id": "x"},
}
"""Codex's first request, as version 0.171 sends it, with fewer tools and shorter texts."""
CLIENT: dict[str, Any] = {k: v for k, v in FIRST.items() if k != "client_metadata"}
"""What the official client has arguments for."""
DIFF = '*** Begin Patch\n+ "ü" \\ \n'


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ANSWER = f"<think>\nA file.\n</think>\n\n{call('apply_patch', input=DIFF)}\n{call('exec_command', cmd='ls')}"


@pytest.fixture(scope="module")
def server(running: Any, scripted: Any) -> Iterator[Any]:
    with load_model(device="cpu", max_seqs=2, threads=1) as model:
        model._file.__dict__["chat_template"] = ChatTemplate(TEMPLATE)
        engine = scripted(model, ANSWER)
        with running(model, names=("m",), any_model=True) as found:
            found.engine = engine
            yield found


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def prompt_after(server: Any, *items: Any, **fields: Any) -> str:
    body = {**FIRST, "input": [*FIRST["input"], *items], **fields}
    answer = server.client.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    return str(server.engine.prompts[-1])


def test_the_first_request_is_answered_by_a_thought_and_calls(server: Any, client: openai.OpenAI) -> None:
    with client.responses.stream(**CLIENT) as stream:
        events = list(stream)
        final = stream.get_final_response()
    thought, patch, run = final.output
    assert thought.type == "reasoning"
    assert thought.encrypted_content
    assert patch.type == "custom_tool_call"
    assert (patch.name, patch.input) == ("apply_patch", DIFF)
    assert run.type == "function_call"
    assert (run.name, json.loads(run.arguments)) == ("exec_command", {"cmd": "ls"})
    assert [e.input for e in events if e.type == "response.custom_tool_call_input.done"] == [DIFF]
    prompt = server.engine.prompts[-1]
    assert "Begin Patch" in prompt
    assert not any(name in prompt for name in ("spawn", "web_search", "local_shell", "tool_search"))
    whole = client.responses.create(**CLIENT)
    assert [item.type for item in whole.output] == [item.type for item in final.output]


def test_what_is_ignored_has_a_note(server: Any) -> None:
    answer = server.client.post("/v1/responses", json=FIRST)
    assert answer.headers["x-bitnet-ignored"] == "'namespace', 'tool_search', 'web_search', 'local_shell'"
    assert "x-bitnet-ignored" not in server.client.post("/v1/responses", json={**FIRST, "tools": [RUN, PATCH]}).headers


def test_items_go_back_as_they_came(server: Any, client: openai.OpenAI) -> None:
    said = [item.model_dump(exclude={"content"}) for item in client.responses.create(**CLIENT).output]
    outputs = [
        {"type": "custom_tool_call_output", "call_id": said[1]["call_id"], "output": "Done!"},
        {
            "type": "function_call_output",
            "call_id": said[2]["call_id"],
            "output": [
                {"type": "input_text", "text": "a.txt"},
                {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
            ],
        },
    ]
    prompt = prompt_after(server, *said, *outputs)
    assert "<think>\nA file.\n</think>" in prompt
    assert json.dumps(DIFF)[1:-1].replace("\\u00fc", "ü") in prompt
    assert (
        "<tool_response>\nDone!\n</tool_response>\n<tool_response>\na.txt[input_image: the model reads only text]"
        in prompt
    )


def test_items_of_other_servers_are_left_out(server: Any) -> None:
    others = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAAAB"},
        {
            "type": "web_search_call",
            "id": "ws_1",
            "status": "completed",
            "action": {"type": "search", "query": "hidden"},
        },
        {"type": "local_shell_call", "call_id": "1", "action": {"type": "exec", "command": ["hidden"]}},
        {"type": "local_shell_call_output", "call_id": "1", "output": "hidden"},
        {"type": "mcp_list_tools", "server_label": "hidden", "tools": []},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]},
        {"type": "message", "role": "user", "content": "And now?"},
    ]
    prompt = prompt_after(server, *others)
    assert "hidden" not in prompt
    assert "gAAAAAB" not in prompt
    assert "I will not." in prompt
    refused = server.client.post("/v1/responses", json={**FIRST, "input": others[1:2]})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "input"


def test_a_custom_tool_can_be_required(server: Any) -> None:
    body = {**FIRST, "tool_choice": {"type": "custom", "name": "apply_patch"}, "max_output_tokens": 90}
    (item,) = server.client.post("/v1/responses", json=body).json()["output"]
    assert item["type"] == "custom_tool_call"
    wrong = server.client.post("/v1/responses", json={**body, "tool_choice": {"type": "custom", "name": "other"}})
    assert wrong.status_code == 400
    assert "other" in wrong.text


def test_a_stored_call_of_a_custom_tool_is_continued(server: Any, client: openai.OpenAI) -> None:
    first = client.responses.create(**{**CLIENT, "store": True})
    done: Any = {"type": "custom_tool_call_output", "call_id": first.output[1].call_id, "output": "Done!"}
    client.responses.create(model="m", previous_response_id=first.id, input=[done])
    prompt = server.engine.prompts[-1]
    assert '"name": "apply_patch", "arguments": {"input": ' in prompt
    assert "<tool_response>\nDone!" in prompt
