"""Ollama's ``/api/chat``, ``/api/generate``, ``/api/tags``, ``/api/ps``, ``/api/show`` and ``/api/version``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from typing import Any

from bitnet.core import Chunk, Completion, __version__
from bitnet.core.errors import InvalidInputError
from bitnet.server.call import Call, to_json
from bitnet.server.errors import RequestError
from bitnet.server.fields import Fields
from bitnet.server.generation import NDJSON, Job, Result, run
from bitnet.server.host import Host
from bitnet.server.messages import openai_messages
from bitnet.server.sampling import MAX_SEED, MAX_STOPS, checked
from bitnet.server.service import Service
from bitnet.server.slot import Slot
from bitnet.server.structured import ollama_form
from bitnet.server.tool_calls import CallParser, Text, ToolCall
from bitnet.server.tools import Tools, only_form, openai_tools

REFUSED = {
    "images": "the model reads text only.",
    "suffix": "the model continues a text; it does not fill gaps.",
    "template": "the model's own chat template is used; with raw, none.",
    "context": "send the conversation to /api/chat.",
    "think": "the model does not think aloud apart from its answer.",
}
REFUSED_OPTIONS = {"mirostat": "use temperature, top_k, top_p and min_p.", "typical_p": "use top_p or min_p."}

DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
"""Ollama's defaults, except that its repetition penalty is off unless requested."""


def error_body(error: RequestError) -> dict[str, Any]:
    """An error in the format of Ollama's API."""
    return {"error": str(error)}


def _options(fields: Fields) -> dict[str, Any]:
    given = fields.object("options") or Fields({}, "options")
    given.refuse(REFUSED_OPTIONS, neutral=(None, 0, 1, 1.0))
    most = given.integer("num_predict", -2)
    seed = given.integer("seed", -MAX_SEED, MAX_SEED)
    found: dict[str, Any] = {
        "temperature": given.number("temperature", 0, 100),
        "top_k": given.integer("top_k", 0),
        "top_p": given.number("top_p", 0, 1),
        "min_p": given.number("min_p", 0, 1),
        "repetition_penalty": given.number("repeat_penalty", 1e-3, 1e3),
        "presence_penalty": given.number("presence_penalty", -2, 2),
        "frequency_penalty": given.number("frequency_penalty", -2, 2),
        "stop": given.strings("stop", MAX_STOPS) or None,
        "seed": seed % 2**63 if seed is not None else None,
    }
    chosen = DEFAULTS | {name: value for name, value in found.items() if value is not None}
    return {"max_tokens": most if most is not None and most > 0 else None, **chosen}


def _job(
    service: Service, fields: Fields, tokens: Callable[[], list[int]], wrap: Wrap, tools: Tools | None = None
) -> Job:
    return Job(
        prompts=lambda: [tokens()],
        options=checked(_options(fields)),
        answer=OllamaAnswer(service, wrap, tools),
        stream=NDJSON if fields.flag("stream", True) else None,
        form=only_form(tools, ollama_form(fields), service.model.chat_template),
        receipt=fields.flag("x_bitnet_receipt"),
    )


async def chat(service: Service, call: Call, fields: Fields) -> None:
    """``/api/chat``; without messages it only requests that the model be loaded, which it is by now.

    Raises:
        RequestError: A field is missing, not what it must be, or not supported.
    """
    _check(fields)
    if "messages" in fields and fields.values["messages"] != []:
        await run(service, call, await call.read(lambda: _chat_job(service, fields)))
    else:
        await call.reply(_line(service, _message(""), True, done_reason="load"))


async def generate(service: Service, call: Call, fields: Fields) -> None:
    """``/api/generate``; without a prompt it only requests that the model be loaded, which it is by now.

    Raises:
        RequestError: A field is missing, not what it must be, or not supported.
    """
    _check(fields)
    if prompt := fields.text("prompt"):
        await run(service, call, await call.read(lambda: _generate_job(service, fields, prompt)))
    else:
        await call.reply(_line(service, {"response": ""}, True, done_reason="load"))


def _chat_job(service: Service, fields: Fields) -> Job:
    for message in fields.objects("messages") or ():
        message.refuse({"images": REFUSED["images"]})
    messages, tools = openai_messages(fields), openai_tools(fields)
    return _job(service, fields, lambda: service.chat_tokens(messages, tools), _message, tools)


def _message(text: str, calls: Sequence[ToolCall] = ()) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "function": {"index": i, "name": call.name, "arguments": call.values() or {}}}
            for i, call in enumerate(calls)
        ]
    return {"message": message}


def _generate_job(service: Service, fields: Fields, prompt: str) -> Job:
    """The prompt in the model's chat template, or unchanged with ``raw``."""
    system, model = fields.text("system"), service.model

    def tokens() -> list[int]:
        if fields.flag("raw") or model.chat_template is None:
            if system:
                raise InvalidInputError("system needs a chat template; raw, or a model without one, has none.")
            return service.text_tokens(prompt)
        before = [{"role": "system", "content": system}] if system else []
        return service.chat_tokens([*before, {"role": "user", "content": prompt}])

    return _job(service, fields, tokens, lambda text, calls: {"response": text})


def _check(fields: Fields) -> None:
    fields.require("model")
    fields.refuse(REFUSED)


def _line(service: Service, said: dict[str, Any], done: bool, **values: Any) -> dict[str, Any]:
    return {"model": service.names[0], "created_at": _now(), **said, "done": done, **values}


Wrap = Callable[[str, Sequence[ToolCall]], dict[str, Any]]
"""Formats the answer's text and calls as the fields of a line."""


class OllamaAnswer:
    """An answer as lines of JSON, the last of which has ``done`` and the times."""

    def __init__(self, service: Service, wrap: Wrap, tools: Tools | None) -> None:
        self._service, self._wrap = service, wrap
        self._tools, self._template = tools, service.model.chat_template
        self._parser = None if tools is None else tools.parser(self._template)

    def _line(self, text: str, done: bool, calls: Sequence[ToolCall] = (), **values: Any) -> dict[str, Any]:
        return _line(self._service, self._wrap(text, calls), done, **values)

    def begin(self, prompt_tokens: int) -> Iterable[bytes]:
        return ()

    def piece(self, index: int, chunk: Chunk) -> Iterable[bytes]:
        text, parser = chunk.text, self._parser
        if parser is not None:
            events = parser.push(text) + (parser.end() if chunk.finish_reason is not None else [])
            text = "".join(event.text for event in events if isinstance(event, Text))
        if text:
            yield to_json(self._line(text, False)) + b"\n"

    def end(self, result: Result) -> Iterable[bytes]:
        """The calls, which this API does not stream in pieces, and the last line."""
        if calls := _whole_calls(self._parser):
            yield to_json(self._line("", False, calls)) + b"\n"
        yield to_json(self._line("", True, **_end(result))) + b"\n"

    def failed(self, error: RequestError) -> Iterable[bytes]:
        yield to_json(error_body(error)) + b"\n"

    def whole(self, result: Result) -> Any:
        text = result.completions[0].text
        parser = None if self._tools is None else self._tools.parsed(text, self._template)
        return self._line(text if parser is None else parser.text, True, _whole_calls(parser), **_end(result))


def _whole_calls(parser: CallParser | None) -> list[ToolCall]:
    """The complete calls."""
    return [] if parser is None else [call for call in parser.calls if call.values() is not None]


def _end(result: Result) -> dict[str, Any]:
    completion: Completion = result.completions[0]
    timings = completion.timings
    first = timings.total if timings.first_token is None else timings.first_token
    seconds = {
        "total_duration": timings.total,
        "load_duration": 0.0,
        "prompt_eval_duration": first - timings.started,
        "eval_duration": timings.total - first,
    }
    receipt = {} if result.receipts is None else {"x_bitnet_receipt": result.receipts[0]}
    return {
        "done_reason": "length" if completion.finish_reason in ("length", "context") else "stop",
        "prompt_eval_count": timings.prompt_tokens,
        "eval_count": len(completion.tokens),
        **{name: int(value * 1e9) for name, value in seconds.items()},
        **receipt,
    }


def _now() -> str:
    return datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")


def _details(service: Service | None) -> dict[str, Any]:
    """A model's details, known only if it is loaded."""
    family = "" if service is None else service.model.config.architecture
    return {"parent_model": "", "format": "gguf", "family": family, "families": [family] if family else []}


def _entry(slot: Slot, name: str) -> dict[str, Any]:
    path = slot.source.path
    stat = path.stat() if path.exists() else None
    modified = datetime.fromtimestamp(0 if stat is None else stat.st_mtime, timezone.utc).isoformat()
    return {
        "name": name,
        "model": name,
        "modified_at": modified.replace("+00:00", "Z"),
        "size": 0 if stat is None else stat.st_size,
        "details": _details(slot.service),
    }


async def tags(host: Host, call: Call) -> None:
    await call.reply({"models": [_entry(slot, name) for slot in host.slots for name in slot.source.names]})


async def ps(host: Host, call: Call) -> None:
    """The models that are loaded."""
    loaded = [slot for slot in host.slots if slot.loaded]
    await call.reply({"models": [_entry(slot, slot.source.names[0]) | {"size": slot.size} for slot in loaded]})


def model_field(fields: Fields) -> str:
    """The field of ``/api/show`` that names the model: ``model``, or ``name`` of older clients."""
    return "name" if "name" in fields and "model" not in fields else "model"


async def show(service: Service, call: Call, fields: Fields) -> None:
    fields.require(model_field(fields))
    config, template = service.model.config, service.model.chat_template
    family = config.architecture
    await call.reply(
        {
            "template": "" if template is None else template.source,
            "details": _details(service),
            "capabilities": ["completion", "tools"] if template is not None else ["completion"],
            "model_info": {
                "general.architecture": family,
                f"{family}.context_length": config.context_length,
                f"{family}.embedding_length": config.hidden_size,
                f"{family}.block_count": config.layers,
                f"{family}.attention.head_count": config.heads,
                f"{family}.attention.head_count_kv": config.kv_heads,
            },
        }
    )


async def version(host: Host, call: Call) -> None:
    await call.reply({"version": __version__})
