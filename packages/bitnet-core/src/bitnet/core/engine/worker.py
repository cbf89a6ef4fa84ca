"""Connects many callers to one or more engines through a queue; each engine is stepped by a thread of its own.

Steps do not run in callers' threads, so that an interrupt (Ctrl-C) ends a caller's wait but never half a step, and so
that callers in different threads share steps.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType

from bitnet.core.engine.blocks import prefix_digests
from bitnet.core.engine.engine import Engine, never
from bitnet.core.engine.replica import PromptGroup, Replica
from bitnet.core.engine.results import Update
from bitnet.core.engine.sequence import TokenSequence
from bitnet.core.engine.ticket import Ticket, wake
from bitnet.core.errors import DeviceError, InvalidInputError, QueueFullError
from bitnet.core.support.log import logger


@dataclass(frozen=True, slots=True)
class Load:
    """The current load. Blocks are summed over all replicas that have not failed.

    Attributes:
        running: Requests that take part in steps.
        waiting: Requests that wait for a place, including preempted ones.
        waiting_tokens: Prompt tokens of the waiting requests.
        kv_blocks: Blocks of the KV cache.
        kv_used: Blocks that requests hold.
        kv_cached: Blocks that no request holds but whose content can be reused.
        block_size: Positions in a block.
        lost: Names of failed devices, whose requests moved to the others.
    """

    running: int
    waiting: int
    waiting_tokens: int
    kv_blocks: int
    kv_used: int
    kv_cached: int
    block_size: int
    lost: tuple[str, ...] = ()


class Worker:
    """Owns engines of the same model. Others may use only the engines' preparers.

    With one engine, each request goes to its queue at once. With several, a request waits here until one has a place.
    It goes where the fewest tokens must be computed first: where its prefix is cached, or where the load is lowest.
    When a device fails, the others continue its requests from their current tokens.

    Args:
        engines: Replicas: the same model, limits and context.
        max_queue: Maximum number of requests that wait while others run; None: no limit.
        max_queue_tokens: Maximum number of waiting prompt tokens; None: no limit. One request may always wait.
    """

    def __init__(self, *engines: Engine, max_queue: int | None = None, max_queue_tokens: int | None = None) -> None:
        for name, most in (("max_queue", max_queue), ("max_queue_tokens", max_queue_tokens)):
            if most is not None and most < 0:
                raise InvalidInputError(f"{name} is {most}; it must be an integer ≥ 0, or None.")
        self.engine = engines[0]
        """Prepares sequences for all replicas."""
        self.replicas = tuple(Replica(engine) for engine in engines)
        self._max_queue, self._max_queue_tokens = max_queue, max_queue_tokens
        self._changed = threading.Condition()
        self._queue: deque[PromptGroup] = deque()
        self._tickets: dict[int, Ticket] = {}
        self._end: BaseException | None = None
        self._origin: TracebackType | None = None
        self._process: int | None = None

    def submit(self, sequence: TokenSequence) -> Ticket:
        """Hand a prepared sequence to an engine.

        Raises:
            QueueFullError: The queue has reached its limit of requests or prompt tokens.
            BitNetError: The worker is closed, its last engine failed, or the process with its threads was forked.
        """
        return self.submit_all([[sequence]])[0]

    def submit_all(self, prompts: Sequence[Sequence[TokenSequence]]) -> list[Ticket]:
        """Submit the sequences of several prompts at the same time, so that they share steps from the first one on.

        Returns:
            A ticket for each sequence: those of the first prompt, then the next.

        Raises:
            QueueFullError, BitNetError: As for :meth:`submit`. Either all are accepted or none.
            InvalidInputError: There are more than may ever run and wait at the same time.
        """
        self.check_here()
        groups = [self._group(sequences) for sequences in prompts]
        with self._changed:
            if self._end is not None:
                raise self.end()
            self._check_room(prompts)
            tickets = [Ticket(self, sequence) for group in groups for sequence in group.sequences]
            self._tickets.update((ticket.sequence.number, ticket) for ticket in tickets)
            self._queue += groups
            self._dispatch()
        return tickets

    def load(self) -> Load:
        """The current load."""
        with self._changed:
            waiting = self._waiting()
            running = len(self._tickets) - len(waiting)
            pools = [replica.engine.pool for replica in self._alive()]
            lost = tuple(replica.engine.device for replica in self.replicas if replica.lost)
        return Load(
            running=running,
            waiting=len(waiting),
            waiting_tokens=sum(len(s.tokens) for s in waiting),
            kv_blocks=sum(pool.size for pool in pools),
            kv_used=sum(pool.size - pool.available for pool in pools),
            kv_cached=sum(pool.idle for pool in pools),
            block_size=self.engine.kv.block_size,
            lost=lost,
        )

    def cached_blocks(self) -> list[bytes]:
        """The digests of the KV blocks whose content can be shared, on any device that has not failed."""
        return [digest for replica in self._alive() for digest in replica.engine.pool.contents()]

    @property
    def busy(self) -> bool:
        """Whether any request runs or waits."""
        return bool(self._tickets)

    def _alive(self) -> list[Replica]:
        return [replica for replica in self.replicas if not replica.lost]

    def _waiting(self) -> list[TokenSequence]:
        return [ticket.sequence for ticket in self._tickets.values() if ticket.sequence.placement.table is None]

    def _check_room(self, prompts: Sequence[Sequence[TokenSequence]]) -> None:
        """Raise QueueFullError if ``prompts`` are too many for the queue now, InvalidInputError if they always would
        be. A prompt's tokens count once.
        """
        if self._max_queue is not None:
            most = sum(replica.engine.limits.max_seqs for replica in self._alive()) + self._max_queue
            count = sum(map(len, prompts))
            if count > most:
                raise InvalidInputError(
                    f"this asks for {count} generations; at most {most} may run and wait.",
                    hint="Ask for fewer, or raise max_queue (--max-queue).",
                )
            if len(self._tickets) + count > most:
                raise QueueFullError(
                    f"the queue is full: {len(self._tickets)} requests run or wait, and the limit is {most}.",
                    hint="Ask again later, or raise max_queue.",
                )
        if self._max_queue_tokens is not None and (waiting := self._waiting()):
            tokens = sum(len(s.tokens) for s in waiting)
            if tokens + sum(len(sequences[0].tokens) for sequences in prompts) > self._max_queue_tokens:
                raise QueueFullError(
                    f"the queue is full: {tokens} prompt tokens wait, and the limit is {self._max_queue_tokens}.",
                    hint="Ask again later, or raise max_queue_tokens.",
                )

    def check_here(self) -> None:
        """Raise InvalidInputError in a fork of the process that owns the thread."""
        if self.elsewhere:
            raise InvalidInputError(
                "the model was used before this process was forked.", hint="Load the model in the new process."
            )

    def check_thread(self) -> None:
        """Raise InvalidInputError where a thread's wait would never end."""
        self.check_here()

    def cancel(self, sequence: TokenSequence) -> None:
        """End a sequence if it has not ended."""
        with self._changed:
            for group in self._queue:
                if sequence in group.sequences:
                    group.sequences.remove(sequence)
                    if not group.sequences:
                        self._queue.remove(group)
                    wake([self._tickets.pop(sequence.number).put(sequence.end("cancelled"))])
                    return
            for replica in self.replicas:
                if sequence.number in replica.held:
                    replica.cancelled.append(sequence)
                    self._changed.notify_all()

    def end(self) -> BaseException:
        """A fresh copy of the error for which no more requests are accepted, as each ``raise`` extends a traceback."""
        assert self._end is not None
        return self._end.with_traceback(self._origin)

    @property
    def elsewhere(self) -> bool:
        """Whether this is a fork of the process with the threads. Locks held at the fork are never released here."""
        return self._process is not None and os.getpid() != self._process

    @property
    def runs_this(self) -> bool:
        """Whether the caller is a thread or task that steps an engine; it cannot wait for its own end."""
        thread = threading.current_thread()
        return any(thread is replica.thread or replica.engine.works_in(thread) for replica in self.replicas)

    def later(self, call: Callable[[], None]) -> None:
        """Have something done that a thread or task which steps an engine cannot do itself."""
        threading.Thread(target=call, name="bitnet-close").start()

    def close(self) -> None:
        """Finish the current steps and end every request with an error. Closing twice is allowed."""
        self._stop(InvalidInputError("the model is closed."))
        for replica in self.replicas:
            # An interrupt may have prevented its start.
            if replica.thread is not None and replica.thread.is_alive():
                replica.thread.join()
        with self._changed:  # the error's traceback refers to this worker and to everything its frames hold
            self._origin = None
            if self._end is not None:
                self._end.with_traceback(None)

    def _stop(self, why: BaseException) -> None:
        """Accept no more requests and end those in the queue; each replica's thread ends its own."""
        with self._changed:
            if self._end is None:
                self._end, self._origin = why, why.__traceback__
            queued = [self._tickets.pop(s.number) for group in self._queue for s in group.sequences]
            self._queue.clear()
            self._changed.notify_all()
        wake([ticket.put(None) for ticket in queued])

    def _group(self, sequences: Sequence[TokenSequence]) -> PromptGroup:
        """One prompt's sequences; if there are several replicas, with the digests that find its prefix in their
        caches."""
        chain = prefix_digests(sequences[0].tokens, self.engine.kv.block_size) if len(self.replicas) > 1 else ()
        return PromptGroup(list(sequences), tuple(chain))

    def _dispatch(self) -> None:
        """Send waiting requests to replicas, in order of arrival, while one has a place. The caller holds the lock."""
        alive = self._alive()
        while self._queue:
            free = alive if len(alive) == 1 else [replica for replica in alive if not replica.full]
            if not free:
                break
            group = self._queue.popleft()
            replica = free[0] if len(free) == 1 else min(free, key=lambda replica: replica.cost(group))
            replica.take(group)
            self._begin(replica)
        self._changed.notify_all()

    def _begin(self, replica: Replica) -> None:
        """Have a replica's engine stepped from now on. The caller holds the lock."""
        if replica.thread is None:
            self._process = os.getpid()
            replica.thread = threading.Thread(
                target=self._loop, args=(replica,), name=f"bitnet-engine-{replica.engine.device}", daemon=True
            )
            replica.thread.start()

    def _loop(self, replica: Replica) -> None:
        with self._stepping(replica) as deliver:
            while self._wait(replica):
                self._take_in(replica)
                replica.engine.advance(deliver)

    @contextmanager
    def _stepping(self, replica: Replica) -> Iterator[Callable[[Sequence[Update]], None]]:
        """Around the steps of an engine; gives what delivers their results. Ends the replica's requests with the
        engine."""
        engine = replica.engine
        engine.interrupted = lambda: bool(self._end or replica.added or replica.cancelled)
        try:
            yield partial(self._deliver, replica)
        except BaseException as error:
            if not self._passed_on(replica, error):
                self._stop(error)
        engine.interrupted = never  # breaks the reference cycle of worker and engine
        engine.close()
        with self._changed:
            tickets = [self._tickets.pop(number) for number in replica.held]
            replica.held.clear()
        wake([ticket.put(None) for ticket in tickets])

    def _passed_on(self, replica: Replica, error: BaseException) -> bool:
        """Move a failed replica's requests to the others, ahead of waiting ones; return whether that was possible."""
        with self._changed:
            replica.lost = isinstance(error, DeviceError)
            others = self._alive()
            if self._end is not None or not others or not replica.lost:
                return False
            groups = [self._group(sequences) for sequences in replica.engine.surrender()] + replica.added
            replica.added = []
            replica.held.clear()
            self._queue.extendleft(reversed(groups))
            for sequence in replica.cancelled:
                self.cancel(sequence)
            self._dispatch()
        names = ", ".join(other.engine.device for other in others)
        count = sum(len(group.sequences) for group in groups)
        logger.warning("A device was lost: %s Its %d requests continue on %s.", error, count, names)
        return True

    def _wait(self, replica: Replica) -> bool:
        """Wait for work; False once closed."""
        with self._changed:
            while not (self._end or replica.has_work):
                self._changed.wait()
            return self._end is None

    def _take_in(self, replica: Replica) -> None:
        """Pass callers' requests to the engine."""
        engine = replica.engine
        with self._changed:
            added, replica.added = replica.added, []
            cancelled, replica.cancelled = replica.cancelled, []
        for group in added:
            engine.add(group.sequences)
        self._deliver(replica, [update for s in cancelled if (update := engine.cancel(s)) is not None])

    def _deliver(self, replica: Replica, updates: Sequence[Update]) -> None:
        with self._changed:
            tickets = [self._tickets[update.sequence] for update in updates]
            ended = [update.sequence for update in updates if update.result is not None]
            for number in ended:
                del self._tickets[number], replica.held[number]
            if ended and self._queue:
                self._dispatch()
        wake([ticket.put(update) for ticket, update in zip(tickets, updates, strict=True)])
