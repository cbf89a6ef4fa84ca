"""Events of streamed chats that are put together from bytes, and forms of calls that are kept, beside what they stand
for."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from bitnet.core import Chunk
from bitnet.core.text.chat import ChatTemplate
from bitnet.server.api.openai_chat import ChatAnswer
from bitnet.server.chat.call_forms import Tool, lazy_form
from bitnet.server.chat.tools import KNOWN_LENGTH, Tools
from bitnet.server.request.fields import Fields

TAGGED = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}<tool_call>{% endif %}")


def tool(name: str, **properties: Any) -> Tool:
    return Tool(name, "", {"type": "object", "properties": properties}, False, "tools[0].parameters")


@pytest.mark.parametrize("tools", [None, Tools((tool("f"),), frozenset({"f"}))])
def test_events_of_texts_are_those_of_any_chunk(tools: Tools | None) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    words = ["a", '"', "\\", "\n", "\x00", "é", "🎉", "\ud83d", "\u2028", "</script>", "%b", " < ", "<tool_call>"]
    words += ['{"name": "f", "arguments": {}}', "</tool_call>"]
    service: Any = SimpleNamespace(names=("m",), fingerprint="f", model=SimpleNamespace(chat_template=TAGGED))
    events = 0
    for _ in range(100):
        quick, general = (ChatAnswer(service, Fields({}), tools) for _ in range(2))
        general._head = quick._head
        index = chance.randrange(3)
        for _ in range(8):
            text, thought = ("".join(chance.choices(words, k=chance.randrange(6))) for _ in range(2))
            chunk = Chunk(text, (1, 2), None, None, reasoning=thought)
            wanted = [*general._piece(index, chunk)]
            made = [*quick.piece(index, chunk)]
            ids = {call.id: other.id for one in quick._parsers for call, other in _calls(quick, general, one)}
            for id, other in ids.items():
                made = [event.replace(id.encode(), other.encode()) for event in made]
            assert made == wanted
            events += len(made)
    assert events > 800


def _calls(quick: ChatAnswer, general: ChatAnswer, index: int) -> Any:
    return zip(quick._parsers[index].calls, general._parsers[index].calls, strict=True)


@pytest.mark.parametrize("parallel", [True, False])
def test_kept_forms_are_those_of_their_tools(parallel: bool) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(2000):  # too deep for JSON's encoder
        deep = {"type": "array", "items": deep}
    several = [tool("f", a={"type": kind}) for kind in ("string", "integer", "boolean")]
    several += [tool("g", ß={"enum": [1, "1", None, 1.5]}), tool("h", a=deep)]
    several += [tool("i", a={"type": "string", "description": "x" * KNOWN_LENGTH})]
    for template in (TAGGED, None, ChatTemplate("{{ tools }}[TOOL_CALLS]"), ChatTemplate("{{ tools }}<|python_tag|>")):
        for _ in range(40):
            one = chance.choice(several)
            form = Tools((one,), frozenset({one.name}), parallel=parallel).form(template)
            assert form is not None
            assert form[1]() == lazy_form([one], template, parallel=parallel)
