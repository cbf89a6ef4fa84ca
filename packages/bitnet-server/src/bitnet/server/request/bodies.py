"""Bodies of requests: what they may cost together, and where large ones are read.

A body costs its bytes and what is made of its parts, from when they arrive until its request ends. All requests share
one budget. The first :data:`SMALL` bytes of each body are taken in any case, so that small requests get through when
large bodies, or bodies that never end, have used the budget up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from bitnet.server.request import bounded_json
from bitnet.server.request.errors import RequestError

T = TypeVar("T")

SMALL = 1 << 16
"""Bytes of a body that are always taken, and up to which a body is read in the event loop, in about a millisecond."""
BUDGET = 64 << 20
"""Minimum bytes that all bodies together may cost."""
BODIES = 4
"""Number of bodies of the maximum size that the budget holds at least."""
ITEM_BYTES, ENTRY_BYTES = 32, 128
"""Bytes of memory for an element and for an object, list or member, about."""


class Bodies:
    """The budget of all bodies, and the thread in which large ones are read.

    One thread is enough: reading holds Python's lock most of the time, and several would only need more memory at once.

    Args:
        max_body: Maximum bytes of one body.
    """

    def __init__(self, max_body: int) -> None:
        self.max_body = max_body
        self.left = max(BUDGET, BODIES * max_body)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bitnet-bodies")

    async def in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)


class Body:
    """The body of one request.

    Attributes:
        bodies: The budget that it shares.
        size: Bytes that have arrived.
    """

    def __init__(self, bodies: Bodies) -> None:
        self.bodies = bodies
        self._data = bytearray()
        self._count = bounded_json.Count()
        self._taken = 0
        self.size = 0

    @property
    def large(self) -> bool:
        """Whether it must not be read in the event loop."""
        return self.size > SMALL

    def check_size(self, size: int) -> None:
        """Refuse a body of so many bytes if that is too large.

        Raises:
            RequestError: It is.
        """
        if size > (limit := self.bodies.max_body):
            raise RequestError(413, f"The body is larger than the {limit:,} bytes that are allowed.")

    async def add(self, piece: bytes) -> None:
        """Add the next piece.

        Raises:
            RequestError: The body is too large, has too many parts, or does not fit the budget now. What it took is
                free at once, so that bodies that arrive together do not all refuse each other.
        """
        try:
            self.check_size(self.size + len(piece))
            for at in range(0, len(piece), bounded_json.STRIDE):
                if at:
                    await asyncio.sleep(0)
                self._add(piece[at : at + bounded_json.STRIDE])
        except RequestError:
            self.release()
            raise

    def _add(self, piece: bytes) -> None:
        self._data += piece
        self.size += len(piece)
        try:
            self._count.feed(piece)
        except bounded_json.TooComplexError as error:
            raise RequestError(413, f"The body {error}.") from None
        except ValueError as error:
            raise not_json(error) from None
        count = self._count
        cost = self.size + ITEM_BYTES * count.items + ENTRY_BYTES * count.entries - SMALL
        if (more := cost - self._taken) > 0:
            if more > self.bodies.left:
                raise RequestError(
                    503,
                    "Other requests' bodies take up the memory for large bodies. Try again later.",
                    code="bodies_full",
                    retry_after=1,
                )
            self.bodies.left -= more
            self._taken = cost

    def release(self) -> None:
        """Give back what the body took of the budget."""
        self.bodies.left += self._taken
        self._taken, self._data = 0, bytearray()

    def value(self) -> object:
        """The body as JSON; its bytes are dropped.

        Raises:
            RequestError: It is not JSON.
        """
        data, self._data = self._data, bytearray()
        try:
            return bounded_json.parse(data)
        except ValueError as error:
            raise not_json(error) from None


def not_json(error: ValueError) -> RequestError:
    return RequestError(400, f"The body is not JSON: {error}.")
