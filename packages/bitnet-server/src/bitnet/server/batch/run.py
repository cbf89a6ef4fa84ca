"""Answers the rows of a batch with the server's application, in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from bitnet.core import Model
from bitnet.server.batch.rows import Answers, Row
from bitnet.server.http.app import App
from bitnet.server.models.service import Source
from bitnet.server.models.settings import Settings
from bitnet.server.models.state import State

AHEAD = 4
"""Number of requests that wait while others run, so that a place is never empty."""


@dataclass(slots=True)
class Outcome:
    """What became of a batch.

    Attributes:
        refused: Number of rows whose answer is an error.
        tokens: Number of generated tokens.
        seconds: Time from the first request to the last answer.
    """

    rows: int = 0
    refused: int = 0
    tokens: int = 0
    seconds: float = 0.0


async def run_batch(
    model: Model, rows: Sequence[Row], answers: Answers, *, parallel: int, progress: Callable[[int, int], None]
) -> Outcome:
    """Answer rows, at most ``parallel`` at a time, in any order. An error is the row's answer, and the batch goes on.

    Args:
        progress: Called with the number of answered rows and of all.
    """
    settings = Settings(max_seqs=parallel, max_queue=AHEAD, page=False, max_stored=0)
    state = State([Source((model.path.stem,), model.path, lambda: model, reloads=False)], settings)
    state.pool.open()
    outcome, begun, waiting = Outcome(), time.perf_counter(), iter(rows)
    app: Any = App(state)
    transport = httpx.ASGITransport(app)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as client:

            async def work() -> None:
                for row in waiting:  # shared by all workers
                    answer = await client.post(row.path, json=row.body)
                    body = answer.json()
                    answers.add(row, answer.status_code, body)
                    outcome.rows += 1
                    outcome.refused += answer.status_code != 200
                    outcome.tokens += _tokens(body)
                    progress(outcome.rows, len(rows))

            await asyncio.gather(*(work() for _ in range(min(state.shared.places + AHEAD, len(rows)))))
    finally:
        state.close()
    outcome.seconds = time.perf_counter() - begun
    return outcome


def _tokens(body: Any) -> int:
    usage = body.get("usage") or {}
    return int(usage.get("completion_tokens", usage.get("output_tokens", 0)))
