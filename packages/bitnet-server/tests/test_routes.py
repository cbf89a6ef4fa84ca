"""The table of endpoints: what answers a path, and which methods it takes."""

from __future__ import annotations

from typing import Any

import pytest

from bitnet.server.http.routes import Endpoint, Routes


async def nothing(*_: Any) -> None: ...


LIST, ONE, DROP, FILES, POSTED = (
    Endpoint("/v1/things", nothing),
    Endpoint("/v1/things/{id}", nothing),
    Endpoint("/v1/things/{id}", nothing, ("DELETE",)),
    Endpoint("/files/{path:path}", nothing),
    Endpoint("/v1/things", nothing, ("POST",)),
)
ROUTES = Routes((LIST, ONE, DROP, FILES, POSTED))


@pytest.mark.parametrize(
    ("method", "path", "endpoint", "params"),
    [
        ("GET", "/v1/things", LIST, {}),
        ("HEAD", "/v1/things", LIST, {}),
        ("POST", "/v1/things", POSTED, {}),
        ("GET", "/v1/things/a b.c", ONE, {"id": "a b.c"}),
        ("DELETE", "/v1/things/ü\n", DROP, {"id": "ü\n"}),
        ("GET", "/files/a/b/c", FILES, {"path": "a/b/c"}),
    ],
)
def test_what_answers(method: str, path: str, endpoint: Endpoint, params: dict[str, str]) -> None:
    assert ROUTES.find(path, method) == (endpoint, (), params)


@pytest.mark.parametrize("path", ["/", "", "/v1/things/", "/v1/things/a/b", "/v1/thingsx", "/files", "/v1xthings"])
def test_what_is_not_there(path: str) -> None:
    assert ROUTES.find(path, "GET").endpoint is None


@pytest.mark.parametrize(
    ("method", "path", "allows"),
    [
        ("DELETE", "/v1/things", ["GET", "HEAD", "POST"]),
        ("POST", "/v1/things/1", ["DELETE", "GET", "HEAD"]),
        ("PUT", "/files/1", ["GET", "HEAD"]),
    ],
)
def test_another_method(method: str, path: str, allows: list[str]) -> None:
    found = ROUTES.find(path, method)
    assert found.endpoint is not None
    assert (found.allows, found.params) == (allows, {})
