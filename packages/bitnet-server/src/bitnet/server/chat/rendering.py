"""Writes a conversation as a chat template reads it: calls in its family's format or in words, and turns that alternate
where it takes no others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bitnet.server.chat.call_forms import example, family
from bitnet.server.chat.tools import Tools

if TYPE_CHECKING:
    from bitnet.core.text.chat import ChatTemplate


def as_template_reads(
    messages: Sequence[dict[str, Any]], tools: Tools | None, template: ChatTemplate | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """A conversation in the form that the template accepts, and the tools to pass to it; None: it accepts none."""
    made, given = _with_tools(messages, tools, template)
    if template is not None and (template.alternates or template.lacks_system):
        made = _alternating(made, not template.lacks_system)
    return made, given


def _alternating(messages: Sequence[dict[str, Any]], system: bool) -> list[dict[str, Any]]:
    """A conversation whose turns alternate: system messages are the user's, but for a first one where the template
    takes it (``system``), and neighbours of one role are one message. Calls and results do not count as turns; where
    those alone are between two turns of one role, an empty turn of the other comes between."""
    made: list[dict[str, Any]] = []
    turn = ""  # whose turn was last
    for i, message in enumerate(messages):
        role = "user" if message["role"] == "system" and not (system and i == 0) else message["role"]
        calls = "tool_calls" in message
        last = made[-1] if made else {"role": ""}
        if role == last["role"] and role in ("user", "assistant") and calls == ("tool_calls" in last):
            made[-1] = _merged(last, message)
            continue
        if role in ("user", "assistant") and not calls:
            if role == turn:
                made.append({"role": "user" if role == "assistant" else "assistant", "content": ""})
            turn = role
        made.append({**message, "role": role})
    return made


def _merged(last: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
    """Two messages of one role as one."""
    texts = filter(None, (last["content"], message["content"]))
    calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
    more = {"tool_calls": calls} if calls else {}
    return {**last, **message, "role": last["role"], "content": "\n\n".join(texts), **more}


def _with_tools(
    messages: Sequence[dict[str, Any]], tools: Tools | None, template: ChatTemplate | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """The conversation with its calls as the template's family writes them, and the tools to pass to the template."""
    kind = family(template)
    if kind != "generic" and tools is None and template is not None and _has_calls(messages) and template.drops_results:
        kind = "generic"
    if kind != "generic":
        made = [sound for message in messages for sound in _sound_calls(message)]
        if kind == "llama":
            made = [one for message in made for one in _one_call_each(message)]
        if kind == "mistral":
            made = [_with_short_ids(message) for message in made]
        if template is not None and any("tool_calls" in message for message in made) and template.texts_arguments:
            made = [_with_texts(message) for message in made]
        if tools is not None and (written := example(template)):
            return _instructed(made, _listed(tools, written)), None
        return made, [tool.described() for tool in tools.known] if tools else None
    called = {call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls", ())}
    made = [_in_words(message, called) for message in messages]
    return made if tools is None else _instructed(made, _instruction(tools)), None


def _instructed(messages: list[dict[str, Any]], instruction: str) -> list[dict[str, Any]]:
    """A conversation with an instruction at the end of its first system message."""
    first, *others = messages
    if first["role"] != "system":
        return [{"role": "system", "content": instruction}, *messages]
    return [{**first, "content": f"{first['content']}\n\n{instruction}"}, *others]


def _has_calls(messages: Sequence[dict[str, Any]]) -> bool:
    return any(message["role"] == "tool" or "tool_calls" in message for message in messages)


def _sound_calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    """A message with its broken calls as text, as templates take only arguments that are objects. Sound calls follow in
    a message of their own, as some templates write either a text or calls."""
    calls = message.get("tool_calls", ())
    broken = [call for call in calls if isinstance(call["function"]["arguments"], str)]
    if not broken:
        return [message]
    text = _without_calls(message, _joined(message["content"], broken))
    sound = [call for call in calls if not isinstance(call["function"]["arguments"], str)]
    return [text, {**_without_thought(message), "content": "", "tool_calls": sound}] if sound else [text]


def _without_calls(message: dict[str, Any], content: str) -> dict[str, Any]:
    """A message with another content in place of its calls; its thought stays."""
    return {**{name: value for name, value in message.items() if name != "tool_calls"}, "content": content}


def _without_thought(message: dict[str, Any]) -> dict[str, Any]:
    """A message that follows the one with the thought."""
    return {name: value for name, value in message.items() if name != "reasoning_content"}


def _joined(content: str, calls: Sequence[dict[str, Any]]) -> str:
    """A text with calls after it, as JSON; the JSON of a broken call breaks off where its arguments do."""
    return "\n".join(filter(None, [content, *(_written(call["function"]) for call in calls)]))


def _written(function: dict[str, Any]) -> str:
    if isinstance(function["arguments"], dict):
        return json.dumps(function, ensure_ascii=False)
    return f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": {function["arguments"]}'


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls have ids of nine letters, as Mistral's templates want them."""
    made = dict(message)
    if "tool_calls" in message:
        made["tool_calls"] = [{**call, "id": _short(call["id"])} for call in message["tool_calls"]]
    if message["role"] == "tool":
        made["tool_call_id"] = _short(message.get("tool_call_id", ""))
    return made


def _short(id: str) -> str:
    return hashlib.sha256(id.encode("utf-8", "replace")).hexdigest()[:9]


def _with_texts(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls' arguments are JSON text."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    texts = [{**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)} for function in calls]
    made = [{**call, "function": text} for call, text in zip(message.get("tool_calls", ()), texts, strict=True)]
    return {**message, "tool_calls": made} if made else message


def _one_call_each(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Split a message into several, as Llama's templates accept one call per message."""
    calls = message.get("tool_calls", ())
    if len(calls) < 2:
        return [message]
    first, *others = ([call] for call in calls)
    rest = _without_thought(message)
    return [{**message, "tool_calls": first}, *({**rest, "tool_calls": call} for call in others)]


def _instruction(tools: Tools) -> str:
    """The system message about tools for models whose template does not describe them."""
    lines = [json.dumps(tool.described()["function"], ensure_ascii=False) for tool in tools.known]
    must = "You must call a function." if tools.required else "Call one only where it helps; else answer in words."
    return "\n".join(
        [
            "You can call these functions:",
            *lines,
            'To call one, answer with nothing but JSON: {"name": the function\'s name, "arguments": {…}}',
            must,
        ]
    )


def _listed(tools: Tools, written: str) -> str:
    """The system message about tools for models that write calls as ``written``, as DeepSeek asks for it."""
    listed = []
    for tool in tools.known:
        schema = json.dumps(tool.parameters, ensure_ascii=False)
        listed.append(f"### {tool.name}\nDescription: {tool.description}\n\nParameters: {schema}")
    must = "You must call a tool." if tools.required else "Call one only where it helps; else answer in words."
    return "\n\n".join(
        ["## Tools\nYou have access to the following tools:", *listed, f"To call one, write exactly:\n{written}", must]
    )


def _in_words(message: dict[str, Any], called: Mapping[str, str]) -> dict[str, Any]:
    """A message with calls and results as plain text, for templates that do not support them.

    Args:
        called: Maps the ids of calls to the names of their functions.
    """
    if message["role"] == "tool":
        name = called.get(message.get("tool_call_id", ""), "the function")
        return {"role": "user", "content": f"Result of {message.get('name', name)}: {message['content']}"}
    if "tool_calls" in message:
        return _without_calls(message, _joined(message["content"], message["tool_calls"]))
    return message
