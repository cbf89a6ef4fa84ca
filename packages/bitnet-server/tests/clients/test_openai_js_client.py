"""The official ``openai`` client for JavaScript, over the demo model and over scripted answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from bitnet.core import Model

QUESTION: Any = [{"role": "user", "content": "What is 17 + 25?"}]
BEGIN = """
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
"""
OVER_THE_DEMO_MODEL = """
const fields = { model: "demo", temperature: 0, messages: [{ role: "user", content: "What is 17 + 25?" }] };
out.chat = await client.chat.completions.create(fields);
out.pieces = [];
for await (const chunk of await client.chat.completions.create({ ...fields, stream: true })) {
  out.pieces.push(chunk.choices[0]?.delta?.content ?? "");
}
const Sum = z.object({ sum: z.union([z.literal(7), z.literal(8)]), why: z.enum(["added", "guessed"]) });
const parsed = await client.chat.completions.parse({ ...fields, response_format: zodResponseFormat(Sum, "sum") });
out.parsed = parsed.choices[0].message.parsed;
out.response = await client.responses.create({ model: "demo", input: "What is 17 + 25?", temperature: 0 });
out.deltas = [];
for await (const event of client.responses.stream({ model: "demo", input: "What is 17 + 25?", temperature: 0 })) {
  if (event.type === "response.output_text.delta") out.deltas.push(event.delta);
}
try {
  await client.chat.completions.create({ ...fields, model: "other" });
} catch (error) {
  out.error = { status: error.status, name: error.constructor.name };
}
"""
OVER_SCRIPTED_ANSWERS = """
const weather = {
  type: "function",
  function: {
    name: "weather", description: "The weather of a place.",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
};
const fields = { model: "bitnet-demo", tools: [weather] };
const messages = [{ role: "user", content: "How is it in Zürich?" }];
const asked = await client.chat.completions.create({ ...fields, messages });
out.asked = asked.choices[0];
const calls = [];
for await (const chunk of await client.chat.completions.create({ ...fields, messages, stream: true })) {
  for (const piece of chunk.choices[0]?.delta?.tool_calls ?? []) {
    const call = calls[piece.index] ??= { name: "", arguments: "" };
    call.name += piece.function?.name ?? "";
    call.arguments += piece.function?.arguments ?? "";
  }
}
out.streamed = calls;
messages.push(out.asked.message, { role: "tool", tool_call_id: out.asked.message.tool_calls[0].id, content: "föhn" });
out.final = await client.chat.completions.create({ ...fields, messages });
"""
pytestmark = pytest.mark.nightly(unless_changed=("packages/bitnet-server",))


@pytest.fixture(scope="module")
def node(javascript: Callable[..., Callable[[str, str], Any]]) -> Callable[[str, str], Any]:
    """Runs a script with the client and a server's address; what it has in ``out`` at its end."""
    run = javascript("openai@7.55.0", "zod@4.6.7")
    return lambda script, url: run(BEGIN + script, url)


def test_over_the_demo_model(node: Callable[[str, str], Any], demo: Any) -> None:
    out = node(OVER_THE_DEMO_MODEL, demo.url)
    expected = demo.model.chat(QUESTION).text
    assert out["chat"]["choices"][0]["message"]["content"] == expected == "17 + 25 = 42."
    assert "".join(out["pieces"]) == expected
    assert sum(piece != "" for piece in out["pieces"]) > 1
    assert out["parsed"]["sum"] in (7, 8)
    assert out["parsed"]["why"] in ("added", "guessed")
    assert out["response"]["output_text"] == expected
    assert "".join(out["deltas"]) == expected
    assert out["error"] == {"status": 404, "name": "NotFoundError"}


def test_tools_over_scripted_answers(
    node: Callable[[str, str], Any], script_model: Model, running: Any, scripted: Any
) -> None:
    call = json.dumps({"name": "weather", "parameters": {"city": "Zürich"}}, ensure_ascii=False)
    scripted(script_model, lambda prompt: "It is warm." if "föhn" in prompt else call)
    with running(script_model) as server:
        out = node(OVER_SCRIPTED_ANSWERS, server.url)
    assert out["asked"]["finish_reason"] == "tool_calls"
    (asked,) = out["asked"]["message"]["tool_calls"]
    (streamed,) = out["streamed"]
    for function in (asked["function"], streamed):
        assert function["name"] == "weather"
        assert json.loads(function["arguments"]) == {"city": "Zürich"}
    assert out["final"]["choices"][0]["message"]["content"] == "It is warm."
    assert out["final"]["choices"][0]["finish_reason"] == "stop"
