"""``/tokenize`` and ``/detokenize``, as in the servers of llama.cpp and vLLM; llama.cpp's ``/apply-template``, vLLM's
``/tokenizer_info``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bitnet.core.errors import InvalidInputError
from bitnet.server.chat.messages import openai_messages
from bitnet.server.chat.prompt import ChatPrompt
from bitnet.server.chat.tools import Tools, openai_tools
from bitnet.server.models.service import Service
from bitnet.server.request.bounded_json import MAX_ITEMS
from bitnet.server.request.call import Call, long_json
from bitnet.server.request.errors import wrong
from bitnet.server.request.fields import Fields

AT_ONCE = 4096
"""Tokens that are encoded as JSON before other threads get their turn."""


async def tokenize(service: Service, call: Call, fields: Fields) -> None:
    """llama.cpp's clients send ``content``, vLLM's ``prompt`` or ``messages``."""
    tokenizer = service.model.tokenizer
    if "content" not in fields and "messages" in fields:
        ids = await _conversation_tokens(service, call, fields)
    else:
        name = "content" if "content" in fields else "prompt"
        fields.require(name)
        text, parse = fields.text(name) or "", fields.flag("parse_special", True)
        add = fields.flag("add_special") if name == "content" else fields.flag("add_special_tokens", True)
        ids = await service.shared.in_thread(lambda: service.text_tokens(text, add_special=add, parse_special=parse))
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": service.model.context}
    pieces = fields.flag("with_pieces")
    lists: dict[str, Iterable[Any]] = {
        "tokens": ({"id": i, "piece": _piece(tokenizer.token_bytes(i))} for i in ids) if pieces else ids
    }
    if fields.flag("return_token_strs"):
        lists["token_strs"] = (tokenizer.token_bytes(i).decode("utf-8", "replace") for i in ids)
    else:
        answer["token_strs"] = None
    await call.reply(await service.shared.in_thread(lambda: long_json(answer, lists, AT_ONCE)))


async def _conversation_tokens(service: Service, call: Call, fields: Fields) -> list[int]:
    """The tokens of a conversation's prompt."""

    def asked() -> tuple[list[dict[str, Any]], Tools | None, ChatPrompt]:
        given = openai_messages(fields)
        return given, openai_tools(fields), ChatPrompt.read(fields, given)

    messages, tools, how = await call.read(asked)
    return await service.shared.in_thread(lambda: service.chat_tokens(messages, tools, how))


def _piece(data: bytes) -> str | list[int]:
    """A token's text, or its bytes if they are not valid text."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def detokenize(service: Service, call: Call, fields: Fields) -> None:
    fields.require("tokens")
    tokens = fields.tokens("tokens", MAX_ITEMS) or []
    try:
        text = await service.shared.in_thread(lambda: service.model.tokenizer.decode(tokens, skip_special=False))
    except InvalidInputError as error:
        raise wrong("tokens", f"cannot be decoded: {error}") from None
    await call.reply({"content": text, "prompt": text})  # llama.cpp's name, vLLM's name


async def tokenizer_info(service: Service, call: Call) -> None:
    """Special tokens and chat template, under the names of vLLM."""
    model, tokenizer = service.model, service.model.tokenizer
    await call.reply(
        {
            "tokenizer_class": type(tokenizer).__name__,
            "bos_token": tokenizer.bos_token or None,
            "eos_token": tokenizer.eos_token,
            "chat_template": None if model.chat_template is None else model.chat_template.source,
            "model_max_length": model.context,
        }
    )


async def apply_template(service: Service, call: Call, fields: Fields) -> None:
    """The prompt that a chat with the same fields has; without the beginning of an answer where
    ``add_generation_prompt`` is false."""

    def asked() -> tuple[list[dict[str, Any]], Tools | None, ChatPrompt]:
        given = openai_messages(fields)
        return given, openai_tools(fields), ChatPrompt.read(fields, given, unanswered=True)

    messages, tools, how = await call.read(asked)
    await call.reply({"prompt": await service.shared.in_thread(lambda: service.chat_text(messages, tools, how))})
