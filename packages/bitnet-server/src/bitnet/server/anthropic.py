"""Anthropic's ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

from bitnet.core import Chunk, Completion
from bitnet.server.call import Call, to_json
from bitnet.server.errors import RequestError, unsupported, wrong
from bitnet.server.fields import Fields
from bitnet.server.generation import SSE, Job, Result
from bitnet.server.messages import content_text
from bitnet.server.sampling import MAX_STOPS, checked
from bitnet.server.service import Service

REFUSED = {
    "tools": "tools are not implemented yet.",
    "mcp_servers": "this server reaches no others.",
    "container": "this server runs no code.",
    "output_config": "structured output is not implemented yet.",
    "output_format": "structured output is not implemented yet.",
}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: RequestError) -> dict[str, Any]:
    """An error in the shape that Anthropic's clients read."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def parse(service: Service, fields: Fields) -> Job:
    """A request for an answer to a conversation.

    Raises:
        RequestError: A field is missing, not what it must be, or not supported.
    """
    for name in ("model", "max_tokens", "messages"):
        fields.require(name)
    messages = _conversation(service, fields)
    options = {
        "max_tokens": fields.integer("max_tokens", 1),
        "temperature": fields.number("temperature", 0, 1),
        "top_p": fields.number("top_p", 0, 1),
        "top_k": fields.integer("top_k", 0),
        "stop": fields.strings("stop_sequences", MAX_STOPS) or None,
    }
    options = {name: value for name, value in options.items() if value is not None}
    return Job(
        prompts=lambda: [service.chat_tokens(messages)],
        options=checked({"temperature": 1.0, **options}),
        answer=MessageAnswer(service),
        stream=SSE if fields.flag("stream") else None,
        receipt=fields.flag("x_bitnet_receipt"),
    )


async def count_tokens(service: Service, call: Call) -> None:
    fields = Fields(await call.json())
    messages = _conversation(service, fields)
    tokens = await service.in_thread(lambda: service.chat_tokens(messages))
    await call.reply({"input_tokens": len(tokens)})


def _conversation(service: Service, fields: Fields) -> list[dict[str, Any]]:
    service.check_model(fields.text("model"))
    fields.refuse(REFUSED)
    thinking = fields.object("thinking")
    if thinking is not None and thinking.text("type") != "disabled":
        raise unsupported("thinking", "the model does not think aloud apart from its answer.")
    system = content_text(fields, "system")
    messages = [{"role": "system", "content": system}] if system else []
    given = fields.objects("messages")
    if not given:
        raise wrong("messages", "is missing or empty; it must be a list of messages.")
    for message in given:
        message.require("role")
        message.require("content")
        role = message.choice("role", ("user", "assistant"), "")
        messages.append({"role": role, "content": content_text(message, "content")})
    if messages[-1]["role"] == "assistant":
        raise unsupported(
            f"messages[{len(given) - 1}]",
            "an answer cannot be begun for the model; the last message must be the user's",
        )
    return messages


class MessageAnswer:
    """An answer as ``message`` and the events that build one."""

    def __init__(self, service: Service) -> None:
        self._service, self._id = service, "msg_" + secrets.token_hex(12)

    def _message(self, content: list[Any], usage: dict[str, Any], completion: Completion | None) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._service.names[0],
            "content": content,
            **_stop(completion),
            "usage": usage,
        }

    def begin(self, prompt_tokens: int) -> Iterable[bytes]:
        usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
        yield _event("message_start", message=self._message([], usage, None))
        yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})

    def piece(self, index: int, chunk: Chunk) -> Iterable[bytes]:
        if chunk.text:
            yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": chunk.text})

    def end(self, result: Result) -> Iterable[bytes]:
        yield _event("content_block_stop", index=0)
        stop = _stop(result.completions[0])
        yield _event("message_delta", delta=stop, usage=_usage(result), **_receipt(result))
        yield _event("message_stop")

    def failed(self, error: RequestError) -> Iterable[bytes]:
        yield _event("error", error=error_body(error)["error"])

    def whole(self, result: Result) -> Any:
        (completion,) = result.completions
        content = [{"type": "text", "text": completion.text}]
        return self._message(content, _usage(result), completion) | _receipt(result)


def _event(name: str, **values: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + to_json({"type": name, **values}) + b"\n\n"


def _stop(completion: Completion | None) -> dict[str, Any]:
    if completion is None:
        return {"stop_reason": None, "stop_sequence": None}
    if isinstance(completion.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_reason}
    reasons = {"length": "max_tokens", "context": "model_context_window_exceeded"}
    return {"stop_reason": reasons.get(completion.finish_reason, "end_turn"), "stop_sequence": None}


def _usage(result: Result) -> dict[str, Any]:
    """Anthropic counts cached tokens apart from the others."""
    return {
        "input_tokens": result.prompt_tokens - result.cached_tokens,
        "cache_read_input_tokens": result.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": result.generated_tokens,
    }


def _receipt(result: Result) -> dict[str, Any]:
    return {} if result.receipts is None else {"x_bitnet_receipt": result.receipts[0]}
