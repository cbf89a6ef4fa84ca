"""A bounded in-memory store of responses, which later ``/v1/responses`` requests can continue."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bitnet.server.request.call import to_json

SECONDS = 3600.0
"""Seconds for which a response is kept."""
MAX_BYTES = 64 << 20
"""Maximum bytes of all entries as JSON."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A kept response.

    Attributes:
        owner: The key that made it, as :attr:`Call.owner <bitnet.server.request.call.Call.owner>` has it.
        messages: The conversation including the response, without instructions, which every request sends again.
        items: The request's input, as items with ids.
        size: Bytes of the response and its conversation as JSON.
        until: Time of expiry, on :func:`time.monotonic`'s clock.
    """

    owner: bytes
    response: dict[str, Any]
    messages: Sequence[dict[str, Any]]
    items: Sequence[dict[str, Any]]
    size: int
    until: float


class Stored:
    """Stored responses, each of which belongs to the key that made it; to other keys it does not exist.

    If there are too many or they are too large, the oldest is dropped. It may be used from any thread.

    Args:
        max_entries: Maximum number of responses; 0: none.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            self._forget_old()
            return len(self._entries)

    def put(
        self,
        owner: bytes,
        response: dict[str, Any],
        messages: Sequence[dict[str, Any]],
        items: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Store a response, or replace it by a later state of it."""
        size = len(to_json([response, messages, items]))
        with self._lock:
            self._delete(response["id"])
            until = time.monotonic() + SECONDS
            self._entries[response["id"]] = Entry(owner, response, messages, items, size, until)
            self._bytes += size
            self._forget_old()

    def get(self, owner: bytes, id: str) -> Entry | None:
        with self._lock:
            self._forget_old()
            entry = self._entries.get(id)
        return None if entry is None or entry.owner != owner else entry

    def delete(self, id: str) -> None:
        with self._lock:
            self._delete(id)

    def _delete(self, id: str) -> None:
        entry = self._entries.pop(id, None)
        self._bytes -= 0 if entry is None else entry.size

    def _forget_old(self) -> None:
        """Drop expired entries. All are kept equally long, so the first expires next."""
        now = time.monotonic()
        while self._entries:
            id, first = next(iter(self._entries.items()))
            if first.until > now and len(self._entries) <= self._max_entries and self._bytes <= MAX_BYTES:
                return
            self._delete(id)
