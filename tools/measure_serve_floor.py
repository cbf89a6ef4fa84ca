"""What Ray Serve itself adds to the first token: an application without a model, by uvicorn and by Serve, in pairs.

    uv run --group ray tools/measure_serve_floor.py
    RAY_SERVE_ENABLE_HA_PROXY=1 uv run --group ray tools/measure_serve_floor.py

The application answers every request with the same few events. Under Serve it is an ingress that gets them by a
handle from a second deployment, as `bitnet serve --ray` gets its chunks from a replica. So no server on Serve that
keeps its engine in a deployment of its own can be nearer to uvicorn. measure_ray.py measures the whole server.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from typing import Any

import ray
import uvicorn
from ray import serve

from bitnet.server.bench.prompts import Random
from bitnet.server.ray.deploy import PROXY_BY_GRPC
from bitnet.server.ray.ingress import BY_GRPC
from measure_ray import first_token, pairs, quartiles, server
from running import positive, run_tool

MODELS = json.dumps({"data": [{"id": "none"}]}).encode()
EVENTS = 2
"""Tokens of an answer, as in measure_ray.py, each an event."""
READY = "running on"
"""What uvicorn says, among other words, once it listens."""


async def events() -> AsyncIterator[bytes]:
    """An answer's events, in the form of OpenAI's completions."""
    for _ in range(EVENTS):
        yield b"data: " + json.dumps({"choices": [{"index": 0, "text": "a"}]}).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


def application(answer: Callable[[], AsyncIterator[bytes]]) -> Callable[..., Awaitable[None]]:
    """An ASGI application: a list of models for GET, and the events of ``answer`` otherwise."""

    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        while (await receive()).get("more_body"):
            pass
        json_or_events = b"application/json" if scope["method"] == "GET" else b"text/event-stream"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", json_or_events)]})
        if scope["method"] == "GET":
            await send({"type": "http.response.body", "body": MODELS})
            return
        async for event in answer():
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return asgi


@serve.deployment(ray_actor_options={"num_cpus": 1}, max_ongoing_requests=100)
class Engine:  # Serve makes deployments of both classes, which mypy does not see
    async def answer(self) -> AsyncIterator[bytes]:
        async for event in events():
            yield event


@serve.deployment(ray_actor_options={"num_cpus": 0}, max_ongoing_requests=100)
@serve.ingress()
class Ingress:
    def __init__(self, engine: Any) -> None:
        self._engine = engine.options(stream=True, **BY_GRPC)

    def __serve_build_asgi_app__(self) -> Any:
        return application(self._engine.answer.remote)


def serve_on_ray(port: int) -> None:
    """Serve the application on a cluster of its own until SIGTERM."""
    os.environ.setdefault(PROXY_BY_GRPC, "1")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"port": port})
    serve.run(Ingress.bind(Engine.bind()))  # type: ignore[attr-defined]
    print(READY, file=sys.stderr, flush=True)
    signal.pause()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("serve", nargs="?", choices=["serve"], help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ray", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=positive, default=10)
    given = parser.parse_args()
    if given.serve:
        if given.ray:
            serve_on_ray(given.port)
        uvicorn.run(application(events), port=given.port, access_log=False, lifespan="off")
        return
    with ExitStack() as stack:
        urls = [stack.enter_context(server(how, READY, [__file__])) for how in ([], ["--ray"])]
        first = pairs((urls[0], urls[1]), Random(input=32, output=EVENTS), 20, 1, given.rounds, first_token)
    print("first token, ms:", ", ".join(f"{a:.2f}|{b:.2f}" for a, b in first))
    print(f"  more by Serve, ms: {quartiles([by_serve - alone for alone, by_serve in first])}")


if __name__ == "__main__":
    run_tool(main)
