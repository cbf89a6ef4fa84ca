"""A server behind another one that gives it a root path, stripped or not."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest


def behind(demo: Any, root: str, path: str) -> httpx.Response:
    """The answer of the application where another server hosts it at a root path."""

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(demo.app, root_path=root)
        async with httpx.AsyncClient(transport=transport, base_url="http://llm.example") as client:
            return await client.get(path)

    return asyncio.run(ask())


def test_errors_have_their_apis_shape(demo: Any) -> None:
    answer = behind(demo, "/llm", "/llm/api/nothing")
    assert (answer.status_code, answer.json()) == (404, {"error": "There is no such path."})


@pytest.mark.parametrize("root", ["", "/llm", "/a/b"])
@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/models/", "/v1//models//", "/v1/models/demo", "/v1/models/demo/", "/"]
)
def test_a_root_path_may_be_stripped_or_not(demo: Any, root: str, path: str) -> None:
    for given in (root + path, root + root + path, path):
        assert behind(demo, root, given).status_code == 200, given


def test_the_root_path_without_its_slash_leads_to_the_page(demo: Any) -> None:
    answer = behind(demo, "/a/llm", "/a/llm")
    assert (answer.status_code, answer.headers["location"]) == (308, "llm/")
    assert behind(demo, "/a/llm", "/a/llmx/v1/models").status_code == 404
