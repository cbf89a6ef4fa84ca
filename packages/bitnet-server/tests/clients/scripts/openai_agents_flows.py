# /// script
# requires-python = ">=3.10"
# dependencies = ["openai-agents==0.24.0"]
# [tool.uv]
# exclude-newer = "2026-11-27T00:00:00Z"
# ///
"""openai-agents: text, a stream, tools and objects, by chat completions and by responses."""

import asyncio
from typing import Any

import agents
import openai
from person import HUNT, INSTRUCTIONS, QUESTION, TURNS, URL, WEATHER, Person, follow, say, weather

agents.set_tracing_disabled(True)  # it would send traces to OpenAI
client = openai.AsyncOpenAI(base_url=URL, api_key="none", max_retries=0)


def text_of(event: Any) -> str:
    """The text that an event of a stream adds."""
    data: Any = event.data if event.type == "raw_response_event" else None
    return data.delta if data and data.type == "response.output_text.delta" else ""


async def flows(model: Any) -> dict[str, Any]:
    plain = agents.Agent(name="plain", model=model)
    text = (await agents.Runner.run(plain, "Hello.")).final_output
    helper = agents.Agent(name="helper", model=model, tools=[agents.function_tool(weather)])
    final = (await agents.Runner.run(helper, WEATHER)).final_output
    stream = agents.Runner.run_streamed(helper, WEATHER)
    pieces = [text_of(event) async for event in stream.stream_events()]
    reader = agents.Agent(name="reader", model=model, output_type=Person)
    objects = [(await agents.Runner.run(reader, QUESTION)).final_output]
    hunter = agents.Agent(name="hunter", model=model, instructions=INSTRUCTIONS, tools=[agents.function_tool(follow)])
    hunt = await agents.Runner.run(hunter, HUNT)
    calls = [item.raw_item.arguments for item in hunt.new_items if item.type == "tool_call_item"]
    usage = [answer.usage for answer in hunt.raw_responses]
    turns, said = [], hunt.to_input_list()
    for text_of_turn in TURNS:
        turn = await agents.Runner.run(hunter, [*said, {"role": "user", "content": text_of_turn}])
        turns.append(turn.final_output)
        usage += [answer.usage for answer in turn.raw_responses]
        said = turn.to_input_list()
    tokens = [(one.input_tokens, one.input_tokens_details.cached_tokens) for one in usage]
    session = {"calls": calls, "found": hunt.final_output, "turns": turns, "tokens": tokens}
    return {"session": session, "text": text, "final": final, "pieces": pieces, "objects": objects}


async def both() -> dict[str, Any]:
    kinds: Any = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}
    return {name: await flows(kind("m", client)) for name, kind in kinds.items()}


say(**asyncio.run(both()))
