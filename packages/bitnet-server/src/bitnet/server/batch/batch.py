"""A batch of the server's, as it is on the disk and as clients see it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bitnet.server.batch.run import Outcome
from bitnet.server.batch.store import Store

WINDOW_SECONDS = 86_400
"""Seconds within which a batch must be answered: the only window that OpenAI's API has."""
RUNNING = ("validating", "in_progress", "finalizing", "cancelling")
"""States of a batch that has not ended."""


@dataclass(slots=True)
class Batch:
    """A batch.

    Attributes:
        folder: Name of the folder of its owner.
        created: Time in nanoseconds since 1970, by which batches are ordered.
        output, failures: Ids of the files of answers and of errors.
        seconds: For how long these are kept; None: as long as others.
        times: When it came to each state, in seconds since 1970.
        errors: Why it is not answered.
        outcome: Its rows so far.
        total: Number of its rows, once they have been read.
    """

    id: str
    folder: str
    endpoint: str
    input: str
    output: str
    failures: str
    created: int
    metadata: dict[str, str] | None = None
    seconds: int | None = None
    status: str = "validating"
    times: dict[str, int] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)
    outcome: Outcome = field(default_factory=Outcome)
    total: int = 0

    def path(self, folder: Path) -> Path:
        """Where it is described, in the folder of all files."""
        return folder / self.folder / f"{self.id}.json"

    @property
    def expires(self) -> int:
        """Time at which it ends, in seconds since 1970."""
        return self.created // 10**9 + WINDOW_SECONDS

    def document(self, store: Store) -> dict[str, Any]:
        """It as OpenAI's API describes batches."""
        done, tokens = self.outcome, self.outcome.input_tokens + self.outcome.tokens
        states = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "input_file_id": self.input,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": self.output if store.has(self.output) else None,
            "error_file_id": self.failures if store.has(self.failures) else None,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "created_at": self.created // 10**9,
            "expires_at": self.expires,
            **{f"{state}_at": self.times.get(state) for state in states},
            "request_counts": {"total": self.total, "completed": done.rows - done.refused, "failed": done.refused},
            "usage": {
                "input_tokens": done.input_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": done.tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": tokens,
            },
            "metadata": self.metadata,
        }


def read_batch(path: Path) -> Batch | None:
    """The batch that a file describes; None: it describes none."""
    try:
        found = json.loads(path.read_bytes())
        return Batch(**{**found, "outcome": Outcome(**found["outcome"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
