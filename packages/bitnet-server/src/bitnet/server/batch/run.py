"""Answers the rows of a batch, several at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
Ask = Callable[[str, Any, bytes], Awaitable[tuple[int, dict[str, Any]]]]
"""Has the application answer a request, without HTTP: its path, its body and the owner of what is made; returns status
and body of the answer."""


@dataclass(slots=True)
class Outcome:
    """What has become of the rows of a batch so far.

    Attributes:
        rows: Number of answered rows.
        refused: Number of rows whose answer is an error.
        input_tokens: Number of prompt tokens.
        tokens: Number of generated tokens.
    """

    rows: int = 0
    refused: int = 0
    input_tokens: int = 0
    tokens: int = 0

    def count(self, status: int, body: dict[str, Any]) -> None:
        """Count an answer."""
        usage = (body or {}).get("usage") or {}
        self.rows += 1
        self.refused += status != 200
        self.input_tokens += int(usage.get("prompt_tokens", usage.get("input_tokens", 0)))
        self.tokens += int(usage.get("completion_tokens", usage.get("output_tokens", 0)))


async def run_rows(rows: Iterable[T], answer: Callable[[T], Awaitable[None]], workers: int) -> None:
    """Have all rows answered, ``workers`` at a time, in any order. If this is cancelled or an answer raises, the other
    ones are cancelled."""
    waiting = iter(rows)

    async def work() -> None:
        for row in waiting:  # shared by all workers
            await answer(row)

    tasks = [asyncio.ensure_future(work()) for _ in range(workers)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
