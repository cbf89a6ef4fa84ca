"""Reads the items of a request for a response in the form that chat templates read."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from bitnet.core.errors import brief
from bitnet.server.chat.messages import ROLES, content_text, result_text
from bitnet.server.chat.thinking import read_carried
from bitnet.server.chat.tools import INPUT, function_call, made_call
from bitnet.server.request.errors import unsupported, wrong
from bitnet.server.request.fields import Fields

_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_OTHERS = ("_call", "_call_output", "_list_tools", "_approval_request", "_approval_response")
"""Endings of the items of tools that another server, or the client's own machine, has run without a function."""


def read_input(fields: Fields) -> list[dict[str, Any]]:
    """The messages of ``input``.

    Raises:
        RequestError: It is missing, or an item is invalid or not supported.
    """
    fields.require("input")
    given = fields.values["input"]
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise wrong("input", f"is {brief(given)}; it must be a text or a list of items.")
    messages: list[dict[str, Any]] = []
    thought = ""
    for item in fields.objects("input") or ():
        kind = item.text("type", "message") or ""
        if kind == "reasoning":
            thought = _given_thought(item)
            continue
        if kind == "function_call":
            add_call(messages, function_call(item, item.text("call_id")))
        elif kind == "custom_tool_call":
            item.require("name")
            arguments = {INPUT: item.text("input") or ""}
            add_call(messages, made_call(item.text("call_id") or "", item.text("name") or "", arguments))
        elif kind in _OUTPUTS:
            item.require("call_id")
            output = result_text(item, "output")
            messages.append({"role": "tool", "tool_call_id": item.text("call_id"), "content": output})
        elif kind == "message":
            item.require("role")
            role = ROLES[item.choice("role", ("system", "developer", "user", "assistant"), "")]
            messages.append({"role": role, "content": content_text(item, "content")})
        elif kind.endswith(_OTHERS):
            continue
        else:
            raise unsupported(item.name("type"), f"{brief(kind)} is neither a message nor a tool's call or output.")
        if thought and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = thought
        thought = ""
    if not messages:
        raise wrong("input", "has no message; it must have one.")
    return messages


def listed_items(fields: Fields) -> Sequence[dict[str, Any]]:
    """The items of ``input`` as a client lists them, each with an id."""
    given = fields.values["input"]
    return [_listed(item) for item in ([{"role": "user", "content": given}] if isinstance(given, str) else given)]


def _listed(item: dict[str, Any]) -> dict[str, Any]:
    kind = item.get("type") or "message"
    made = {"id": f"{'msg' if kind == 'message' else 'item'}_{secrets.token_hex(12)}", "type": kind, **item}
    if kind == "message" and isinstance(text := item.get("content"), str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        made["content"] = [{"type": part, "text": text, **({"annotations": []} if part == "output_text" else {})}]
    return made


def _given_thought(item: Fields) -> str:
    """The thought of an item: its content, or else its summary, which holds the whole where this server wrote it, or
    else what the client keeps of it without reading it."""
    parts = item.objects("content") or item.objects("summary") or []
    said = "\n\n".join(part.text("text") or "" for part in parts)
    return said or read_carried(item.text("encrypted_content"))


def add_call(messages: list[dict[str, Any]], call: dict[str, Any]) -> None:
    """Add a call to the assistant's message, which is the last one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    messages[-1] = {**messages[-1], "tool_calls": [*messages[-1].get("tool_calls", ()), call]}
