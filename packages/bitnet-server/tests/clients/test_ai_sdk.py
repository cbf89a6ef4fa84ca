"""Vercel's AI SDK, with the schemas that zod writes by default, over scripted answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from bitnet.core import Model

pytestmark = pytest.mark.nightly(unless_changed=("packages/bitnet-server",))  # npm installs it
FLOWS = """
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
const provider = createOpenAICompatible({
  name: "bitnet", baseURL: process.argv[2], apiKey: "none", supportsStructuredOutputs: true, includeUsage: true,
});
const model = provider("bitnet-demo");
const tools = {
  weather: tool({
    description: "The weather of a place.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => `föhn in ${city}`,
  }),
};
out.text = (await generateText({ model, prompt: "Hello.", maxRetries: 0 })).text;
const ask = { model, tools, prompt: "How is it in Zürich?", stopWhen: stepCountIs(3), maxRetries: 0 };
out.final = (await generateText(ask)).text;
const stream = streamText(ask);
out.pieces = [];
for await (const piece of stream.textStream) out.pieces.push(piece);
out.usage = await stream.usage;
const schema = z.object({ name: z.string(), age: z.number().int(), tags: z.array(z.string()).optional() });
const read = { model, output: Output.object({ schema }), prompt: "Who?", maxRetries: 0 };
out.objects = [(await generateText(read)).output, await streamText(read).output];
"""
ADA = {"name": "Ada", "age": 36, "tags": ["x", "y"]}


def test_flows(
    javascript: Callable[..., Callable[[str, str], Any]], script_model: Model, running: Any, scripted: Any
) -> None:
    def said(prompt: str) -> str:
        if "föhn in Zürich" in prompt:
            return "It is warm."
        if "weather" in prompt:
            return '{"name": "weather", "arguments": {"city": "Zürich"}}'
        return "Good day to you." if "Hello." in prompt else json.dumps(ADA, separators=(",", ":"))

    scripted(script_model, said)
    run = javascript("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "zod@4.6.7")
    with running(script_model) as server:
        out = run(FLOWS, server.url)
    assert out["text"] == "Good day to you."
    assert out["final"] == "".join(out["pieces"]) == "It is warm."
    assert sum(bool(piece) for piece in out["pieces"]) > 1
    assert out["usage"]["outputTokens"] > 0
    assert out["objects"] == [ADA, ADA]
