"""Many conversations over three replicas by HTTP: they stay where their prefix is, and a popular prefix does not."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import httpx
import pytest

if TYPE_CHECKING:
    from .conftest import Node, Served

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (the group `ray`)"),
    pytest.mark.nightly,
]
TALKS, TURNS, REPLICAS, PLACES = 50, 10, 3, 16
POPULAR = 30
"""Conversations that begin with the same instructions."""


@dataclass
class Seen:
    """What came of the conversations.

    Attributes:
        hits: Turns after the first one whose replica had the conversation so far, but for two blocks.
        requests: Turns by replica.
        work: Computed tokens by replica: of prompts, without those cached, and of answers.
    """

    hits: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    work: Counter[str] = field(default_factory=Counter)

    async def ask(self, client: httpx.AsyncClient, messages: list[dict[str, str]]) -> tuple[dict[str, Any], str]:
        """Ask for eight tokens; return the usage and the answer."""
        body: dict[str, Any] = {"messages": messages, "max_tokens": 8, "temperature": 0, "x_bitnet_receipt": True}
        found = await client.post("/v1/chat/completions", json=body)
        assert found.status_code == 200, found.text
        document = found.json()
        usage, replica = document["usage"], document["x_bitnet_receipt"]["environment"]["replica"]["id"]
        self.requests[replica] += 1
        self.work[replica] += usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        self.work[replica] += usage["completion_tokens"]
        return usage, document["choices"][0]["message"]["content"]

    def uneven(self) -> dict[str, float]:
        """The most loaded replica's load over the mean, in requests and in work."""
        return {
            name: round(max(by.values()) * REPLICAS / by.total(), 2)
            for name, by in (("requests", self.requests), ("work", self.work))
        }


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(("sun", "boat", "tree", "cat", "red", "house", "rain", "bird")) for _ in range(count))


async def talks(url: str, seed: int) -> Seen:
    rng, seen = random.Random(seed), Seen()
    shared = words(rng, 150)

    async def talk(client: httpx.AsyncClient, own: random.Random, popular: bool) -> None:
        messages: list[dict[str, str]] = [{"role": "system", "content": shared if popular else words(own, 50)}]
        before = 0
        for turn in range(TURNS):
            messages.append({"role": "user", "content": f"{own.getrandbits(32):x}: {words(own, 8)}"})
            usage, answer = await seen.ask(client, messages)
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            seen.hits += turn > 0 and cached >= before - 32
            before = usage["prompt_tokens"]
            messages.append({"role": "assistant", "content": answer})

    async with httpx.AsyncClient(base_url=url, timeout=None, limits=httpx.Limits(max_connections=TALKS)) as client:
        order = [number < POPULAR for number in range(TALKS)]
        rng.shuffle(order)
        await asyncio.gather(*(talk(client, random.Random(rng.random()), popular) for popular in order))
    return seen


async def alike(url: str, seed: int, at_once: int) -> Seen:
    """Ask questions with the same instructions, so many at once."""
    rng, seen = random.Random(seed), Seen()
    shared = words(rng, 150)

    async def ask(client: httpx.AsyncClient) -> None:
        for _ in range(10):
            messages = [
                {"role": "system", "content": shared},
                {"role": "user", "content": f"{rng.getrandbits(64):x}: {words(rng, 8)}"},
            ]
            await seen.ask(client, messages)

    async with httpx.AsyncClient(base_url=url, timeout=None, limits=httpx.Limits(max_connections=at_once)) as client:
        await asyncio.gather(*(ask(client) for _ in range(at_once)))
    return seen


@pytest.fixture(scope="module")
def server(
    head: Callable[..., AbstractContextManager[Node]],
    served: Callable[..., AbstractContextManager[Served]],
    environment: Mapping[str, str],
) -> Iterator[Served]:
    options = ["--replicas", str(REPLICAS), "-c", "1024", "-np", str(PLACES)]
    with head(REPLICAS) as node, served(environment, "--address", node.address, *options) as found:
        yield found


def test_conversations_stay_and_a_popular_prefix_does_not(server: Served) -> None:
    seed = random.randrange(1 << 30)
    seen = asyncio.run(talks(server.url, seed))
    print(f"hits: {seen.hits} of {TALKS * (TURNS - 1)}; {seen.uneven()}; load average {os.getloadavg()}")
    assert seen.hits >= 0.9 * TALKS * (TURNS - 1), (seed, seen)
    assert seen.requests.total() == TALKS * TURNS
    assert max(seen.uneven().values()) <= 1.5, (seed, seen)


@pytest.mark.parametrize("at_once", [6, 24])
def test_requests_that_begin_alike_are_spread(server: Served, at_once: int) -> None:
    seed = random.randrange(1 << 30)
    seen = asyncio.run(alike(server.url, seed, at_once))
    print(f"{at_once} at once: {seen.uneven()}; load average {os.getloadavg()}")
    assert seen.requests.total() == 10 * at_once
    assert max(seen.uneven().values()) <= 1.5, (seed, seen)
