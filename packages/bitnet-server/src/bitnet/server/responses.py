"""OpenAI's ``/v1/responses``, without stored state: each request brings its whole conversation."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from typing import Any

from bitnet.core import Chunk
from bitnet.core.errors import brief
from bitnet.server.call import to_json
from bitnet.server.errors import RequestError, unsupported, wrong
from bitnet.server.fields import Fields
from bitnet.server.generation import SSE, Job, Result
from bitnet.server.messages import ROLES, content_text
from bitnet.server.sampling import checked
from bitnet.server.service import Service
from bitnet.server.structured import checked as checked_form
from bitnet.server.structured import format_of

REFUSED = {
    "previous_response_id": "responses are not stored; send the whole conversation as input.",
    "conversation": "conversations are not stored; send the whole conversation as input.",
    "background": "a response is computed while its client waits.",
    "tools": "tools are not implemented yet.",
    "prompt": "prompts are not stored.",
}


def parse(service: Service, fields: Fields) -> Job:
    """A request for a response.

    Raises:
        RequestError: A field is missing, not what it must be, or not supported.
    """
    service.check_model(fields.text("model"))
    fields.refuse(REFUSED)
    text = fields.object("text")
    form = None if text is None else text.object("format")
    messages = _conversation(fields)
    temperature, top_p = fields.number("temperature", 0, 2), fields.number("top_p", 0, 1)
    options = {
        "max_tokens": fields.integer("max_output_tokens", 1),
        "temperature": 1.0 if temperature is None else temperature,
        "top_p": 1.0 if top_p is None else top_p,
    }
    return Job(
        prompts=lambda: [service.chat_tokens(messages)],
        options=checked(options),
        answer=ResponseAnswer(service, fields, options),
        stream=SSE if fields.flag("stream") else None,
        form=checked_form(None if form is None else format_of(form, form), fields),
        receipt=fields.flag("x_bitnet_receipt"),
    )


def _conversation(fields: Fields) -> list[dict[str, Any]]:
    instructions = fields.text("instructions")
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    fields.require("input")
    given = fields.values["input"]
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise wrong("input", f"is {brief(given)}; it must be a text or a list of items.")
    for item in fields.objects("input") or ():
        if (kind := item.text("type", "message")) != "message":
            raise unsupported(item.name("type"), f"{brief(kind)} is no message.")
        item.require("role")
        role = ROLES[item.choice("role", ("system", "developer", "user", "assistant"), "")]
        messages.append({"role": role, "content": content_text(item, "content")})
    return messages


class ResponseAnswer:
    """An answer as ``response`` and the events that build one."""

    def __init__(self, service: Service, fields: Fields, options: dict[str, Any]) -> None:
        self._number = 0
        self._item = "msg_" + secrets.token_hex(12)
        self._response = {
            "id": "resp_" + secrets.token_hex(12),
            "object": "response",
            "created_at": int(time.time()),
            "model": service.names[0],
            "error": None,
            "incomplete_details": None,
            "instructions": fields.text("instructions"),
            "max_output_tokens": options["max_tokens"],
            "metadata": fields.values.get("metadata") or {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": options["temperature"],
            "text": {"format": (fields.values.get("text") or {}).get("format") or {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": options["top_p"],
            "usage": None,
        }

    def _event(self, name: str, **values: Any) -> bytes:
        body = to_json({"type": name, "sequence_number": self._number, **values})
        self._number += 1
        return b"event: " + name.encode() + b"\ndata: " + body + b"\n\n"

    def _message(self, text: str | None, status: str) -> dict[str, Any]:
        content = [] if text is None else [_part(text)]
        return {"id": self._item, "type": "message", "role": "assistant", "status": status, "content": content}

    def begin(self, prompt_tokens: int) -> Iterable[bytes]:
        running = self._response | {"status": "in_progress", "output": []}
        yield self._event("response.created", response=running)
        yield self._event("response.in_progress", response=running)
        yield self._event("response.output_item.added", output_index=0, item=self._message(None, "in_progress"))
        yield self._event("response.content_part.added", **self._place, part=_part(""))

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item, "output_index": 0, "content_index": 0}

    def piece(self, index: int, chunk: Chunk) -> Iterable[bytes]:
        if chunk.text:
            yield self._event("response.output_text.delta", **self._place, delta=chunk.text, logprobs=[])

    def end(self, result: Result) -> Iterable[bytes]:
        response = self.whole(result)
        (item,) = response["output"]
        (part,) = item["content"]
        yield self._event("response.output_text.done", **self._place, text=part["text"], logprobs=[])
        yield self._event("response.content_part.done", **self._place, part=part)
        yield self._event("response.output_item.done", output_index=0, item=item)
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: RequestError) -> Iterable[bytes]:
        code = error.code or "server_error"
        problem = {"code": code, "message": str(error)}
        yield self._event(
            "response.failed", response=self._response | {"status": "failed", "output": [], "error": problem}
        )

    def whole(self, result: Result) -> Any:
        (completion,) = result.completions
        complete = completion.finish_reason not in ("length", "context")
        status = "completed" if complete else "incomplete"
        receipt = {} if result.receipts is None else {"x_bitnet_receipt": result.receipts[0]}
        return {
            **self._response,
            "status": status,
            "incomplete_details": None if complete else {"reason": "max_output_tokens"},
            "output": [self._message(completion.text, status)],
            "usage": {
                "input_tokens": result.prompt_tokens,
                "input_tokens_details": {"cached_tokens": result.cached_tokens},
                "output_tokens": result.generated_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": result.prompt_tokens + result.generated_tokens,
            },
            **receipt,
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
