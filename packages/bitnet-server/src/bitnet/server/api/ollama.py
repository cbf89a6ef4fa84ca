"""Ollama's ``/api/chat`` and ``/api/generate``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from bitnet.core import Chunk, Completion
from bitnet.core.engine import TokenLogprob
from bitnet.core.errors import InvalidInputError, brief
from bitnet.core.text.prompt import ChatTokens
from bitnet.server.api.answer_logprobs import AnswerLogprobs, answer_logprobs
from bitnet.server.api.known_fields import OLLAMA_CHAT, OLLAMA_GENERATE, OLLAMA_OPTIONS, Known
from bitnet.server.api.openai import chat_logprobs
from bitnet.server.chat.messages import openai_messages
from bitnet.server.chat.prompt import ChatPrompt
from bitnet.server.chat.thinking import ollama_thinking
from bitnet.server.chat.tool_calls import CallParser, Text, ToolCall
from bitnet.server.chat.tools import Tools, only_form, openai_tools
from bitnet.server.forms.structured import ollama_form
from bitnet.server.generation.job import NDJSON, Job, Result, run
from bitnet.server.generation.sampling import MAX_SEED, MAX_STOPS, checked
from bitnet.server.models.service import Service
from bitnet.server.models.state import State
from bitnet.server.request.call import Call, to_json
from bitnet.server.request.errors import RequestError, wrong
from bitnet.server.request.fields import Fields

MAX_CONTEXT, MAX_TOP_LOGPROBS = 1_000_000, 20
_DURATION = re.compile(r"[+-]?(\d+(\.\d*)?(ns|us|µs|ms|s|m|h)?)+")

DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
"""Ollama's defaults, except that its repetition penalty is off unless requested."""


OLLAMA_NAMES = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}
"""Options that Ollama's API calls otherwise than the engine."""


def error_body(error: RequestError) -> dict[str, Any]:
    """An error in the format of Ollama's API."""
    return {"error": str(error)}


def options_of(given: Fields) -> dict[str, Any]:
    """The options of Ollama's names that are given, as the engine has them.

    Raises:
        RequestError: One is out of its range, or not supported.
    """
    OLLAMA_OPTIONS.check(given)
    most = given.integer("num_predict", -2)
    seed, top_k = given.integer("seed", -MAX_SEED, MAX_SEED), given.integer("top_k", -1)
    found: dict[str, Any] = {
        "temperature": given.number("temperature", 0, 100),
        "top_k": None if top_k is None else max(0, top_k),
        "top_p": given.number("top_p", 0, 1),
        "min_p": given.number("min_p", 0, 1),
        "repetition_penalty": given.number("repeat_penalty", 1e-3, 1e3),
        "presence_penalty": given.number("presence_penalty", -2, 2),
        "frequency_penalty": given.number("frequency_penalty", -2, 2),
        "stop": given.strings("stop", MAX_STOPS) or None,
        "seed": seed % 2**63 if seed is not None else None,
    }
    options = {name: value for name, value in found.items() if value is not None}
    if most is not None:
        options["max_tokens"] = most if most > 0 else None
    return options


def _options(fields: Fields, preset: Mapping[str, Any]) -> dict[str, Any]:
    given = options_of(fields.object("options") or Fields({}, "options"))
    top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS) or 0
    return {
        "max_tokens": None,
        "logprobs": top if fields.flag("logprobs") else None,
        **DEFAULTS,
        **preset,
        **given,
    }


def _job(
    service: Service,
    fields: Fields,
    tokens: Callable[[], list[int]],
    answer: OllamaAnswer,
    how: ChatPrompt,
    tools: Tools | None = None,
) -> Job:
    return Job(
        prompts=lambda: [tokens()],
        options=checked(
            {**_options(fields, service.preset.sampling), "reasoning_budget": service.reasoning_budget(how.thinking)}
        ),
        answer=answer,
        stream=NDJSON if fields.flag("stream", True) else None,
        form=only_form(tools, ollama_form(fields), service.model.chat_template),
        receipt=fields.flag("x_bitnet_receipt"),
    )


async def chat(service: Service, call: Call, fields: Fields) -> None:
    """``/api/chat``; without messages it only requests that the model be loaded or unloaded.

    Raises:
        RequestError: A field is missing, not what it must be, or not supported.
    """
    fields.require("model")
    OLLAMA_CHAT.check(fields)
    job = (lambda: _chat_job(service, call, fields)) if _has_messages(fields) else None
    await _answer(service, call, fields, job, _message(""))


async def generate(service: Service, call: Call, fields: Fields) -> None:
    """``/api/generate``; without a prompt it only requests that the model be loaded or unloaded.

    Raises:
        RequestError: A field is missing, not what it must be, or not supported.
    """
    fields.require("model")
    OLLAMA_GENERATE.check(fields)
    job = (lambda: _generate_job(service, call, fields, prompt)) if (prompt := fields.text("prompt")) else None
    await _answer(service, call, fields, job, {"response": ""})


async def _answer(
    service: Service, call: Call, fields: Fields, job: Callable[[], Job] | None, nothing: dict[str, Any]
) -> None:
    """Answer a job, if there is one; the model has been loaded. Unload it if ``keep_alive`` is 0."""
    unloads = _unloads(fields)
    if job is not None:
        await run(service, call, await call.read(job))
        if unloads and service.reloads:
            service.owner.unload(service)
        return
    if unloads:
        service.owner.unload(service)
    await call.reply(_line(service.names[0], nothing, True, done_reason="unload" if unloads else "load"))


async def chat_unloaded(state: State, call: Call, fields: Fields) -> bool:
    """Answer a ``/api/chat`` that only asks to unload a model which is not loaded; return whether it was one.

    Raises:
        RequestError: As for :func:`chat`.
    """
    return not _has_messages(fields) and await _unloaded(state, call, fields, OLLAMA_CHAT, _message(""))


async def generate_unloaded(state: State, call: Call, fields: Fields) -> bool:
    """As :func:`chat_unloaded`, for ``/api/generate``."""
    return not fields.text("prompt") and await _unloaded(state, call, fields, OLLAMA_GENERATE, {"response": ""})


async def _unloaded(state: State, call: Call, fields: Fields, known: Known, nothing: dict[str, Any]) -> bool:
    fields.require("model")
    known.check(fields)
    one, names, _ = await state.pool.find(fields.text("model"))
    if one.loaded or one.loading is not None or not _unloads(fields):
        return False
    await call.reply(_line(names[0], nothing, True, done_reason="unload"))
    return True


def _has_messages(fields: Fields) -> bool:
    return "messages" in fields and fields.values["messages"] != []


def _unloads(fields: Fields) -> bool:
    """Whether ``keep_alive`` asks for the model to be unloaded: 0, as a number or a duration."""
    value = fields.values.get("keep_alive")
    if isinstance(value, str) and _DURATION.fullmatch(value):
        return not any(digit in value for digit in "123456789")
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value == 0
    raise wrong("keep_alive", f"is {brief(value)}; it must be a number of seconds, or a duration such as 5m.")


def _chat_job(service: Service, call: Call, fields: Fields) -> Job:
    for message in fields.objects("messages") or ():
        message.refuse({"images": OLLAMA_GENERATE.refused["images"].why})
    messages, tools = openai_messages(fields), openai_tools(fields)
    how = ChatPrompt(thinking=ollama_thinking(fields, service.model.chat_template))
    answer = OllamaAnswer(service, _message, tools, load=call.load_seconds)
    return _job(service, fields, lambda: service.chat_tokens(messages, tools, how), answer, how, tools)


def _message(text: str, calls: Sequence[ToolCall] = (), thought: str = "") -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text, **_thought(thought)}
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "function": {"index": i, "name": call.name, "arguments": call.values() or {}}}
            for i, call in enumerate(calls)
        ]
    return {"message": message}


def _thought(text: str) -> dict[str, str]:
    return {"thinking": text} if text else {}


def _generate_job(service: Service, call: Call, fields: Fields, prompt: str) -> Job:
    """The prompt in the model's chat template, after an earlier answer's ``context``; or unchanged, with ``raw``."""
    system, model, before = fields.text("system"), service.model, fields.tokens("context", MAX_CONTEXT) or []
    raw, how = fields.flag("raw"), ChatPrompt(thinking=ollama_thinking(fields, model.chat_template))

    def tokens() -> list[int]:
        if raw or model.chat_template is None:
            if system:
                raise InvalidInputError("system needs a chat template; raw, or a model without one, has none.")
            made = service.text_tokens(prompt)
        else:
            first = [{"role": "system", "content": system}] if system else []
            made = service.chat_tokens([*first, {"role": "user", "content": prompt}], None, how)
        begins = before and made[:1] == [model.tokenizer.bos_id]
        return ChatTokens([*before, *made[1 if begins else 0 :]], getattr(made, "thinking", None))

    answer = OllamaAnswer(
        service,
        lambda text, calls, thought: {"response": text, **_thought(thought)},
        None,
        load=call.load_seconds,
        context=not raw,
    )
    return _job(service, fields, tokens, answer, how)


def _line(name: str, said: dict[str, Any], done: bool, **values: Any) -> dict[str, Any]:
    return {"model": name, "created_at": _now(), **said, "done": done, **values}


Wrap = Callable[[str, Sequence[ToolCall], str], dict[str, Any]]
"""Formats the answer's text, calls and thought as the fields of a line."""


class OllamaAnswer:
    """An answer as lines of JSON, the last of which has ``done`` and the times.

    Args:
        load: Seconds that the request waited for its model to be loaded.
        context: Whether the last line has the tokens of prompt and answer, which a later request may send back.
    """

    def __init__(
        self, service: Service, wrap: Wrap, tools: Tools | None, *, load: float, context: bool = False
    ) -> None:
        self._service, self._wrap = service, wrap
        self._load, self._context = load, context
        self._tools, self._template = tools, service.model.chat_template
        self._parser = None if tools is None else tools.parser(self._template)
        self._entries = AnswerLogprobs()

    def _line(
        self, text: str, done: bool, calls: Sequence[ToolCall] = (), thought: str = "", **values: Any
    ) -> dict[str, Any]:
        return _line(self._service.names[0], self._wrap(text, calls, thought), done, **values)

    def begin(self, prompt_tokens: int) -> Iterable[bytes]:
        return ()

    def piece(self, index: int, chunk: Chunk) -> Iterable[bytes]:
        text, parser = chunk.text, self._parser
        if parser is not None:
            events = parser.push(text) + (parser.end() if chunk.finish_reason is not None else [])
            text = "".join(event.text for event in events if isinstance(event, Text))
        entries = self._entries.add(chunk)
        if text or chunk.reasoning or entries:
            logprobs = self._logprobs(entries)
            yield to_json(self._line(text, False, thought=chunk.reasoning, **logprobs)) + b"\n"

    def end(self, result: Result) -> Iterable[bytes]:
        """The calls, which this API does not stream in pieces, and the last line."""
        if calls := _whole_calls(self._parser):
            yield to_json(self._line("", False, calls)) + b"\n"
        yield to_json(self._line("", True, **self._end(result))) + b"\n"

    def failed(self, error: RequestError) -> Iterable[bytes]:
        yield to_json(error_body(error)) + b"\n"

    def whole(self, result: Result) -> Any:
        (completion,) = result.completions
        parser = None if self._tools is None else self._tools.parsed(completion.text, self._template)
        text = completion.text if parser is None else parser.text
        ends = {**self._logprobs(answer_logprobs(completion)), **self._end(result)}
        return self._line(text, True, _whole_calls(parser), completion.reasoning, **ends)

    def _logprobs(self, entries: Sequence[TokenLogprob] | None) -> dict[str, Any]:
        return {} if entries is None else {"logprobs": chat_logprobs(self._service, entries)["content"]}

    def _end(self, result: Result) -> dict[str, Any]:
        completion: Completion = result.completions[0]
        timings = completion.timings
        first = timings.total if timings.first_token is None else timings.first_token
        seconds = {
            "total_duration": self._load + timings.total,
            "load_duration": self._load,
            "prompt_eval_duration": first - timings.started,
            "eval_duration": timings.total - first,
        }
        found: dict[str, Any] = {} if result.receipts is None else {"x_bitnet_receipt": result.receipts[0]}
        if self._context:
            stop = completion.stop_reason
            found["context"] = [
                *completion.prompt_tokens,
                *completion.tokens,
                *([stop] if isinstance(stop, int) else []),
            ]
        return {
            "done_reason": "length" if completion.finish_reason in ("length", "context") else "stop",
            "prompt_eval_count": timings.prompt_tokens,
            "eval_count": len(completion.tokens),
            **{name: int(value * 1e9) for name, value in seconds.items()},
            **found,
        }


def _whole_calls(parser: CallParser | None) -> list[ToolCall]:
    """The complete calls."""
    return [] if parser is None else [call for call in parser.calls if call.values() is not None]


def _now() -> str:
    return datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
