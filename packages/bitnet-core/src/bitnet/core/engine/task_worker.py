"""A worker that needs no threads: a task of the caller's event loop steps each engine, as in a browser.

While the device computes, other tasks run. Between two steps they get a turn, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from bitnet.core.engine.engine import Engine
from bitnet.core.engine.replica import Replica
from bitnet.core.engine.worker import Worker
from bitnet.core.errors import InvalidInputError


class TaskWorker(Worker):
    """A :class:`~bitnet.core.engine.worker.Worker` whose methods are called in the thread of one event loop.

    An engine's task begins with a request and ends when there is nothing left to do.
    """

    def __init__(self, *engines: Engine, max_queue: int | None = None, max_queue_tokens: int | None = None) -> None:
        super().__init__(*engines, max_queue=max_queue, max_queue_tokens=max_queue_tokens)
        self._tasks: dict[Replica, asyncio.Task[None]] = {}

    def check_thread(self) -> None:
        raise InvalidInputError(
            "the model computes in this thread's event loop, which waiting would stop.",
            hint="Write `await model.stream(...)`, `async for chunk in model.stream(...)`, "
            "`await model.score_async(...)` or `await model.embed_async(...)`.",
        )

    @property
    def runs_this(self) -> bool:
        try:
            return asyncio.current_task() in self._tasks.values()
        except RuntimeError:  # no event loop runs
            return False

    def later(self, call: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(call)

    def _begin(self, replica: Replica) -> None:
        if replica not in self._tasks:
            self._tasks[replica] = asyncio.get_running_loop().create_task(self._run(replica))

    async def _run(self, replica: Replica) -> None:
        with self._stepping(replica) as deliver:
            try:
                while self._end is None and replica.has_work:
                    self._take_in(replica)
                    await replica.engine.advance_in_task(deliver)
                    await asyncio.sleep(0)
            except asyncio.CancelledError:
                raise InvalidInputError("the event loop in which the model computed has ended.") from None
            finally:
                del self._tasks[replica]
