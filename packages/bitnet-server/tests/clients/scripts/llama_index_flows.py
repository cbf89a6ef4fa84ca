# /// script
# requires-python = ">=3.10"
# dependencies = ["llama-index-core==0.14.25", "llama-index-llms-openai-like==0.8.1"]
# [tool.uv]
# exclude-newer = "2026-11-27T00:00:00Z"
# ///
"""LlamaIndex: text, a stream, tools and objects."""

import asyncio
from typing import Any

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from person import QUESTION, URL, WEATHER, Person, say, weather

SERVER: Any = {
    "model": "m",
    "api_base": URL,
    "api_key": "none",
    "is_chat_model": True,
    "context_window": 1024,
    "max_retries": 0,
}
llm = OpenAILike(**SERVER, is_function_calling_model=True)
schemed = OpenAILike(**SERVER, should_use_structured_outputs=True)
hello, asked = ([ChatMessage(role="user", content=text)] for text in ("Hello.", QUESTION))
tool = FunctionTool.from_defaults(weather)


async def agent() -> str:
    """An agent's answer; it streams."""
    return str(await FunctionAgent(tools=[tool], llm=llm, system_prompt="Be brief.").run(WEATHER))


say(
    chat={
        "text": llm.chat(hello).message.content,
        "final": asyncio.run(agent()),
        "pieces": [piece.delta for piece in llm.stream_chat(hello)],
        "called": llm.predict_and_call([tool], WEATHER).response,
        "objects": [
            llm.structured_predict(Person, PromptTemplate(QUESTION)),
            llm.as_structured_llm(Person).complete(QUESTION).raw,
            list(llm.as_structured_llm(Person).stream_chat(asked))[-1].raw,
            schemed.structured_predict(Person, PromptTemplate(QUESTION)),
        ],
    }
)
