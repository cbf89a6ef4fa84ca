"""Conversations in files: JSON lists of messages, as OpenAI's API takes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bitnet.core.cli.console import read_text
from bitnet.core.errors import InvalidInputError
from bitnet.core.support.files import replacing

KEYS = ("role", "content", "reasoning_content")
"""What is kept of a message."""


def save(path: Path, messages: Sequence[Mapping[str, str]]) -> None:
    """Write a conversation. If that fails, an existing file is left unchanged.

    Raises:
        InvalidInputError: There is a file of this name that holds something else.
        BitNetError: The file cannot be written.
    """
    if path.is_file() and path.stat().st_size:
        try:
            load(path)
        except InvalidInputError:
            raise InvalidInputError(
                f"{path} exists and is not a saved conversation.", hint="Choose another name."
            ) from None
    text = json.dumps(list(messages), indent=2, ensure_ascii=False) + "\n"
    with replacing(path) as file:
        file.write(text.encode())


def load(path: Path) -> list[dict[str, str]]:
    """Read a conversation: a list of messages, or an object that has one in ``messages``.

    Returns:
        The messages: a system message, if there is one, then those of the user and the assistant in turns.

    Raises:
        InvalidInputError: The file cannot be read, or is not such a conversation.
    """
    text = read_text(path)
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidInputError(
            f"{path} is not JSON (line {error.lineno}, column {error.colno}: {error.msg})."
        ) from None
    except (ValueError, RecursionError) as error:  # a number of too many digits, or lists in lists in lists
        raise InvalidInputError(f"{path} is not a conversation: {error}.") from None
    messages = document.get("messages") if isinstance(document, dict) else document
    if not isinstance(messages, list) or not messages:
        raise InvalidInputError(
            f"{path} is not a conversation: it has no list of messages.",
            hint='It must hold [{"role": "user", "content": "…"}, …].',
        )
    checked = [_message(path, i, message) for i, message in enumerate(messages)]
    turns = checked[1:] if checked[0]["role"] == "system" else checked
    for i, message in enumerate(turns):
        if message["role"] != (wanted := ("user", "assistant")[i % 2]):
            number = len(checked) - len(turns) + i + 1
            raise InvalidInputError(
                f"{path}: message {number} has the role {message['role']}; {wanted} is expected there."
            )
    return checked


def _message(path: Path, index: int, message: Any) -> dict[str, str]:
    where = f"{path}: message {index + 1}"
    if not isinstance(message, dict):
        raise InvalidInputError(f"{where} is not an object with role and content.")
    kept = {key: message[key] for key in KEYS if message.get(key) is not None}
    if isinstance(parts := kept.get("content"), list):
        kept["content"] = "".join(_part(where, part) for part in parts)
    if kept.get("role") == "developer":  # OpenAI's newer name
        kept["role"] = "system"
    if kept.get("role") not in ("system", "user", "assistant"):
        raise InvalidInputError(f"{where} has no role that a chat knows: system, user or assistant.")
    for key in KEYS[1:]:
        value = kept.get(key, "" if key != "content" else None)
        if not isinstance(value, str):
            raise InvalidInputError(f"{where} has no text in {key}.")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidInputError(f"{where} holds half of a surrogate pair, which is no text.") from None
    return kept


def _part(where: str, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise InvalidInputError(f"{where} has content other than text.")
    return str(part["text"])
