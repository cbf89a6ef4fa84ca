"""What programming agents send to Anthropic's API, in the shapes of Claude Code's requests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from bitnet.core import load_model
from bitnet.core.errors import InvalidInputError
from bitnet.core.text.chat import ChatTemplate
from bitnet.server.chat.rendering import as_template_reads

TEMPLATES = Path(__file__).parents[2] / "bitnet-core/tests/text/templates"
CACHED = {"cache_control": {"type": "ephemeral"}}
READ = {
    "name": "Read",
    "description": "Read a file.",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
}
ANSWER = '<think>\nA file, then.\n</think>\n\n<tool_call>\n{"name": "Read", "arguments": {"path": "a"}}\n</tool_call>'
FIRST: dict[str, Any] = {
    "model": "claude-opus-4-8",
    "max_tokens": 32_000,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.123; cc_entrypoint=cli;"},
        {"type": "text", "text": "You help with programs.", **CACHED},
    ],
    "messages": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "<note>x</note>\n"}, {"type": "text", "text": "Hi", **CACHED}],
        },
        {"role": "system", "content": "There is one kind of helper."},
    ],
    "tools": [READ, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": "{}"},
}
"""Claude Code's first request, as version 2.1.197 sends it, with shorter texts."""


def template(name: str) -> ChatTemplate:
    return ChatTemplate((TEMPLATES / f"{name}.jinja").read_text("utf-8"), bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def server(running: Any, scripted: Any) -> Iterator[Any]:
    with load_model(device="cpu", max_seqs=2, threads=1) as model:
        model._file.__dict__["chat_template"] = template("qwen3")
        engine = scripted(model, ANSWER)
        with running(model, names=("m",), model_aliases=(("claude-*", "m"),)) as found:
            found.engine = engine
            yield found


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as found:
        yield found


def prompt_after(server: Any, *messages: Any, **fields: Any) -> str:
    """The prompt that the model gets of a conversation."""
    body = {"model": "m", "max_tokens": 10, "messages": list(messages), **fields}
    answer = server.client.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    return str(server.engine.prompts[-1])


def blocks(*given: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(given)}


HI = {"role": "user", "content": "Hi"}
USE = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "a"}}


def result(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": list(content)}]}


def test_the_first_request_is_answered_by_a_thought_and_a_call(server: Any, client: anthropic.Anthropic) -> None:
    with client.beta.messages.stream(**FIRST, betas=["claude-code-20250219", "effort-2025-11-24"]) as stream:
        final = stream.get_final_message()
    thought, call = final.content
    assert thought.type == "thinking"
    assert thought.thinking == "A file, then."
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("Read", {"path": "a"})
    assert final.stop_reason == "tool_use"
    prompt = server.engine.prompts[-1]
    assert "billing" not in prompt
    assert "web_search" not in prompt
    assert prompt.startswith("<|im_start|>system\nYou help with programs.")
    assert "<note>x</note>\nHi<|im_end|>\n<|im_start|>system\nThere is one kind of helper.<|im_end|>" in prompt
    counted = client.beta.messages.count_tokens(
        **{name: FIRST[name] for name in ("model", "system", "messages", "tools", "thinking", "output_config")}
    )
    assert counted.input_tokens == final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0)


def test_what_is_ignored_has_a_note(server: Any) -> None:
    answer = server.client.post("/v1/messages?beta=true", json=FIRST)
    assert answer.headers["x-bitnet-ignored"] == "'web_search_20250305'"
    edits = {"edits": [{"type": "clear_tool_uses_20250919\r\nx: y"}]}
    other = server.client.post("/v1/messages", json={**FIRST, "tools": [READ], "context_management": edits})
    assert other.headers["x-bitnet-ignored"] == r"'clear_tool_uses_20250919\r\nx: y'"
    assert (
        "x-bitnet-ignored"
        not in server.client.post(
            "/v1/messages", json={**FIRST, "tools": [READ], "stream": True, "context_management": None}
        ).headers
    )


def test_a_call_of_an_ignored_tool_cannot_be_required(server: Any) -> None:
    choice = {"type": "tool", "name": "web_search"}
    refused = server.client.post("/v1/messages", json={**FIRST, "tool_choice": choice})
    assert refused.status_code == 400
    assert "web_search" in refused.json()["error"]["message"]


def test_thoughts_and_other_servers_blocks_in_the_history(server: Any) -> None:
    history = blocks(
        {"type": "redacted_thinking", "data": "xyz"},
        {"type": "thinking", "thinking": "A file, then.", "signature": "from elsewhere"},
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
        {"type": "text", "text": "I look."},
        USE,
    )
    prompt = prompt_after(server, HI, history, result({"type": "text", "text": "27"}), tools=[READ])
    assert "<think>\nA file, then.\n</think>\n\nI look.\n<tool_call>" in prompt
    assert "<tool_response>\n27\n</tool_response>" in prompt
    assert "srvtoolu" not in prompt


def test_results_may_hold_more_than_text(server: Any) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    plain = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Föhn."}, "title": "W"}
    found = {"type": "search_result", "source": "s", "title": "T", "content": [{"type": "text", "text": "27"}]}
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}
    tool = {"type": "tool_reference", "tool_name": "Read"}
    prompt = prompt_after(server, HI, blocks(USE), result(image, plain, found, pdf, tool), tools=[READ])
    expected = "[image: the model reads only text]W\nFöhn.\nT\n27\n[document: the model reads only text]Read"
    assert f"<tool_response>\n{expected}\n</tool_response>" in prompt
    refused = server.client.post("/v1/messages", json={**FIRST, "messages": [{"role": "user", "content": [image]}]})
    assert refused.status_code == 400
    assert "reads only text" in refused.text


@pytest.mark.parametrize(("keep", "kept"), [("all", "ab"), ({"type": "thinking_turns", "value": 1}, "b"), (None, "ab")])
def test_cleared_thoughts_are_dropped(server: Any, keep: Any, kept: str) -> None:
    def called(thought: str) -> list[dict[str, Any]]:
        block = {"type": "thinking", "thinking": f"thought {thought}", "signature": ""}
        return [blocks(block, USE), result({"type": "text", "text": "27"})]

    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": keep}]}
    prompt = prompt_after(server, HI, *called("a"), *called("b"), tools=[READ], context_management=edits)
    assert [name for name in "ab" if f"thought {name}" in prompt] == list(kept)


def test_an_omitted_thought_is_in_its_signature(server: Any, client: anthropic.Anthropic) -> None:
    omitted: Any = {**FIRST, "max_tokens": 99, "thinking": {"type": "adaptive", "display": "omitted"}}
    with client.beta.messages.stream(**omitted) as stream:
        thought = stream.get_final_message().content[0]
    assert thought.type == "thinking"
    assert thought.thinking == ""
    whole = client.beta.messages.create(**omitted).content[0]
    assert whole == thought
    prompt = prompt_after(server, HI, blocks(thought.model_dump(), USE), result({"type": "text", "text": "27"}))
    assert "<think>\nA file, then.\n</think>" in prompt
    broken = {**thought.model_dump(), "signature": thought.signature[:-3] + "ÿ*"}
    assert "A file" not in prompt_after(server, HI, blocks(broken, USE), result({"type": "text", "text": "27"}))


@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}])
def test_a_model_that_thinks_unasked_does_so_in_a_block(client: anthropic.Anthropic, thinking: Any) -> None:
    given: Any = {"model": "m", "max_tokens": 99, "messages": [HI]} | ({"thinking": thinking} if thinking else {})
    with client.messages.stream(**given) as stream:
        final = stream.get_final_message()
    whole = client.messages.create(**given)
    assert [block.type for block in final.content] == [block.type for block in whole.content] == ["thinking", "text"]


def test_an_answer_is_begun_for_the_model(server: Any) -> None:
    prompt = prompt_after(server, HI, blocks({"type": "text", "text": "It is"}), thinking={"type": "adaptive"})
    assert prompt.endswith("It is")


ROLES = [
    ("system", "user", "system"),
    ("user", "system", "assistant", "user"),
    ("system", "user", "assistant", "tool", "tool", "user", "system"),
    ("user", "user", "assistant", "assistant", "user"),
    ("system", "system", "user"),
]


@pytest.mark.parametrize("name", sorted(file.stem for file in TEMPLATES.glob("*.jinja")))
@pytest.mark.parametrize("roles", ROLES, ids="-".join)
def test_every_template_takes_every_order_of_roles(name: str, roles: tuple[str, ...]) -> None:
    made = [{"role": role, "content": f"text {i}"} for i, role in enumerate(roles)]
    if "tool" in roles:
        call = {"id": "1", "type": "function", "function": {"name": "Read", "arguments": {"path": "a"}}}
        made[2] |= {"content": "", "tool_calls": [call, {**call, "id": "2"}]}  # type: ignore[dict-item]
    read = template(name)
    prompt = read.render(as_template_reads(made, None, read)[0])
    places = [prompt.find(f"text {i}") for i in range(len(roles)) if made[i]["content"]]
    assert -1 not in places
    if not name.startswith(("deepseek", "mistral")):  # they write system messages elsewhere
        assert places == sorted(places)


def test_a_model_answers_for_other_names(running: Any, demo_model: Any) -> None:
    def asked(server: Any, name: str) -> int:
        body = {"model": name, "max_tokens": 1, "messages": [HI]}
        return int(server.client.post("/v1/messages", json=body).status_code)

    names = ("demo", "claude-opus-4-8", "claude-opus-4-8-20261101", "gpt-6")
    with running(demo_model, names=("demo",), model_aliases=(("claude-*", "demo"),)) as server:
        assert [asked(server, name) for name in names] == [200, 200, 200, 404]
        assert server.client.get("/v1/models/claude-opus-4-8").status_code == 200
    with running(demo_model, names=("demo",), any_model=True) as server:
        assert [asked(server, name) for name in names] == [200] * 4
    with (
        pytest.raises(InvalidInputError, match="'claude-\\*' is for 'other', which is none of demo"),
        running(demo_model, names=("demo",), model_aliases=(("claude-*", "other"),)),
    ):
        pass


def test_a_prompt_that_is_too_long_is_what_claude_code_shortens(server: Any) -> None:
    long = {"role": "user", "content": json.dumps([*range(3000)])}
    refused = server.client.post("/v1/messages", json={**FIRST, "messages": [long]})
    assert refused.status_code == 400
    said = refused.json()["error"]["message"]
    found = re.match(r"prompt is too long: (\d+) tokens > (\d+) maximum", said)  # Claude Code looks for both numbers
    assert found, said
    assert int(found[1]) > int(found[2]) == server.model.context


def test_later_requests_of_a_long_session_compute_only_what_is_new(
    running: Any, scripted: Any, long_file: Path
) -> None:
    """50,000 tokens of instructions: the second request computes less than 2 % of its prompt, as usage and metrics
    say."""
    system = " ".join(f"Rule {i} is to keep {i * 7919 % 9973} of them." for i in range(2_900))
    body: dict[str, Any] = {"model": "m", "max_tokens": 99, "system": system, "messages": [HI], "tools": [READ]}
    with load_model(long_file, device="cpu", context=65_536, max_seqs=2, threads=1) as model:
        scripted(model, "Here I am.")
        with running(model, names=("m",)) as server:
            counted, used = list[dict[str, float]](), list[dict[str, int]]()
            for _ in range(2):
                answer = server.client.post("/v1/messages", json=body).json()
                assert "usage" in answer, answer
                used.append(answer["usage"])
                found = re.findall(
                    r'bitnet_tokens_total\{kind="(prompt|cached)"\} (\S+)', server.client.get("/metrics").text
                )
                counted.append({kind: float(number) for kind, number in found})
                said = {"role": "assistant", "content": answer["content"]}
                body = {**body, "messages": [*body["messages"], said, {"role": "user", "content": "And now?"}]}
    first, second = used
    assert first["input_tokens"] > 50_000
    whole = second["input_tokens"] + second["cache_read_input_tokens"]
    assert second["input_tokens"] < 0.02 * whole
    assert counted[1]["prompt"] - counted[0]["prompt"] == second["input_tokens"]
    assert counted[1]["cached"] == second["cache_read_input_tokens"]
