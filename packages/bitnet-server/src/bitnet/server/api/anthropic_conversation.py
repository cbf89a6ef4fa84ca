"""Reads the conversation of a request to Anthropic's API in the form that chat templates read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bitnet.core.errors import brief
from bitnet.server.chat.messages import content_parts, content_text, part_text, result_part
from bitnet.server.chat.prompt import ChatPrompt, check_continued
from bitnet.server.chat.thinking import ThinkingChoice, read_carried, read_effort, thinking_object
from bitnet.server.chat.tools import function_call
from bitnet.server.request.errors import wrong
from bitnet.server.request.fields import Fields

_OWN_RESULT, _RESULT = "tool_result", "_tool_result"
_SERVER_USES = ("server_tool_use", "mcp_tool_use")
_BILLING = "x-anthropic-billing-header:"
"""Begins a block of ``system`` that Claude Code writes for its own server. It differs between sessions, so that none
would share the prompt that follows."""


def read_conversation(fields: Fields) -> tuple[list[dict[str, Any]], ChatPrompt]:
    """The messages, and how the prompt is made of them. If the last message is the assistant's, it is continued.

    Raises:
        RequestError: A field is missing, invalid or not supported.
    """
    choice = thinking_object(fields)
    config = fields.object("output_config") or Fields({}, "output_config")
    asked = replace(choice, effort=read_effort(config, "effort"))
    choice = asked if choice.thinks else ThinkingChoice(False)  # this API's models think only where they are asked to
    system = _system(fields)
    messages = [{"role": "system", "content": system}] if system else []
    given = fields.objects("messages")
    if not given:
        raise wrong("messages", "is missing or empty; it must be a list of messages.")
    for message in given:
        message.require("role")
        message.require("content")
        role = message.choice("role", ("user", "assistant", "system"), "")
        messages += _message(role, message)
    _keep_thoughts(messages, fields)
    if messages[-1]["role"] != "assistant":
        return messages, ChatPrompt(thinking=choice)
    check_continued(messages, given[-1].name("role"))
    return messages, ChatPrompt(continued=True)


def _system(fields: Fields) -> str:
    """The text of ``system``."""
    if not isinstance(fields.values.get("system"), list):
        return content_text(fields, "system")
    texts = (part_text(part) for part in content_parts(fields, "system"))
    return "".join(text for text in texts if not text.startswith(_BILLING))


def _message(role: str, message: Fields) -> list[dict[str, Any]]:
    """A message in the form that templates read: tool results become messages of their own, before the user's text."""
    if isinstance(message.values["content"], str):
        return [{"role": role, "content": message.values["content"]}]
    texts, calls, results, thoughts = [], [], [], list[str]()
    for part in content_parts(message, "content"):
        kind = part.text("type", "text") or ""
        if kind == "thinking" and role == "assistant":
            thoughts.append(part.text("thinking") or read_carried(part.text("signature")))
        elif kind == "redacted_thinking" and role == "assistant":
            continue  # nobody here can read it
        elif role == "assistant" and (kind in _SERVER_USES or (kind.endswith(_RESULT) and kind != _OWN_RESULT)):
            continue  # another server ran it, and the text after it says what came of it
        elif kind == "tool_use" and role == "assistant":
            part.require("id")
            calls.append(function_call(part, part.text("id"), "input"))
        elif kind == _OWN_RESULT and role == "user":
            part.require("tool_use_id")
            text = _result_text(part)
            failed = "Error: " if part.flag("is_error") else ""
            results.append({"role": "tool", "tool_call_id": part.text("tool_use_id"), "content": failed + text})
        else:
            texts.append(_text(part))
    made: dict[str, Any] = {"role": role, "content": "".join(texts)}
    if any(thoughts):
        made["reasoning_content"] = "\n\n".join(filter(None, thoughts))
    if calls:
        made["tool_calls"] = calls
    return [*results, made] if texts or calls or not results else results


def _text(part: Fields) -> str:
    """The text of a block: a text, a document of plain text, or what a search found.

    Raises:
        RequestError: It is none of them.
    """
    kind = part.text("type", "text")
    if _is_plain(part):
        source = part.object("source") or part
        name = "data" if source.text("type") == "text" else "content"
        source.require(name)
        return _titled(part, content_text(source, name))
    if kind == "search_result":
        return _titled(part, content_text(part, "content"))
    return part_text(part)


def _is_plain(part: Fields) -> bool:
    """Whether it is a document of plain text."""
    source = part.object("source") if part.text("type", "text") == "document" else None
    return source is not None and source.text("type") in ("text", "content")


def _titled(part: Fields, text: str) -> str:
    title = part.text("title")
    return f"{title}\n{text}\n" if title else f"{text}\n"


def _result_text(part: Fields) -> str:
    """What a tool answered: as other APIs' tools do, or with documents, finds and names of tools."""
    if not isinstance(part.values.get("content"), list):
        return content_text(part, "content")
    return "".join(_result_part(block) for block in content_parts(part, "content"))


def _result_part(block: Fields) -> str:
    kind = block.text("type", "text")
    if kind == "tool_reference":
        return block.text("tool_name") or ""
    return _text(block) if kind == "search_result" or _is_plain(block) else result_part(block)


def _keep_thoughts(messages: list[dict[str, Any]], fields: Fields) -> None:
    """Drop the thoughts of earlier turns that ``context_management`` has cleared."""
    for edit in _edits(fields):
        if not (edit.text("type") or "").startswith("clear_thinking_") or edit.values.get("keep") in (None, "all"):
            continue
        keep = edit.object("keep") or edit
        turns = keep.integer("value", 1) or 1
        thinking = [message for message in messages if "reasoning_content" in message]
        for message in thinking[: max(0, len(thinking) - turns)]:
            del message["reasoning_content"]


def _edits(fields: Fields) -> list[Fields]:
    management = fields.object("context_management")
    return [] if management is None else management.objects("edits") or []


def ignored_edits(fields: Fields) -> list[str]:
    """Edits of ``context_management`` that this server does not make: those that need a count of tokens."""
    kinds = (edit.text("type") or "" for edit in _edits(fields))
    return [brief(kind) for kind in kinds if not kind.startswith("clear_thinking_")]
