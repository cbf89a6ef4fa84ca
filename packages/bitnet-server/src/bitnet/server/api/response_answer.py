"""Formats an answer as a response of OpenAI's API, and as the events that build one."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from bitnet.core import Chunk
from bitnet.core.engine.sampling import TokenLogprob
from bitnet.server.api.answer_logprobs import AnswerLogprobs, answer_logprobs
from bitnet.server.api.openai import chat_logprobs, read_metadata
from bitnet.server.api.response_items import add_call
from bitnet.server.chat.partial_json import complete_part
from bitnet.server.chat.thinking import carried
from bitnet.server.chat.tool_calls import Arguments, Begin, Event, Text, ToolCall
from bitnet.server.chat.tools import INPUT, Tools, made_call
from bitnet.server.generation.job import Result
from bitnet.server.models.service import Service
from bitnet.server.request.call import to_json
from bitnet.server.request.errors import RequestError
from bitnet.server.request.fields import Fields

THOUGHTS = "reasoning.encrypted_content"
"""Asks for thoughts as a client keeps them without reading them."""


class Kept(NamedTuple):
    """What is stored with a response: the key that owns it, the conversation before it, and the items of its input."""

    owner: bytes
    history: Sequence[dict[str, Any]]
    items: Sequence[dict[str, Any]]


class ResponseAnswer:
    """An answer as ``response`` and the events that build one.

    Args:
        keep: What is stored with it; None: it is not stored.
    """

    def __init__(
        self,
        service: Service,
        fields: Fields,
        options: dict[str, Any],
        tools: Tools | None,
        keep: Kept | None,
    ) -> None:
        self._service, self._stored, self._keep = service, service.shared.stored, keep
        self._logprobs, self._entries = AnswerLogprobs(), list[TokenLogprob]()
        self._number = 0
        self._parser = None if tools is None else tools.parser(service.model.chat_template)
        self._items: list[dict[str, Any]] = []
        asked = (fields.object("reasoning") or Fields({})).values
        self._custom = frozenset[str]() if tools is None else tools.custom
        self._carries = THOUGHTS in fields.strings("include")
        self._summarised = (asked.get("summary") or asked.get("generate_summary")) is not None
        self._open = False  # whether the last item is open
        self._arguments = ""  # of the last call
        self._response = {
            "id": "resp_" + secrets.token_hex(12),
            "object": "response",
            "created_at": int(time.time()),
            "model": service.names[0],
            "background": fields.flag("background"),
            "error": None,
            "incomplete_details": None,
            "instructions": fields.text("instructions"),
            "max_output_tokens": options["max_tokens"],
            "metadata": read_metadata(fields),
            "parallel_tool_calls": fields.flag("parallel_tool_calls", True),
            "reasoning": fields.values.get("reasoning") or {"effort": None, "summary": None},
            "previous_response_id": fields.text("previous_response_id"),
            "store": keep is not None,
            "temperature": options["temperature"],
            "text": {"format": (fields.values.get("text") or {}).get("format") or {"type": "text"}},
            "tool_choice": fields.values.get("tool_choice") or "auto",
            "tools": fields.values.get("tools") or [],
            "top_logprobs": fields.integer("top_logprobs") or 0,
            "top_p": options["top_p"],
            "usage": None,
        }

    def _event(self, name: str, /, **values: Any) -> bytes:
        body = to_json({"type": name, "sequence_number": self._number, **values})
        self._number += 1
        return b"event: " + name.encode() + b"\ndata: " + body + b"\n\n"

    def begin(self, prompt_tokens: int) -> Iterable[bytes]:
        running = self._response | {"status": "in_progress", "output": []}
        yield self._event("response.created", response=running)
        yield self._event("response.in_progress", response=running)

    def piece(self, index: int, chunk: Chunk) -> Iterable[bytes]:
        if chunk.reasoning:
            yield from self._thought(chunk.reasoning)
        parser = self._parser
        events: list[Event] = [Text(chunk.text)] if chunk.text else []
        if parser is not None:
            events = parser.push(chunk.text) + (parser.end() if chunk.finish_reason is not None else [])
        self._entries += self._logprobs.add(chunk) or ()
        yield from self._built(events)

    @property
    def _thought_names(self) -> tuple[str, str, str]:
        """The field of an item that holds the thought, and the names of the events for its text and its part."""
        if self._summarised:
            return "summary", "reasoning_summary_text", "reasoning_summary_part"
        return "content", "reasoning_text", "content_part"

    def _thought(self, text: str) -> Iterable[bytes]:
        """A piece of the thought: an item's content, or its summary if the request asks for one.

        Nobody shortens the thought for a summary: it is the whole.
        """
        held, name, part_name = self._thought_names
        if not self._open:
            item = {"id": "rs_" + secrets.token_hex(12), "type": "reasoning", "status": "in_progress", "summary": []}
            yield from self._begin(item)
            self._items[-1][held] = [{"type": "summary_text" if self._summarised else "reasoning_text", "text": ""}]
            part = dict(self._items[-1][held][0])
            yield self._event(f"response.{part_name}.added", **self._place, **{f"{held}_index": 0}, part=part)
        self._items[-1][held][0]["text"] += text
        yield self._event(f"response.{name}.delta", **self._place, **{f"{held}_index": 0}, delta=text)

    def _built(self, events: Iterable[Event]) -> Iterable[bytes]:
        for event in events:
            if isinstance(event, Text):
                if not self._open or self._items[-1]["type"] != "message":
                    yield from self._begin_message()
                (part,), found = self._items[-1]["content"], self._taken_logprobs()
                part["text"] += event.text
                part["logprobs"] += found
                yield self._event("response.output_text.delta", **self._part_place, delta=event.text, logprobs=found)
            elif isinstance(event, Arguments):
                self._entries = []  # those of calls are not listed
                self._arguments += event.text
                if self._items[-1]["type"] == "function_call":
                    self._items[-1]["arguments"] += event.text
                    yield self._event("response.function_call_arguments.delta", **self._place, delta=event.text)
            else:
                yield from self._begin_call(event)

    def _begin(self, item: dict[str, Any]) -> Iterable[bytes]:
        yield from self._close("completed")
        self._items.append(item)
        self._open = True
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)

    def _begin_message(self) -> Iterable[bytes]:
        item: dict[str, Any] = {"id": "msg_" + secrets.token_hex(12), "type": "message", "role": "assistant"}
        yield from self._begin({**item, "status": "in_progress", "content": []})
        self._items[-1]["content"].append(_part())
        yield self._event("response.content_part.added", **self._part_place, part=_part())

    def _taken_logprobs(self) -> list[Any]:
        """Log-probabilities of the tokens since the last text; they are given once."""
        entries, self._entries = self._entries, []
        found: list[Any] = chat_logprobs(self._service, entries)["content"]
        return found

    def _begin_call(self, begin: Begin) -> Iterable[bytes]:
        self._entries = []
        custom = begin.name in self._custom
        kind, holder = ("custom_tool_call", "input") if custom else ("function_call", "arguments")
        id = ("ctc_" if custom else "fc_") + secrets.token_hex(12)
        item = {"id": id, "type": kind, "status": "in_progress", "call_id": begin.id, "name": begin.name, holder: ""}
        yield from self._begin(item)
        self._arguments = ""

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    @property
    def _part_place(self) -> dict[str, Any]:
        return {**self._place, "content_index": 0}

    def _close(self, status: str) -> Iterable[bytes]:
        """The events that close the open item, if there is one."""
        if not self._open:
            return
        self._open = False
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "message":
            (part,) = item["content"]
            part["logprobs"] += self._taken_logprobs()
            said = {"text": part["text"], "logprobs": part["logprobs"]}
            yield self._event("response.output_text.done", **self._part_place, **said)
            yield self._event("response.content_part.done", **self._part_place, part=part)
        elif item["type"] == "reasoning":
            held, name, part_name = self._thought_names
            (part,) = item[held]
            place = {**self._place, f"{held}_index": 0}
            yield self._event(f"response.{name}.done", **place, text=part["text"])
            yield self._event(f"response.{part_name}.done", **place, part=part)
            if self._carries:
                item["encrypted_content"] = carried(part["text"])
        elif item["type"] == "custom_tool_call":
            item["input"] = custom_input(self._arguments)
            yield self._event("response.custom_tool_call_input.delta", **self._place, delta=item["input"])
            yield self._event("response.custom_tool_call_input.done", **self._place, input=item["input"])
        else:
            values = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **self._place, **values)
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def end(self, result: Result) -> Iterable[bytes]:
        if not self._items or self._items[-1]["type"] == "reasoning":
            yield from self._begin_message()
        status = _status(result)
        yield from self._close(status)
        response = self._ended(result)
        if self._keep is not None:
            self._store(response, self._answer())
        yield self._event(f"response.{status}", response=response)

    def failed(self, error: RequestError) -> Iterable[bytes]:
        yield self._event("response.failed", response=self._failed(error))

    def _failed(self, error: RequestError) -> dict[str, Any]:
        problem = {"code": error.code or "server_error", "message": str(error)}
        return self._response | {"status": "failed", "output": [], "error": problem}

    @property
    def id(self) -> str:
        """The response's id."""
        return str(self._response["id"])

    def begun(self) -> dict[str, Any]:
        """The response before anything of it has been computed; it is stored."""
        response = self._response | {"status": "in_progress", "output": []}
        self._store(response, (), new=True)
        return response | {"status": "queued"}

    def stopped(self, error: RequestError) -> None:
        """Store that it failed in the background."""
        self._store(self._failed(error), ())

    def _store(self, response: dict[str, Any], answer: Sequence[dict[str, Any]], *, new: bool = False) -> None:
        """Store a state of the response, unless it was begun in the background and is no longer in progress."""
        assert self._keep is not None
        owner, history, items = self._keep
        if response["background"] and not new:
            before = self._stored.get(owner, self.id)
            if before is None or before.response["status"] != "in_progress":
                return
        self._stored.put(owner, response, [*history, *answer], items)

    def whole(self, result: Result) -> Any:
        (completion,) = result.completions
        entries = answer_logprobs(completion)
        listed = None if entries is None else tuple(entries)
        text = Chunk(completion.text, (), listed, completion.finish_reason, reasoning=completion.reasoning)
        for _ in (*self.piece(0, text), *self.end(result)):
            pass
        return self._ended(result)

    def _answer(self) -> list[dict[str, Any]]:
        """The answer's messages, as conversations hold them."""
        messages: list[dict[str, Any]] = []
        for item in self._items:
            if item["type"] == "reasoning":
                continue
            if item["type"] == "message":
                messages.append({"role": "assistant", "content": item["content"][0]["text"]})
            elif item["type"] == "custom_tool_call":
                add_call(messages, made_call(item["call_id"], item["name"], {INPUT: item["input"]}))
            else:
                call = ToolCall(item["call_id"], item["name"], item["arguments"])
                values = call.values()
                add_call(messages, made_call(call.id, call.name, call.arguments if values is None else values))
        if self._items[0]["type"] == "reasoning":
            messages[0]["reasoning_content"] = self._items[0][self._thought_names[0]][0]["text"]
        return messages

    def _ended(self, result: Result) -> dict[str, Any]:
        status = _status(result)
        receipt = {} if result.receipts is None else {"x_bitnet_receipt": result.receipts[0]}
        return {
            **self._response,
            "status": status,
            "incomplete_details": None if status == "completed" else {"reason": "max_output_tokens"},
            "output": self._items,
            "usage": {
                "input_tokens": result.prompt_tokens,
                "input_tokens_details": {"cached_tokens": result.cached_tokens},
                "output_tokens": result.generated_tokens,
                "output_tokens_details": {"reasoning_tokens": result.reasoning_tokens},
                "total_tokens": result.prompt_tokens + result.generated_tokens,
            },
            **receipt,
        }


def _status(result: Result) -> str:
    return "incomplete" if result.completions[0].finish_reason in ("length", "context") else "completed"


def _part() -> dict[str, Any]:
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def custom_input(arguments: str) -> str:
    """The text for a custom tool in the arguments that the model wrote; if they are no object with it, they are it."""
    given = complete_part(arguments).get(INPUT)
    return given if isinstance(given, str) else arguments
