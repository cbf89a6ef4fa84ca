"""Which endpoint answers a path, and whether it needs a model."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from bitnet.server.api import (
    anthropic,
    batches,
    devices,
    embeddings,
    files,
    infill,
    llama_completion,
    llama_errors,
    ollama,
    ollama_library,
    ollama_models,
    openai_chat,
    openai_completions,
    page,
    responses,
    slots,
    status,
    stored,
    text,
)
from bitnet.server.api.llama_settings import named_slot
from bitnet.server.api.openai import error_body
from bitnet.server.generation.job import Job, run
from bitnet.server.models.service import Service
from bitnet.server.models.state import State
from bitnet.server.request.call import Call
from bitnet.server.request.errors import RequestError
from bitnet.server.request.fields import Fields

Handle = Callable[[State, Call], Awaitable[None]]
Parse = Callable[[Service, Fields], Job]
WithoutModel = Callable[[State, Call, Fields], Awaitable[bool]]
OfModel = Callable[[Service, Call, Fields], Awaitable[None]]
OfCurrent = Callable[[Service, Call], Awaitable[None]]
ErrorBody = Callable[[RequestError], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A path of an API.

    Attributes:
        errors: Formats an error as the API does.
        public: Whether it needs no key.
        works: Whether its GET does work, such as loading a model or starting drivers, so that pages of other sites may
            not even send it.
    """

    path: str
    handle: Handle
    methods: tuple[str, ...] = ("GET",)
    errors: ErrorBody = error_body
    public: bool = False
    works: bool = False


async def _with_model(
    state: State,
    call: Call,
    name: str | None,
    answer: Callable[[Service], Awaitable[None]],
    *,
    generates: bool = False,
) -> None:
    """Have a model answer. The time to load it counts towards the request's timeout, and a client may leave
    meanwhile. What generates ends at its deadline by itself."""
    async with AsyncExitStack() as held:
        began = time.monotonic()
        service = await call.watch(held.enter_async_context(state.pool.using(name, call.until)))
        call.load_seconds = time.monotonic() - began
        call.add_header("x-bitnet-device", service.devices)
        if generates:
            await call.watch(service.try_template())
        if generates or call.until is None:
            await answer(service)
            return
        try:
            await asyncio.wait_for(answer(service), call.until - time.monotonic())
        except asyncio.TimeoutError:
            raise state.shared.too_late from None


def of_model(
    path: str,
    answer: OfModel,
    errors: ErrorBody = error_body,
    *,
    generates: bool = False,
    without: WithoutModel | None = None,
    bodiless: bool = False,
) -> Endpoint:
    """An endpoint whose body names the model; by default the first one.

    Args:
        without: Answers a request for which the model need not be loaded; returns whether it has.
        generates: Whether its requests count as running or waiting.
        bodiless: Whether a request may leave out its body, which then counts as an empty object.
    """

    async def handle(state: State, call: Call) -> None:
        counts = generates and not call.admitted
        if counts:
            state.admission.check_room()
        fields = Fields(await call.json(optional=bodiless))
        if without is not None and await without(state, call, fields):
            return
        with state.admission.admitted() if counts else nullcontext():
            name = fields.text("model")
            await _with_model(state, call, name, lambda service: answer(service, call, fields), generates=generates)

    return Endpoint(path, handle, ("POST",), errors)


def generating(path: str, parse: Parse, errors: ErrorBody = error_body) -> Endpoint:
    """An endpoint whose requests are generations: ``parse`` turns the body into a job."""

    async def answer(service: Service, call: Call, fields: Fields) -> None:
        job = await call.read(lambda: parse(service, fields))
        await run(service, call, replace(job, slot=named_slot(service, fields)))

    return of_model(path, answer, errors, generates=True)


def counting(path: str, parse: Callable[[Service, Fields, bytes], Job]) -> Endpoint:
    """An endpoint that counts the prompt's tokens of a request for a generation, as OpenAI's API answers.

    Args:
        parse: Turns the body into a job; it is given the owner of the request, too.
    """

    async def answer(service: Service, call: Call, fields: Fields) -> None:
        job = await call.read(lambda: parse(service, fields, call.owner))
        tokens = await service.shared.in_thread(lambda: sum(map(len, job.prompts())))
        await call.reply({"object": "response.input_tokens", "input_tokens": tokens})

    return of_model(path, answer)


def of_current(path: str, answer: OfCurrent) -> Endpoint:
    """An endpoint about the most recently requested model."""

    async def handle(state: State, call: Call) -> None:
        await state.pool.refresh()
        name = state.pool.listing.current().source.names[0]
        await _with_model(state, call, name, lambda service: answer(service, call))

    return Endpoint(path, handle, works=True)


ENDPOINTS = (
    Endpoint("/health", status.health, public=True),
    Endpoint("/health/ready", status.health, public=True),
    Endpoint("/health/live", status.live, public=True),
    Endpoint("/", page.page, public=True),
    Endpoint("/assets/{path:path}", page.page, public=True),
    Endpoint("/v1/models", status.models),
    Endpoint("/v1/models/{name:path}", status.model),
    Endpoint("/models", status.models),
    Endpoint("/version", status.version),
    of_current("/props", status.props),
    of_current("/slots", status.slots),
    of_model("/slots/{id}", slots.act, bodiless=True),
    Endpoint("/lora-adapters", status.adapters),
    Endpoint("/metrics", status.metrics),
    of_current("/devices", devices.devices),
    Endpoint("/reload", status.reload, ("POST",)),
    of_model("/v1/embeddings", embeddings.openai),
    of_model("/v1/rerank", embeddings.rerank),
    of_model("/rerank", embeddings.rerank),
    generating("/v1/chat/completions", openai_chat.parse),
    generating("/chat/completions", openai_chat.parse, llama_errors.error_body),
    counting("/v1/chat/completions/input_tokens", lambda service, fields, _: openai_chat.parse(service, fields)),
    counting("/chat/completions/input_tokens", lambda service, fields, _: openai_chat.parse(service, fields)),
    generating("/v1/completions", openai_completions.parse),
    generating("/completion", llama_completion.parse, llama_errors.error_body),
    generating("/completions", llama_completion.parse, llama_errors.error_body),
    generating("/infill", infill.parse, llama_errors.error_body),
    of_model("/v1/responses", responses.create, generates=True),
    of_model("/responses", responses.create, generates=True),
    counting("/v1/responses/input_tokens", responses.parse),
    Endpoint("/v1/responses/{id}", stored.retrieve),
    Endpoint("/v1/responses/{id}", stored.delete, ("DELETE",)),
    Endpoint("/v1/responses/{id}/cancel", stored.cancel, ("POST",)),
    Endpoint("/v1/responses/{id}/input_items", stored.input_items),
    Endpoint("/v1/files", files.create, ("POST",)),
    Endpoint("/v1/files", files.files),
    Endpoint("/v1/files/{id}", files.file),
    Endpoint("/v1/files/{id}", files.delete, ("DELETE",)),
    Endpoint("/v1/files/{id}/content", files.content),
    Endpoint("/v1/batches", batches.create, ("POST",)),
    Endpoint("/v1/batches", batches.batches),
    Endpoint("/v1/batches/{id}", batches.batch),
    Endpoint("/v1/batches/{id}/cancel", batches.cancel, ("POST",)),
    generating("/v1/messages", anthropic.parse, anthropic.error_body),
    of_model("/v1/messages/count_tokens", anthropic.count_tokens, anthropic.error_body),
    of_model("/tokenize", text.tokenize),
    of_model("/detokenize", text.detokenize),
    of_model("/apply-template", text.apply_template),
    of_current("/tokenizer_info", text.tokenizer_info),
    of_model("/api/chat", ollama.chat, ollama.error_body, generates=True, without=ollama.chat_unloaded),
    of_model("/api/generate", ollama.generate, ollama.error_body, generates=True, without=ollama.generate_unloaded),
    Endpoint("/api/tags", ollama_models.tags, errors=ollama.error_body),
    Endpoint("/api/ps", ollama_models.ps, errors=ollama.error_body),
    Endpoint("/api/show", ollama_models.show, ("POST",), ollama.error_body),
    Endpoint("/api/pull", ollama_library.pull, ("POST",), ollama.error_body),
    Endpoint("/api/delete", ollama_library.delete, ("DELETE",), ollama.error_body),
    Endpoint("/api/copy", ollama_library.copy, ("POST",), ollama.error_body),
    Endpoint("/api/create", ollama_library.create, ("POST",), ollama.error_body),
    of_model("/api/embed", embeddings.ollama, ollama.error_body),
    of_model("/api/embeddings", embeddings.ollama_one, ollama.error_body),
    Endpoint("/api/version", ollama_models.version, errors=ollama.error_body),
)


class Found(NamedTuple):
    """What there is at a path.

    Attributes:
        endpoint: The one for the method, or another one of the path; None: there is no such path.
        allows: The methods that the path takes; empty if the request's is among them.
        params: The parts of the path that the endpoint's path leaves open, by name.
    """

    endpoint: Endpoint | None
    allows: Sequence[str]
    params: dict[str, str]


class Routes:
    """A table of endpoints by path. ``{name}`` in a path stands for one segment, ``{name:path}`` for one or more."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self.plain: dict[str, list[Endpoint]] = {}
        self._open: list[tuple[re.Pattern[str], Endpoint]] = []
        for endpoint in endpoints:
            if "{" in endpoint.path:
                pattern = re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/]+)", re.escape(endpoint.path))
                pattern = re.sub(r"\\{(\w+):path\\}", r"(?P<\1>.+)", pattern)
                self._open.append((re.compile(pattern, re.DOTALL), endpoint))
            else:
                self.plain.setdefault(endpoint.path, []).append(endpoint)

    def find(self, path: str, method: str) -> Found:
        """What answers a path. ``HEAD`` counts as ``GET``."""
        matching = [(endpoint, dict[str, str]()) for endpoint in self.plain.get(path, ())]
        if not matching:
            matching = [(e, match.groupdict()) for pattern, e in self._open if (match := pattern.fullmatch(path))]
        if not matching:
            return Found(None, (), {})
        asked = "GET" if method == "HEAD" else method
        for endpoint, params in matching:
            if asked in endpoint.methods:
                return Found(endpoint, (), params)
        methods = {method for endpoint, _ in matching for method in endpoint.methods}
        return Found(matching[0][0], sorted(methods | ({"HEAD"} if "GET" in methods else set())), {})
