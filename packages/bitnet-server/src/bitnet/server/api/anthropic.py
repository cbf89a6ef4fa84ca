"""Anthropic's ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Iterable
from typing import Any

from bitnet.core import Chunk, Completion
from bitnet.server.api.anthropic_conversation import ignored_edits, read_conversation
from bitnet.server.api.known_fields import MESSAGES
from bitnet.server.chat.partial_json import complete_part
from bitnet.server.chat.prompt import ChatPrompt
from bitnet.server.chat.thinking import carried
from bitnet.server.chat.tool_calls import Arguments, Begin, Event, Text, ToolCall
from bitnet.server.chat.tools import Tools, anthropic_tools, only_form, other_tools
from bitnet.server.forms.structured import Form, format_of
from bitnet.server.forms.structured import checked as checked_form
from bitnet.server.generation.job import SSE, Job, Result
from bitnet.server.generation.sampling import MAX_STOPS, checked
from bitnet.server.models.service import Service
from bitnet.server.request.call import Call, to_json
from bitnet.server.request.errors import RequestError
from bitnet.server.request.fields import Fields

CALL = "toolu_"
"""Prefix of the ids of calls."""

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
    """An error in the format of Anthropic's API. One about the context has the words by which Claude Code knows that it
    must shorten the conversation."""
    message = str(error)
    if error.code == "context_length_exceeded":
        lengths = "" if error.lengths is None else "{} tokens > {} maximum; ".format(*error.lengths)
        message = f"prompt is too long: {lengths}{message}"
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def parse(service: Service, fields: Fields) -> Job:
    """Parse a request for an answer to a conversation.

    Raises:
        RequestError: A field is missing, invalid or not supported.
    """
    for name in ("model", "max_tokens", "messages"):
        fields.require(name)
    messages, how = _conversation(fields)
    tools, template = anthropic_tools(fields), service.model.chat_template
    options = {
        "max_tokens": fields.integer("max_tokens", 1),
        "temperature": fields.number("temperature", 0, 1),
        "top_p": fields.number("top_p", 0, 1),
        "top_k": fields.integer("top_k", 0),
        "stop": fields.strings("stop_sequences", MAX_STOPS) or None,
    }
    options["reasoning_budget"] = service.reasoning_budget(how.thinking)
    options = {name: value for name, value in options.items() if value is not None}
    thinking = fields.object("thinking") or Fields({}, "thinking")
    omits = thinking.choice("display", ("summarized", "omitted"), "summarized") == "omitted"
    return Job(
        prompts=lambda: [service.chat_tokens(messages, tools, how)],
        options=checked({"temperature": 1.0, **service.preset.sampling, **options}),
        answer=MessageAnswer(service, tools, omits=omits),
        stream=SSE if fields.flag("stream") else None,
        form=only_form(tools, _form(fields), template),
        receipt=fields.flag("x_bitnet_receipt"),
        ignored=(*other_tools(fields, "custom"), *ignored_edits(fields)),
    )


async def count_tokens(service: Service, call: Call, fields: Fields) -> None:
    (messages, how), tools = await call.read(lambda: (_conversation(fields), anthropic_tools(fields)))
    tokens = await service.shared.in_thread(lambda: service.chat_tokens(messages, tools, how))
    await call.reply({"input_tokens": len(tokens)})


def _conversation(fields: Fields) -> tuple[list[dict[str, Any]], ChatPrompt]:
    MESSAGES.check(fields)
    return read_conversation(fields)


def _form(fields: Fields) -> Form | None:
    """The form requested by ``output_config.format``, or by ``output_format`` of older clients."""
    config = fields.object("output_config") or Fields({}, "output_config")
    form = config.object("format") or fields.object("output_format")
    return None if form is None else checked_form(format_of(form, form), Fields({}))


class MessageAnswer:
    """An answer as ``message`` and the events that build one.

    Args:
        omits: Whether a thought is only in its block's signature.
    """

    def __init__(self, service: Service, tools: Tools | None, *, omits: bool) -> None:
        self._omits, self._thought = omits, ""
        self._service, self._id = service, "msg_" + secrets.token_hex(12)
        self._parser = None if tools is None else tools.parser(service.model.chat_template, CALL)
        self._content: list[dict[str, Any]] = []
        self._open = False  # whether the last block is open

    def _message(self, content: list[Any], usage: dict[str, Any], completion: Completion | None) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._service.names[0],
            "content": content,
            **self._stop(completion),
            "usage": usage,
        }

    def begin(self, prompt_tokens: int) -> Iterable[bytes]:
        usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
        yield _event("message_start", message=self._message([], usage, None))

    def _begin(self, block: dict[str, Any]) -> Iterable[bytes]:
        yield from self._end_block()
        self._content.append(block)
        self._open = True
        yield _event("content_block_start", index=len(self._content) - 1, content_block=block)

    def _end_block(self) -> Iterable[bytes]:
        """The event that closes the open block, if there is one."""
        if self._open:
            self._open = False
            if self._content[-1]["type"] == "thinking":
                self._content[-1]["signature"] = carried(self._thought) if self._omits else signature(self._thought)
                yield self._delta("signature_delta", signature=self._content[-1]["signature"])
            yield _event("content_block_stop", index=len(self._content) - 1)

    def _delta(self, kind: str, **value: str) -> bytes:
        return _event("content_block_delta", index=len(self._content) - 1, delta={"type": kind, **value})

    def piece(self, index: int, chunk: Chunk) -> Iterable[bytes]:
        if chunk.reasoning:
            if not self._open:
                yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
            self._thought += chunk.reasoning
            if not self._omits:
                self._content[-1]["thinking"] += chunk.reasoning
                yield self._delta("thinking_delta", thinking=chunk.reasoning)
        parser = self._parser
        if parser is None:
            events: list[Event] = [Text(chunk.text)] if chunk.text else []
        else:
            events = parser.push(chunk.text) + (parser.end() if chunk.finish_reason is not None else [])
        for event in events:
            if isinstance(event, Arguments):
                yield self._delta("input_json_delta", partial_json=event.text)
            elif isinstance(event, Begin):
                yield from self._begin({"type": "tool_use", "id": event.id, "name": event.name, "input": {}})
            else:
                if not self._open or self._content[-1]["type"] != "text":
                    yield from self._begin({"type": "text", "text": ""})
                self._content[-1]["text"] += event.text
                yield self._delta("text_delta", text=event.text)

    def _end_blocks(self) -> Iterable[bytes]:
        """The events that end the last block; without tools, that is a text, if only an empty one."""
        if self._parser is None and (not self._content or self._content[-1]["type"] != "text"):
            yield from self._begin({"type": "text", "text": ""})
        yield from self._end_block()

    def end(self, result: Result) -> Iterable[bytes]:
        yield from self._end_blocks()
        yield _event("message_delta", delta=self._stop(result.completions[0]), usage=_usage(result), **_receipt(result))
        yield _event("message_stop")

    def failed(self, error: RequestError) -> Iterable[bytes]:
        yield _event("error", error=error_body(error)["error"])

    def whole(self, result: Result) -> Any:
        """What a client makes of the stream, including a call that was cut off."""
        (completion,) = result.completions
        chunk = Chunk(completion.text, (), None, completion.finish_reason, reasoning=completion.reasoning)
        for _ in (*self.begin(0), *self.piece(0, chunk), *self._end_blocks()):
            pass
        calls = iter(() if self._parser is None else self._parser.calls)
        content = [
            block | {"input": _input(next(calls))} if block["type"] == "tool_use" else block for block in self._content
        ]
        return self._message(content, _usage(result), completion) | _receipt(result)

    def _stop(self, completion: Completion | None) -> dict[str, Any]:
        """Why the answer ended, if it has."""
        if completion is None:
            return {"stop_reason": None, "stop_sequence": None}
        if isinstance(completion.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_reason}
        reasons = {"length": "max_tokens", "context": "model_context_window_exceeded"}
        ended = "tool_use" if self._parser is not None and self._parser.calls else "end_turn"
        return {"stop_reason": reasons.get(completion.finish_reason, ended), "stop_sequence": None}


def signature(thought: str) -> str:
    """What clients send back with a thought: a digest of it. It is not checked, as other servers' thoughts may come."""
    return base64.b64encode(hashlib.sha256(thought.encode("utf-8", "surrogatepass")).digest()).decode()


def _event(name: str, /, **values: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + to_json({"type": name, **values}) + b"\n\n"


def _input(call: ToolCall) -> dict[str, Any]:
    """A call's arguments, or those that are complete where it was cut off."""
    values = call.values()
    return complete_part(call.arguments) if values is None else values


def _usage(result: Result) -> dict[str, Any]:
    """Token counts; Anthropic's API counts cached tokens separately."""
    return {
        "input_tokens": result.prompt_tokens - result.cached_tokens,
        "cache_read_input_tokens": result.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": result.generated_tokens,
    }


def _receipt(result: Result) -> dict[str, Any]:
    return {} if result.receipts is None else {"x_bitnet_receipt": result.receipts[0]}
