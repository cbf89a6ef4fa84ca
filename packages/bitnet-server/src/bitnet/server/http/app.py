"""The ASGI application: finds a request's endpoint, checks access, and answers errors as the endpoint's API does."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Any

from bitnet.server.api import anthropic, ollama, page, status
from bitnet.server.api.openai import error_body
from bitnet.server.batch.batches import Batches
from bitnet.server.batch.store import folder_name
from bitnet.server.http import paths
from bitnet.server.http.access import Access
from bitnet.server.http.routes import ENDPOINTS, Endpoint, ErrorBody, Routes
from bitnet.server.models.state import State
from bitnet.server.request.call import Call, ClientGone, Receive, Scope, Send, to_json
from bitnet.server.request.errors import RequestError, as_request_error

log = logging.getLogger("bitnet.server")
access_log = logging.getLogger("bitnet.server.access")

ROUTES = Routes(ENDPOINTS)


class App:
    """The server as an ASGI application; :func:`bitnet.server.create_app` makes one.

    Args:
        state: The models and their limits. The caller must close it.
        local: As for :class:`~bitnet.server.http.access.Access`.
    """

    def __init__(self, state: State, *, local: bool = False) -> None:
        self.state = state
        self.access = Access(state.settings, local=local)
        if state.files is not None:
            owners = {folder_name(owner): owner for owner in (b"", *self.access.keys)}
            state.batches = Batches(state.files, self.ask, state.admission, owners)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1003})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint, error = self._find(scope)
        error = self.access.misnamed(scope) or error
        await self._answer(endpoint, error, scope, receive, send, self.access.owner(scope))

    async def ask(self, path: str, body: Any, owner: bytes = b"") -> tuple[int, dict[str, Any]]:
        """Answer a request without HTTP, such as a row of a batch. Needs no key, and no place: the caller sees to that.

        Args:
            path: One that takes a JSON object by POST and answers with one.
            owner: The key to which belongs what is made, as :attr:`~bitnet.server.request.call.Call.owner` has it.

        Returns:
            The status and the body of the answer.
        """
        endpoint = ROUTES.find(path, "POST").endpoint
        assert endpoint is not None
        data, sent = to_json(body), list[dict[str, Any]]()
        messages = iter([{"type": "http.request", "body": data}])

        async def receive() -> Any:
            if (message := next(messages, None)) is None:
                await asyncio.Event().wait()  # it never leaves
            return message

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "path_params": {}}
        await self._answer(endpoint, None, scope, receive, send, owner, admitted=True)
        status = next(message["status"] for message in sent if "status" in message)
        return status, json.loads(b"".join(message.get("body", b"") for message in sent))

    async def _answer(
        self,
        endpoint: Endpoint,
        error: RequestError | None,
        scope: Scope,
        receive: Receive,
        send: Send,
        owner: bytes,
        *,
        admitted: bool = False,
    ) -> None:
        began = time.monotonic()
        seen = 0

        async def counted(message: Any) -> None:
            nonlocal seen
            seen = message.get("status", seen)
            await send(message)

        call = Call(
            *(scope, receive, counted),
            headers={**self.state.headers, **self.access.headers(scope)},
            bodies=self.state.bodies,
            owner=owner,
            timeout=self.state.settings.timeout,
            admitted=admitted,
        )
        try:
            if self.access.is_preflight(scope):
                await call.reply(b"")
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
            access_log.info("%s %s %s %.3fs", scope["method"], endpoint.path, seen, seconds)

    def _find(self, scope: Scope) -> tuple[Endpoint, RequestError | None]:
        """The endpoint of a path, and an error if it must not answer; path parameters are stored in the scope."""
        path, method = paths.route(scope), scope["method"]
        if not path and method in ("GET", "HEAD"):
            return Endpoint("/", page.slash, public=True), None
        endpoint, allows, scope["path_params"] = ROUTES.find(path, method)
        if endpoint is None:
            unknown = Endpoint("unknown", status.live, errors=_errors_of(path))
            meant = paths.nearest(path, ROUTES.plain)
            message = "There is no such path." if meant is None else f"There is no such path; {meant} is the nearest."
            return unknown, self.access.locked(unknown, scope) or RequestError(404, message, code="not_found")
        if allows:
            allow = ", ".join(allows)
            return endpoint, RequestError(405, f"{endpoint.path} takes {allow}, not {method}.", allow=allow)
        return endpoint, self.access.locked(endpoint, scope)

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

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        batches = self.state.batches
        while (message := await receive())["type"] != "lifespan.shutdown":
            if batches is not None:
                batches.resume()
            await send({"type": f"{message['type']}.complete"})
        if batches is not None:
            await batches.close()
        await send({"type": "lifespan.shutdown.complete"})


def _errors_of(path: str) -> ErrorBody:
    """The error format for a path, by the API to which its prefix belongs."""
    if path.startswith("/api/"):
        return ollama.error_body
    return anthropic.error_body if path.startswith("/v1/messages") else error_body
