"""Converts clients' conversations to the form that chat templates read."""

from __future__ import annotations

from typing import Any

from bitnet.core.errors import brief
from bitnet.server.chat.tools import function_call
from bitnet.server.request.errors import unsupported, wrong
from bitnet.server.request.fields import Fields

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
TEXT_PARTS = ("text", "input_text", "output_text")
OTHER_PARTS = ("image", "image_url", "input_image", "document", "file", "input_file", "audio", "input_audio")


def openai_messages(fields: Fields, field: str = "messages") -> list[dict[str, Any]]:
    """The conversation of ``/v1/chat/completions``; the role ``developer`` is treated as ``system``.

    Raises:
        RequestError: It is missing, or a message is invalid or holds more than text.
    """
    messages = fields.objects(field)
    if not messages:
        raise wrong(fields.name(field), "is missing or empty; it must be a list of messages.")
    return [_message(message) for message in messages]


def _message(message: Fields) -> dict[str, Any]:
    message.require("role")
    role = ROLES[message.choice("role", tuple(ROLES), "")]
    text = result_text if role == "tool" else content_text
    made: dict[str, Any] = {"role": role, "content": text(message, "content")}
    for name, sent in (("name", "name"), ("name", "tool_name"), ("tool_call_id", "tool_call_id")):
        if (value := message.text(sent)) is not None:
            made[name] = value
    thoughts = (message.text(name) for name in ("reasoning_content", "reasoning", "thinking"))
    if role == "assistant" and (thought := next(filter(None, thoughts), None)) is not None:
        made["reasoning_content"] = thought
    if calls := message.objects("tool_calls"):
        made["tool_calls"] = [_tool_call(call) for call in calls]
    elif "content" not in message and role != "assistant":
        raise wrong(message.name("content"), "is missing.")
    return made


def _tool_call(call: Fields) -> dict[str, Any]:
    call.require("function")
    return function_call(call.object("function") or call, call.text("id"))


def content_text(fields: Fields, field: str) -> str:
    """A message's content: a string, or the texts of its parts.

    Raises:
        RequestError: A part is not text.
    """
    value = fields.values.get(field)
    if value is None or isinstance(value, str):
        return value or ""
    return "".join(map(part_text, content_parts(fields, field)))


def result_text(fields: Fields, field: str) -> str:
    """What a tool answered. An image in it is only named: a client's tools may give one without having been asked to,
    and it stays in the conversation.

    Raises:
        RequestError: A part is of an unknown type.
    """
    value = fields.values.get(field)
    if not isinstance(value, list):
        return content_text(fields, field)
    return "".join(map(result_part, content_parts(fields, field)))


def result_part(part: Fields) -> str:
    """The text of a part of what a tool answered."""
    kind = part.text("type", "text")
    return f"[{kind}: the model reads only text]" if kind in OTHER_PARTS else part_text(part)


def content_parts(fields: Fields, field: str) -> list[Fields]:
    """The parts of a message's content, if it is not a string.

    Raises:
        RequestError: It is not a list of objects.
    """
    value = fields.values.get(field)
    if not isinstance(value, list):
        raise wrong(fields.name(field), f"is {brief(value)}; it must be a string or a list of parts.")
    return fields.objects(field) or []


def part_text(part: Fields) -> str:
    """The text of a part.

    Raises:
        RequestError: It is not text.
    """
    if (kind := part.text("type", "text")) == "refusal":
        return part.text(kind) or ""
    if kind not in TEXT_PARTS:
        raise unsupported(part.name("type"), f"{brief(kind)} is not text, and the model reads only text.")
    part.require("text")
    return part.text("text") or ""
