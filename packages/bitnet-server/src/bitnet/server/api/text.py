"""``/tokenize``, ``/detokenize`` and ``/apply-template``, as in llama.cpp's server."""

from __future__ import annotations

from typing import Any

from bitnet.core.errors import InvalidInputError
from bitnet.server.chat.messages import openai_messages
from bitnet.server.chat.prompt import ChatPrompt
from bitnet.server.chat.rendering import as_template_reads
from bitnet.server.chat.tools import openai_tools
from bitnet.server.models.service import Service
from bitnet.server.request.bounded_json import MAX_ITEMS
from bitnet.server.request.call import Call
from bitnet.server.request.errors import wrong
from bitnet.server.request.fields import Fields


async def tokenize(service: Service, call: Call, fields: Fields) -> None:
    name = "content" if "content" in fields else "prompt"  # llama.cpp's name, vLLM's name
    fields.require(name)
    text = fields.text(name) or ""
    add, parse, pieces = fields.flag("add_special"), fields.flag("parse_special", True), fields.flag("with_pieces")
    tokenizer = service.model.tokenizer
    ids = await service.shared.in_thread(lambda: service.text_tokens(text, add_special=add, parse_special=parse))
    tokens: list[Any] = [{"id": i, "piece": _piece(tokenizer.token_bytes(i))} for i in ids] if pieces else ids
    await call.reply({"tokens": tokens, "count": len(ids), "max_model_len": service.model.context})


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
    await call.reply({"content": text})


async def apply_template(service: Service, call: Call, fields: Fields) -> None:
    template = service.model.chat_template
    if template is None:
        raise InvalidInputError(f"{service.names[0]} has no chat template.")

    def asked() -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None, ChatPrompt]:
        given = openai_messages(fields)
        return *as_template_reads(given, openai_tools(fields), template), ChatPrompt.read(fields, given)

    messages, tools, how = await call.read(asked)
    rendered = service.shared.in_thread(lambda: template.render(messages, tools=tools, variables=how.variables))
    await call.reply({"prompt": await rendered})
