# /// script
# requires-python = ">=3.10"
# dependencies = ["instructor==1.17.0"]
# [tool.uv]
# exclude-newer = "2026-11-27T00:00:00Z"
# ///
"""instructor: objects by each of its modes, and objects that grow."""

from typing import Any

import instructor
import openai
from person import QUESTION, URL, Person, say

client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
ask: Any = {
    "model": "m",
    "messages": [{"role": "user", "content": QUESTION}],
    "response_model": Person,
    "max_retries": 0,
}
found: dict[str, list[Any]] = {}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA):
    completions: Any = instructor.from_openai(client, mode=mode).chat.completions
    found[mode.name] = [completions.create(**ask)]
    found[f"{mode.name} grows"] = list(completions.create_partial(**ask))
    found[mode.name] += completions.create_iterable(**ask) if mode is instructor.Mode.TOOLS else []
say(**found)
