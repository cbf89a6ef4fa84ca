"""``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bitnet.core import Chunk
from bitnet.server.errors import RequestError, unsupported, wrong
from bitnet.server.fields import Fields
from bitnet.server.generation import SSE, Job, Result
from bitnet.server.messages import openai_messages
from bitnet.server.openai import FINISH, Head, chat_logprobs, event, failed, usage
from bitnet.server.sampling import MAX_CHOICES, sampling_options
from bitnet.server.service import Service
from bitnet.server.structured import openai_form

MAX_TOP_LOGPROBS = 20

REFUSED = {
    "tools": "tools are not implemented yet.",
    "audio": "the model writes text only.",
    "functions": "it is the old name of tools; use tools.",
    "function_call": "it is the old name of tool_choice; use tool_choice.",
    "web_search_options": "this server reaches no web.",
    "prediction": "predicted output is not implemented.",
    "best_of": "use n.",
    "use_beam_search": "beam search is not implemented.",
}


def parse(service: Service, fields: Fields) -> Job:
    """A request for an answer to a conversation.

    Raises:
        RequestError: A field is missing, not what it must be, or not supported.
    """
    service.check_model(fields.text("model"))
    fields.refuse(REFUSED)
    if (modalities := fields.strings("modalities")) and modalities != ("text",):
        raise unsupported("modalities", "the model writes text only.")
    messages = openai_messages(fields)
    most = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    wants_logprobs, top = fields.flag("logprobs"), fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top and not wants_logprobs:
        raise wrong("top_logprobs", "needs logprobs to be true.")
    options = sampling_options(
        fields, max_tokens=fields.integer(most, 1), logprobs=(top or 0) if wants_logprobs else None
    )
    return Job(
        prompts=lambda: [service.chat_tokens(messages)],
        options=options,
        answer=ChatAnswer(service, fields),
        n=fields.integer("n", 1, MAX_CHOICES) or 1,
        stream=SSE if fields.flag("stream") else None,
        form=openai_form(fields),
        receipt=fields.flag("x_bitnet_receipt"),
    )


class ChatAnswer:
    """An answer as ``chat.completion`` and ``chat.completion.chunk``."""

    def __init__(self, service: Service, fields: Fields) -> None:
        self._service, self._head = service, Head(service, fields, "chat.completion", "chatcmpl-")
        self._begun: set[int] = set()

    def begin(self, prompt_tokens: int) -> Iterable[bytes]:
        return ()

    def piece(self, index: int, chunk: Chunk) -> Iterable[bytes]:
        delta: dict[str, Any] = {}
        if index not in self._begun:
            self._begun.add(index)
            delta["role"] = "assistant"
            delta["content"] = ""
        if chunk.text:
            delta["content"] = chunk.text
        logprobs = None if chunk.logprobs is None else chat_logprobs(self._service, chunk.logprobs)
        if delta or (logprobs and logprobs["content"]):
            yield self._event(index, delta, None, logprobs)
        if chunk.finish_reason is not None:
            yield self._event(index, {}, FINISH[chunk.finish_reason], None)

    def _event(self, index: int, delta: dict[str, Any], reason: str | None, logprobs: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return event(self._head.object(".chunk", choices=[choice]))

    def end(self, result: Result) -> Iterable[bytes]:
        return self._head.last_events(result, ".chunk")

    def failed(self, error: RequestError) -> Iterable[bytes]:
        return failed(error)

    def whole(self, result: Result) -> Any:
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "content": c.text, "refusal": None},
                "logprobs": None if c.logprobs is None else chat_logprobs(self._service, c.logprobs),
                "finish_reason": FINISH[c.finish_reason],
            }
            for i, c in enumerate(result.completions)
        ]
        return self._head.object(choices=choices, usage=usage(result), **self._head.extras(result))
