"""Load generator for a server: sends prompts and takes the times of each answer."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import httpx
import numpy as np

from bitnet.core.errors import BitNetError, brief
from bitnet.server.bench.connection import CONNECT_SECONDS, Connection, Server
from bitnet.server.bench.metrics import Answered
from bitnet.server.bench.prompts import Prompt, Random, arrivals

Endpoint: TypeAlias = "Literal['completions', 'chat']"

PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
VOCABULARY = 1000
"""Upper bound of random token ids if a server does not report its vocabulary size."""


class Failed(Exception):
    """A request was refused, or its answer broke off. Failures are counted by message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server to measure, and how to query it.

    Attributes:
        url: The server's address, without ``/v1``.
        model: Name of the model; None: the first one that the server lists.
        fields: Further fields of every request's body, such as ``temperature``.
    """

    url: str
    endpoint: Endpoint = "completions"
    model: str | None = None
    api_key: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)


class Client:
    """Sends requests to one server. Use it in ``async with``.

    Raises InvalidInputError if the server's address is invalid.

    Answers are read by connections of its own: with httpx, a request takes longer to send than a server to answer it.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._headers = {"accept-encoding": "identity"}
        if target.api_key is not None:
            self._headers["authorization"] = f"Bearer {target.api_key}"
        self._server = Server(target.url, self._headers)
        self._every: list[Connection] = []
        self._idle: list[Connection] = []
        self._model = target.model

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._every:
            connection.close()

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Connection]:
        """A connection that no other request uses.

        Raises:
            Failed: There is none.
        """
        while self._idle:
            if (connection := self._idle.pop()).usable:
                break
        else:
            try:
                connection = await Connection.open(self._server)
            except OSError as error:
                raise Failed(f"no connection: {error}") from None
            self._every.append(connection)
        try:
            yield connection
        finally:
            self._idle.append(connection)

    async def model(self) -> str:
        """The model's name: the one given, or the first that the server lists.

        Raises:
            BitNetError: No server answers, it refuses the request, or it does not speak OpenAI's API.
        """
        if self._model is None:
            listed = await self._answer("GET", "/v1/models")
            try:
                self._model = str(listed["data"][0]["id"])
            except (KeyError, IndexError, TypeError):
                raise self._no_server("it lists no model") from None
        return self._model

    async def random_prompts(self, lengths: Random, count: int, rng: np.random.Generator) -> list[Prompt]:
        """Prompts of random tokens: as ids for ``completions``, or detokenized by the server for ``chat``.

        Raises:
            BitNetError: The server has no ``/detokenize``, which ``chat`` needs.
        """
        props = await self._get_props()
        drawn = lengths.draw(count, int(props.get("vocab_size", VOCABULARY)), rng)
        if self._target.endpoint == "completions":
            return [Prompt(ids, output) for ids, output in drawn]
        prompts = []
        for ids, output in drawn:
            answer = await self._answer("POST", "/detokenize", json={"model": await self.model(), "tokens": ids})
            text = answer.get("content", answer.get("prompt"))  # llama.cpp's word, vLLM's word
            if not isinstance(text, str):
                raise self._no_server("its /detokenize gives no text")
            prompts.append(Prompt(text, output))
        return prompts

    async def _get_props(self) -> dict[str, Any]:
        try:
            return await self._answer("GET", "/props")
        except BitNetError:  # only bitnet and llama.cpp have it
            return {}

    async def _answer(self, method: str, path: str, **content: Any) -> dict[str, Any]:
        """A JSON object from the server."""
        try:
            async with httpx.AsyncClient(
                base_url=self._target.url,
                headers=self._headers,
                timeout=CONNECT_SECONDS,
                trust_env=False,
                verify=self._server.tls or False,
            ) as http:
                answer = await http.request(method, path, **content)
            if answer.status_code == 401:
                raise BitNetError(
                    f"the server at {self._target.url} requires an API key.",
                    hint="Give one with --api-key or BITNET_API_KEY.",
                )
            if answer.status_code != 200:
                raise self._no_server(f"it answers {answer.status_code} to {path}")
            value = answer.json()
            if not isinstance(value, dict):
                raise ValueError
        except httpx.HTTPError as error:
            raise BitNetError(
                f"no server answers at {self._target.url}: {str(error) or type(error).__name__}.",
                hint="Start one with 'bitnet serve', or name its address with --base-url.",
            ) from None
        except ValueError:
            raise self._no_server(f"it answers no JSON to {path}") from None
        return value

    def _no_server(self, why: str) -> BitNetError:
        return BitNetError(f"the server at {self._target.url} cannot be measured: {why}.")

    async def ask(self, prompt: Prompt) -> Answered:
        """Send one request and read its stream.

        Raises:
            Failed: It was refused, or its answer broke off.
        """
        target = self._target
        content = prompt.content
        asked = (
            {"messages": [{"role": "user", "content": content}]} if target.endpoint == "chat" else {"prompt": content}
        )
        body = {
            "model": await self.model(),
            **asked,
            "max_tokens": prompt.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **target.fields,
        }
        stream, refusal = _Stream(), bytearray()
        request = self._server.post(PATHS[target.endpoint], json.dumps(body).encode())

        def take(status: int, received: bytes, now: float) -> None:
            if status == 200:
                stream.take(received, now)
            else:
                refusal.extend(received)

        sent = time.perf_counter()
        async with self._connection() as connection:
            try:
                status = await connection.ask(request, take)
            except OSError as error:
                raise Failed(f"connection lost: {error}") from None
        if status != 200:
            raise Failed(_refusal(status, refusal))
        return stream.answered(sent, prompt)


def _refusal(status: int, body: bytes | bytearray) -> str:
    """The status, with the error's code or message if the body has one in OpenAI's format."""
    try:
        error = json.loads(body)["error"]
        return f"{status} {error.get('code') or brief(error.get('message'))}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return str(status)


SAID = ("content", "reasoning_content", "reasoning", "tool_calls")
"""Fields of a chat's delta with something that the model wrote: the answer, a thought or a call."""


class _Stream:
    """Parses an answer's server-sent events as they arrive."""

    def __init__(self) -> None:
        self._rest = b""
        self._times: list[float] = []
        self._usage: dict[str, Any] = {}
        self._done = False

    def take(self, received: bytes, now: float) -> None:
        *lines, self._rest = (self._rest + received).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        try:
            event = json.loads(data)
            if "error" in event:
                raise Failed(f"error in the stream: {event['error'].get('code') or brief(event['error'])}")
            for choice in event.get("choices", ()):
                delta = choice.get("delta")
                said = choice.get("text") if delta is None else any(map(delta.get, SAID))
                if said or (choice.get("finish_reason") is not None and not self._times):
                    self._times.append(now)
            self._usage = event.get("usage") or self._usage
        except (ValueError, KeyError, TypeError, AttributeError):
            raise Failed(f"no event of OpenAI's API: {brief(data)}") from None

    def answered(self, sent: float, prompt: Prompt) -> Answered:
        """The timings, after the stream has ended.

        Raises:
            Failed: It ended too early.
        """
        if not self._done or not self._times:
            raise Failed("the stream ended early")
        read = len(prompt.content) if isinstance(prompt.content, list) else 0
        return Answered(
            sent,
            self._times,
            prompt_tokens=self._usage.get("prompt_tokens", read),
            output_tokens=self._usage.get("completion_tokens", len(self._times)),
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of all requests, and the seconds from the first request to the last answer."""

    answers: list[Answered]
    failures: Counter[str]
    seconds: float


async def press(client: Client, prompts: Sequence[Prompt], times: Sequence[float], concurrency: int | None) -> Outcome:
    """Send each prompt at its time, at most ``concurrency`` at once; waiting for that does not count as latency."""
    answers: list[Answered] = []
    failures: Counter[str] = Counter()
    places = asyncio.Semaphore(concurrency or len(prompts))

    async def one(prompt: Prompt) -> None:
        async with places:
            try:
                answers.append(await client.ask(prompt))
            except Failed as failure:
                failures[str(failure)] += 1

    begun = time.perf_counter()
    tasks = []
    for prompt, at in zip(prompts, times, strict=True):
        if (wait := begun + at - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.ensure_future(one(prompt)))
    await asyncio.gather(*tasks)
    return Outcome(answers, failures, time.perf_counter() - begun)


def endless(prompts: Sequence[Prompt], count: int) -> Iterator[Prompt]:
    """Yield ``count`` prompts, starting over after the last one."""
    return (prompts[i % len(prompts)] for i in range(count))


async def measure(
    target: Target,
    source: Random | Sequence[Prompt],
    *,
    count: int,
    rate: float = math.inf,
    burstiness: float = 1.0,
    concurrency: int | None = None,
    seed: int = 0,
) -> Outcome:
    """Send one uncounted prompt to check that the server answers, then put it under load.

    Raises:
        BitNetError: No server answers, it refuses the request, or it does not speak OpenAI's API.
    """
    rng = np.random.default_rng(seed)
    async with Client(target) as client:
        model = await client.model()
        if isinstance(source, Random):
            first, *prompts = await client.random_prompts(source, count + 1, rng)
        else:
            first, prompts = source[0], [*endless(source, count)]
        try:
            await client.ask(first)
        except Failed as failure:
            raise BitNetError(f"{model} at {target.url} did not answer a first request: {failure}.") from None
        return await press(client, prompts, arrivals(count, rate, burstiness, rng), concurrency)
