# /// script
# requires-python = ">=3.10"
# dependencies = ["pydantic-ai-slim[openai]==2.68.0"]
# [tool.uv]
# exclude-newer = "2026-11-27T00:00:00Z"
# ///
"""pydantic-ai: text, a stream, tools and objects, by chat completions and by responses."""

import asyncio
from typing import Any

from person import HUNT, INSTRUCTIONS, QUESTION, TURNS, URL, WEATHER, Person, follow, say, weather
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=URL, api_key="none")


async def flows(model: Any) -> dict[str, Any]:
    text = (await Agent(model).run("Hello.")).output
    agent: Any = Agent(model, tools=[weather])
    final = (await agent.run(WEATHER)).output
    async with agent.run_stream(WEATHER) as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
    objects = []
    for output in (NativeOutput(Person), ToolOutput(Person), PromptedOutput(Person)):
        asked: Any = Agent(model, output_type=output)
        objects.append((await asked.run(QUESTION)).output)
        async with asked.run_stream(QUESTION) as stream:
            objects.append(await stream.get_output())
    hunter: Any = Agent(model, tools=[follow], instructions=INSTRUCTIONS)
    hunt = await hunter.run(HUNT)
    calls = [part.args_as_json_str() for m in hunt.all_messages() for part in m.parts if part.part_kind == "tool-call"]
    turns, turn = [], hunt
    for text_of_turn in TURNS:
        turn = await hunter.run(text_of_turn, message_history=turn.all_messages())
        turns.append(turn.output)
    usage = [message.usage for message in turn.all_messages() if message.kind == "response"]
    tokens = [(one.input_tokens, one.cache_read_tokens) for one in usage]
    session = {"calls": calls, "found": hunt.output, "turns": turns, "tokens": tokens}
    return {"session": session, "text": text, "final": final, "pieces": pieces, "objects": objects}


async def both() -> dict[str, Any]:
    kinds: Any = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}
    return {name: await flows(kind("m", provider=provider)) for name, kind in kinds.items()}


say(**asyncio.run(both()))
