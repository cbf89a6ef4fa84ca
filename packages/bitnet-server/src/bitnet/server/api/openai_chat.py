"""``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bitnet.core import Chunk, Completion
from bitnet.core.engine.results import FinishReason
from bitnet.server.api.answer_logprobs import AnswerLogprobs, answer_logprobs
from bitnet.server.api.known_fields import CHAT
from bitnet.server.api.openai import (
    FINISH,
    MAX_TOP_LOGPROBS,
    NOT_ASKED,
    NOTHING,
    Head,
    asked_prompt_logprobs,
    chat_logprobs,
    failed,
    prompt_logprobs,
    usage,
)
from bitnet.server.api.progress import Progress
from bitnet.server.chat.messages import content_text, openai_messages
from bitnet.server.chat.prompt import ChatPrompt
from bitnet.server.chat.tool_calls import Begin, CallParser, Event, Text
from bitnet.server.chat.tools import Tools, only_form, openai_tools
from bitnet.server.forms.structured import openai_form
from bitnet.server.forms.token_rules import TokenRules
from bitnet.server.generation.job import SSE, Job, Result
from bitnet.server.generation.sampling import MAX_CHOICES, sampling_options, token_limit
from bitnet.server.models.service import Service
from bitnet.server.request.call import to_json
from bitnet.server.request.errors import RequestError, unsupported, wrong
from bitnet.server.request.fields import Fields


def parse(service: Service, fields: Fields) -> Job:
    """Parse a request for an answer to a conversation.

    Raises:
        RequestError: A field is missing, invalid or not supported.
    """
    CHAT.check(fields)
    if (modalities := fields.strings("modalities")) and modalities != ("text",):
        raise unsupported("modalities", "the model writes text only.")
    messages = openai_messages(fields)
    how, most = (
        ChatPrompt.read(fields, messages),
        token_limit(fields, "max_completion_tokens", "max_tokens", "n_predict"),
    )
    wants_logprobs, top = fields.flag("logprobs"), fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top and not wants_logprobs:
        raise wrong("top_logprobs", "needs logprobs to be true.")
    options = sampling_options(
        fields,
        service.model.tokenizer,
        service.preset.sampling,
        max_tokens=most,
        logprobs=(top or 0) if wants_logprobs else None,
        prompt_logprobs=asked_prompt_logprobs(fields),
    )
    options["prediction"] = _predicted(fields)
    options["reasoning_budget"] = service.reasoning_budget(how.thinking)
    tools, template = openai_tools(fields), service.model.chat_template
    answer = ChatAnswer(service, fields, tools)

    def prompts() -> Sequence[Sequence[int]]:
        answer.prompt = service.chat_tokens(messages, tools, how)
        return [answer.prompt]

    return Job(
        prompts=prompts,
        options=options,
        answer=answer,
        n=fields.integer("n", 1, MAX_CHOICES) or 1,
        stream=SSE if fields.flag("stream") else None,
        form=only_form(tools, openai_form(fields), template),
        receipt=fields.flag("x_bitnet_receipt"),
        rules=TokenRules.read(fields),
        include_stop=fields.flag("include_stop_str_in_output"),
    )


def _predicted(fields: Fields) -> str:
    """The text that the answer may resemble; empty: none."""
    given = fields.object("prediction")
    if given is None:
        return ""
    given.require("content")
    given.choice("type", ("content",), "content")
    return content_text(given, "content")


class ChatAnswer:
    """An answer as ``chat.completion`` and ``chat.completion.chunk``.

    Attributes:
        prompt: The prompt's tokens, once they have been made.
    """

    def __init__(self, service: Service, fields: Fields, tools: Tools | None) -> None:
        self._service, self._head = service, Head(service, fields, "chat.completion", "chatcmpl-")
        self._begun: set[int] = set()
        self._tools = tools
        self._parsers: dict[int, CallParser] = {}
        self._logprobs: dict[int, AnswerLogprobs] = {}
        self._progress = Progress(fields)
        self._ids, self._of_prompt = fields.flag("return_token_ids"), asked_prompt_logprobs(fields)
        self._as_ids = fields.flag("return_tokens_as_token_ids")
        self._thoughts = fields.flag("include_reasoning", True)
        self.prompt: Sequence[int] = ()

    def begin(self, prompt_tokens: int) -> Iterable[bytes]:
        self._progress.begin(prompt_tokens)
        return ()

    def piece(self, index: int, chunk: Chunk) -> Iterable[bytes]:
        first_or_last = index not in self._begun or chunk.finish_reason is not None
        if first_or_last or self._ids or chunk.logprobs is not None or self._progress.wanted:
            return self._piece(index, chunk)
        return self._texts(index, chunk)

    def _texts(self, index: int, chunk: Chunk) -> Iterable[bytes]:
        """As :meth:`_piece`, for what most chunks are: texts, whose events are put together from bytes."""
        if chunk.reasoning and self._thoughts:
            text = to_json(chunk.reasoning)
            yield self._head.text_event(".chunk", index, b'{"reasoning_content":%b,"reasoning":%b}' % (text, text))
        if not chunk.text:
            return
        for said in (Text(chunk.text),) if self._tools is None else self._parsed(index, self._tools, chunk):
            if isinstance(said, Text):
                yield self._head.text_event(".chunk", index, b'{"content":%b}' % to_json(said.text))
            else:
                yield self._event(index, _delta(said))

    def _piece(self, index: int, chunk: Chunk) -> Iterable[bytes]:
        if index not in self._begun:
            self._begun.add(index)
            ids = {"prompt_token_ids": self.prompt} if self._ids else {}
            yield self._event(index, {"role": "assistant", "content": ""}, more={**self._progress.usage, **ids})
        deltas = [_reasoning(chunk.reasoning)] if chunk.reasoning and self._thoughts else []
        if self._tools is None:
            deltas += [{"content": chunk.text}] if chunk.text else []
        else:
            deltas += map(_delta, self._parsed(index, self._tools, chunk))
        entries = self._logprobs.setdefault(index, AnswerLogprobs()).add(chunk)
        logprobs = chat_logprobs(self._service, entries, as_ids=self._as_ids) if entries else None
        more = self._progress.add(chunk)
        if chunk.tokens and not deltas and (self._ids or logprobs):
            deltas = [{}]
        for delta in deltas[:-1]:
            yield self._event(index, delta, more=self._progress.usage)
        if deltas:
            of_tokens: dict[str, Any] = {"token_ids": chunk.tokens} if self._ids else {}
            yield self._event(index, deltas[-1], logprobs=logprobs, more=more, **of_tokens)
        if chunk.finish_reason is not None:
            reason = _finish(chunk.finish_reason, self._parsers.get(index))
            yield self._event(index, {}, finish_reason=reason, more=more)

    def _parsed(self, index: int, tools: Tools, chunk: Chunk) -> list[Event]:
        if index not in self._parsers:
            self._parsers[index] = tools.parser(self._service.model.chat_template)
        parser = self._parsers[index]
        return parser.push(chunk.text) + (parser.end() if chunk.finish_reason is not None else [])

    def _event(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: Any = None,
        finish_reason: str | None = None,
        more: Mapping[str, Any] = NOTHING,
        **ids: Any,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason, **ids}
        return self._head.event(".chunk", [choice], more)

    def end(self, result: Result) -> Iterable[bytes]:
        return self._head.last_events(result, ".chunk")

    def failed(self, error: RequestError) -> Iterable[bytes]:
        return failed(error)

    def whole(self, result: Result) -> Any:
        choices = [self._choice(i, completion) for i, completion in enumerate(result.completions)]
        first, more = result.completions[0], dict[str, Any](NOT_ASKED)
        if self._ids:
            more["prompt_token_ids"] = first.prompt_tokens
        if self._of_prompt is not None and first.prompt_logprobs is not None:
            entries = first.prompt_logprobs
            more["prompt_logprobs"] = prompt_logprobs(self._service, first.prompt_tokens, entries, self._of_prompt)
        return self._head.object(choices=choices, usage=usage(result), **more, **self._head.extras(result))

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": completion.text, "refusal": None}
        if completion.reasoning and self._thoughts:
            message |= _reasoning(completion.reasoning)
        parser = None
        if self._tools is not None:
            parser = self._tools.parsed(completion.text, self._service.model.chat_template)
            message["content"] = parser.text
            if parser.calls:
                message["content"] = parser.text or None
                message["tool_calls"] = [
                    {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                    for c in parser.calls
                ]
        logprobs = answer_logprobs(completion)
        return {
            "index": index,
            "message": message,
            "logprobs": None if logprobs is None else chat_logprobs(self._service, logprobs, as_ids=self._as_ids),
            "finish_reason": _finish(completion.finish_reason, parser),
            "token_ids": completion.tokens if self._ids else None,
        }


def _reasoning(text: str) -> dict[str, Any]:
    """A thought under the names of vLLM and DeepSeek, and of OpenRouter and newer vLLM."""
    return {"reasoning_content": text, "reasoning": text}


def _finish(reason: FinishReason, parser: CallParser | None) -> str:
    return "tool_calls" if reason == "stop" and parser is not None and parser.calls else FINISH[reason]


def _delta(event: Event) -> dict[str, Any]:
    """The message delta for a piece of an answer."""
    if isinstance(event, Text):
        return {"content": event.text}
    if isinstance(event, Begin):
        function = {"name": event.name, "arguments": ""}
        return {"tool_calls": [{"index": event.call, "id": event.id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": event.call, "function": {"arguments": event.text}}]}
