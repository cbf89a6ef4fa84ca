"""The ASGI application: routing, API keys, and headers that all answers share."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.routing import Match, Route

from bitnet.core.errors import brief
from bitnet.server.api import (
    anthropic,
    devices,
    ollama,
    ollama_models,
    openai_chat,
    openai_completions,
    page,
    responses,
    status,
    stored,
    text,
)
from bitnet.server.api.openai import error_body
from bitnet.server.generation.job import Job, run
from bitnet.server.http import paths
from bitnet.server.models.service import Service
from bitnet.server.models.state import State
from bitnet.server.request.call import Call, ClientGone, Receive, Scope, Send
from bitnet.server.request.errors import RequestError, as_request_error
from bitnet.server.request.fields import Fields

log = logging.getLogger("bitnet.server")
access = logging.getLogger("bitnet.server.access")

Handle = Callable[[State, Call], Awaitable[None]]
Parse = Callable[[Service, Fields], Job]
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
    field: str,
    answer: Callable[[Service], Awaitable[None]],
    *,
    generates: bool = False,
) -> None:
    """Have a model answer. The time to load it counts towards the request's timeout, and a client may leave
    meanwhile. What generates ends at its deadline by itself."""
    async with AsyncExitStack() as held:
        began = time.monotonic()
        service = await call.watch(held.enter_async_context(state.pool.using(name, field, call.until)))
        call.load_seconds = time.monotonic() - began
        call.add_header("x-bitnet-device", service.devices)
        if generates or call.until is None:
            await answer(service)
            return
        try:
            await asyncio.wait_for(answer(service), call.until - time.monotonic())
        except asyncio.TimeoutError:
            raise state.shared.too_late from None


def of_model(path: str, answer: OfModel, errors: ErrorBody = error_body, *, generates: bool = False) -> Endpoint:
    """An endpoint whose body names the model; by default the first one.

    Args:
        generates: Whether its requests count as running or waiting.
    """

    async def handle(state: State, call: Call) -> None:
        if generates:
            state.admission.check_room()
        fields = Fields(await call.json())
        field = ollama_models.model_field(fields) if path == "/api/show" else "model"
        with state.admission.admitted() if generates else nullcontext():
            name = fields.text(field)
            await _with_model(
                state, call, name, field, lambda service: answer(service, call, fields), generates=generates
            )

    return Endpoint(path, handle, ("POST",), errors)


def generating(path: str, parse: Parse, errors: ErrorBody = error_body) -> Endpoint:
    """An endpoint whose requests are generations: ``parse`` turns the body into a job."""

    async def answer(service: Service, call: Call, fields: Fields) -> None:
        await run(service, call, await call.read(lambda: parse(service, fields)))

    return of_model(path, answer, errors, generates=True)


def of_current(path: str, answer: OfCurrent) -> Endpoint:
    """An endpoint about the most recently requested model."""

    async def handle(state: State, call: Call) -> None:
        await _with_model(state, call, state.pool.current(), "model", lambda service: answer(service, call))

    return Endpoint(path, handle, works=True)


ENDPOINTS = (
    Endpoint("/health", status.health, public=True),
    Endpoint("/health/ready", status.health, public=True),
    Endpoint("/health/live", status.live, public=True),
    Endpoint("/", page.page, public=True),
    Endpoint("/assets/{path:path}", page.page, public=True),
    Endpoint("/v1/models", status.models),
    Endpoint("/v1/models/{name:path}", status.model),
    of_current("/props", status.props),
    of_current("/slots", status.slots),
    Endpoint("/metrics", status.metrics),
    of_current("/devices", devices.devices),
    Endpoint("/reload", status.reload, ("POST",)),
    Endpoint("/v1/embeddings", status.embeddings, ("POST",)),
    generating("/v1/chat/completions", openai_chat.parse),
    generating("/v1/completions", openai_completions.parse),
    of_model("/v1/responses", responses.create, generates=True),
    Endpoint("/v1/responses/{id}", stored.retrieve),
    Endpoint("/v1/responses/{id}", stored.delete, ("DELETE",)),
    generating("/v1/messages", anthropic.parse, anthropic.error_body),
    of_model("/v1/messages/count_tokens", anthropic.count_tokens, anthropic.error_body),
    of_model("/tokenize", text.tokenize),
    of_model("/detokenize", text.detokenize),
    of_model("/apply-template", text.apply_template),
    of_model("/api/chat", ollama.chat, ollama.error_body, generates=True),
    of_model("/api/generate", ollama.generate, ollama.error_body, generates=True),
    Endpoint("/api/tags", ollama_models.tags, errors=ollama.error_body),
    Endpoint("/api/ps", ollama_models.ps, errors=ollama.error_body),
    of_model("/api/show", ollama_models.show, ollama.error_body),
    Endpoint("/api/embed", status.embeddings, ("POST",), ollama.error_body),
    Endpoint("/api/embeddings", status.embeddings, ("POST",), ollama.error_body),
    Endpoint("/api/version", ollama_models.version, errors=ollama.error_body),
)


class App:
    """The server as an ASGI application; :func:`bitnet.server.create_app` makes one.

    Args:
        state: The models and their limits. The caller must close it.
        local: Whether it listens only on this machine. Without keys, it then accepts only this machine's own host
            names. Otherwise a web page could use DNS rebinding to pass as the server's own.
    """

    def __init__(self, state: State, *, local: bool = False) -> None:
        self.state = state
        self._local = local and not state.settings.api_keys
        self._routes = [Route(e.path, _Unused(e), methods=list(e.methods)) for e in ENDPOINTS]
        self._keys = [hashlib.sha256(key.encode()).digest() for key in state.settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1003})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.monotonic()
        seen = 0

        async def counted(message: Any) -> None:
            nonlocal seen
            seen = message.get("status", seen)
            await send(message)

        endpoint, error = self._find(scope)
        error = self._misnamed(scope) or error
        call = Call(
            *(scope, receive, counted),
            headers=self._headers(scope),
            bodies=self.state.bodies,
            owner=self._owner(scope),
            timeout=self.state.settings.timeout,
        )
        try:
            if scope["method"] == "OPTIONS" and self._allowed_origin(scope):
                await call.reply(b"", status=204)
            elif error is not None:
                raise error
            else:
                await endpoint.handle(self.state, call)
        except ClientGone:
            seen = 499
        except Exception as failure:
            await self._fail(endpoint, call, failure)
        finally:
            call.release()
            self.state.shared.metrics.responses.labels(endpoint.path, str(seen)).inc()
            seconds = time.monotonic() - began
            access.info("%s %s %s %.3fs", scope["method"], endpoint.path, seen, seconds)

    def _find(self, scope: Scope) -> tuple[Endpoint, RequestError | None]:
        """The endpoint of a path, and an error if it must not answer; path parameters are stored in the scope."""
        near: Endpoint | None = None
        methods: set[str] = set()
        path = paths.route(scope)
        if not path and scope["method"] in ("GET", "HEAD"):
            return Endpoint("/", page.slash, public=True), None
        plain = {**scope, "path": path, "root_path": ""}
        for route in self._routes:
            match, found = route.matches(plain)
            if match is Match.NONE:
                continue
            near = found["endpoint"].endpoint
            methods |= route.methods or set()
            if match is Match.FULL:
                scope["path_params"] = found.get("path_params", {})
                return near, self._locked(near, scope)
        if near is not None:
            allow = ", ".join(sorted(methods))
            return near, RequestError(405, f"{near.path} takes {allow}, not {scope['method']}.", allow=allow)
        unknown = Endpoint("unknown", status.live, errors=_errors_of(path))
        meant = paths.nearest(path, [e.path for e in ENDPOINTS if "{" not in e.path])
        message = "There is no such path." if meant is None else f"There is no such path; {meant} is the nearest."
        return unknown, self._locked(unknown, scope) or RequestError(404, message, code="not_found")

    def _locked(self, endpoint: Endpoint, scope: Scope) -> RequestError | None:
        """An error if a request has no access: it comes from another site's page, or its key is missing or wrong."""
        guarded = endpoint.works or endpoint.methods != ("GET",)
        if guarded and self._foreign(dict(scope["headers"]), scope):
            return RequestError(403, "Pages of other sites may not call this server (--cors allows one).")
        if endpoint.public or not self._keys or self._owner(scope):
            return None
        return RequestError(401, "The API key is missing or wrong.", code="invalid_api_key")

    def _owner(self, scope: Scope) -> bytes:
        """The digest of the request's key; empty if that is not one of the server's."""
        headers = dict(scope["headers"])
        given = headers.get(b"authorization", b"")
        key = given[7:].strip() if given[:7].lower() == b"bearer " else headers.get(b"x-api-key", b"")
        digest = hashlib.sha256(key).digest()
        return digest if key and sum(hmac.compare_digest(digest, known) for known in self._keys) else b""

    def _misnamed(self, scope: Scope) -> RequestError | None:
        """An error if the request's host name is not one of this server."""
        name = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
        if not self._local or not name or _is_local(name):
            return None
        allowed = self.state.settings.cors
        if "*" in allowed or any(origin.partition("://")[2] == name for origin in allowed):
            return None
        return RequestError(
            403,
            f"Without a key, this server answers only to localhost, not to {brief(name)}: "
            "set one (--api-key-file), or allow that site's pages (--cors https://…).",
        )

    def _foreign(self, headers: Mapping[bytes, bytes], scope: Scope) -> bool:
        """Whether the browser's headers say that a page of another site sends this.

        A GET without CORS, as for an image, has no ``Origin``; programs that are no browser send neither header.
        """
        if self._allowed_origin(scope) or "*" in self.state.settings.cors:
            return False
        site = headers.get(b"sec-fetch-site")
        if site is not None:
            return site not in (b"same-origin", b"none")
        origin = headers.get(b"origin")
        return origin is not None and origin.partition(b"://")[2] != headers.get(b"host")

    async def _fail(self, endpoint: Endpoint, call: Call, failure: Exception) -> None:
        error = as_request_error(failure)
        if error is failure and error.status == 500:
            log.error("%s failed: %s", endpoint.path, error)
        elif error.status == 500:
            log.exception("%s failed", endpoint.path, exc_info=failure)
        if call.started:
            return  # the connection is closed, as the answer is incomplete
        headers = [("retry-after", str(error.retry_after))] if error.retry_after is not None else []
        if error.allow is not None:
            headers.append(("allow", error.allow))
        if error.status == 401:
            headers.append(("www-authenticate", "Bearer"))
        await call.reply(endpoint.errors(error), status=error.status, headers=headers)

    def _headers(self, scope: Scope) -> dict[str, str]:
        headers = dict(self.state.headers)
        if origin := self._allowed_origin(scope):
            wanted = dict(scope["headers"]).get(b"access-control-request-headers", b"").decode("latin-1")
            headers |= {
                "access-control-allow-origin": origin,
                "access-control-allow-headers": wanted or "authorization, content-type, x-api-key, anthropic-version",
                "access-control-allow-methods": "GET, POST, DELETE",
                "access-control-expose-headers": "retry-after, x-bitnet-device",
                "vary": "origin, access-control-request-headers",
            }
        return headers

    def _allowed_origin(self, scope: Scope) -> str | None:
        """The origin of a page that may call the server; None for all others."""
        origin = dict(scope["headers"]).get(b"origin", b"").decode("latin-1")
        allowed = self.state.settings.cors
        return origin if origin and (origin in allowed or "*" in allowed) else None


class _Unused:
    """A route's endpoint. Routes are used only for matching, so it is never called."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("routes only match paths; App calls the endpoint")


def _is_local(name: str) -> bool:
    """Whether a ``Host`` header names only this machine: ``localhost`` or a loopback address."""
    try:
        host = urlsplit(f"//{name}").hostname or ""
        return host.removesuffix(".") == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name
        return False


def _errors_of(path: str) -> ErrorBody:
    """The error format for a path, by the API to which its prefix belongs."""
    if path.startswith("/api/"):
        return ollama.error_body
    return anthropic.error_body if path.startswith("/v1/messages") else error_body


async def _lifespan(receive: Receive, send: Send) -> None:
    while (message := await receive())["type"] != "lifespan.shutdown":
        await send({"type": f"{message['type']}.complete"})
    await send({"type": "lifespan.shutdown.complete"})
