"""The application without HTTP, over one model: what answers batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from bitnet.core import Model
from bitnet.server.batch.rows import Row
from bitnet.server.batch.run import run_rows
from bitnet.server.http.app import App
from bitnet.server.models.service import Source
from bitnet.server.models.settings import Settings
from bitnet.server.models.state import State

AHEAD = 4
"""Number of requests that wait while others run, so that a place is never empty."""


@contextmanager
def offline(model: Model, parallel: int) -> Iterator[App]:
    """An application over a model, which runs ``parallel`` requests at a time on each device."""
    settings = Settings(max_seqs=parallel, page=False, max_stored=0)
    state = State([Source((model.path.stem,), model.path, lambda: model, reloads=False)], settings)
    state.pool.open()
    try:
        yield App(state)
    finally:
        state.close()


async def answer_rows(app: App, rows: Iterable[Row], done: Callable[[str, int, dict[str, Any]], None]) -> None:
    """Answer rows, whatever model they name, in any order. An error is its row's answer.

    Args:
        done: Called with each row's id, and status and body of its answer.
    """

    async def answer(row: Row) -> None:
        body = {name: value for name, value in row.body.items() if name != "model"}
        done(row.id, *await app.ask(row.path, body))

    await run_rows(rows, answer, app.state.shared.places + AHEAD)
