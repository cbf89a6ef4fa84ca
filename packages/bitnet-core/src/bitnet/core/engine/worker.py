"""Many callers, one queue, and one engine or several: a thread for each steps it while there is something to do.

Steps run in threads of their own, not in a caller's, so that an interrupt (Ctrl-C) ends the caller's wait and
never a step half-way, and so that callers in different threads share steps.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType

from bitnet.core.engine.blocks import prefix_digests
from bitnet.core.engine.engine import Engine, never
from bitnet.core.engine.replica import Group, Replica
from bitnet.core.engine.results import Update
from bitnet.core.engine.sequence import TokenSequence
from bitnet.core.engine.ticket import Ticket, wake
from bitnet.core.errors import DeviceError, InvalidInputError, QueueFullError
from bitnet.core.support.log import logger


@dataclass(frozen=True, slots=True)
class Load:
    """What there is to do now; blocks are those of all replicas that answer.

    Attributes:
        running: Requests that take part in steps.
        waiting: Requests that wait for a place, and those preempted.
        waiting_tokens: Prompt tokens of the waiting ones.
        kv_blocks: Blocks of the KV cache.
        kv_used: Blocks that requests hold.
        kv_cached: Blocks that no request holds but whose content can be used again.
        block_size: Positions in a block.
        lost: Devices that have failed, and whose requests the others answer.
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
    """Owns engines of the same model: nothing else may call them, but for their ``prepare`` methods.

    With one engine, each request goes to its queue at once. With several, a request waits here until one has a place,
    and goes where the fewest tokens are left to compute: where its prefix is cached, or else where least waits. When a
    device fails, the others answer its requests, from where they are.

    Args:
        engines: Replicas: the same model, limits and context.
        max_queue: Requests that may wait besides those that run; None: any number.
        max_queue_tokens: Prompt tokens that may wait; None: any number. One request may always wait.
    """

    def __init__(self, *engines: Engine, max_queue: int | None = None, max_queue_tokens: int | None = None) -> None:
        for name, most in (("max_queue", max_queue), ("max_queue_tokens", max_queue_tokens)):
            if most is not None and most < 0:
                raise InvalidInputError(f"{name} is {most}; it must be an integer ≥ 0, or None.")
        self.engine = engines[0]
        """Prepares sequences, for all the replicas."""
        self.replicas = tuple(Replica(engine) for engine in engines)
        self._max_queue, self._max_queue_tokens = max_queue, max_queue_tokens
        self._changed = threading.Condition()
        self._queue: deque[Group] = deque()
        self._tickets: dict[int, Ticket] = {}
        self._end: BaseException | None = None
        self._origin: TracebackType | None = None
        self._process: int | None = None

    def submit(self, sequence: TokenSequence) -> Ticket:
        """Hand a prepared sequence to an engine.

        Raises:
            QueueFullError: As many requests or prompt tokens wait as may.
            BitNetError: The worker is closed, its last engine failed, or the process with its threads was forked.
        """
        return self.submit_all([[sequence]])[0]

    def submit_all(self, prompts: Sequence[Sequence[TokenSequence]]) -> list[Ticket]:
        """Hand several prompts' sequences over at the same time, so that they share steps from the first on.

        Returns:
            A ticket for each sequence: those of the first prompt, then the next.

        Raises:
            QueueFullError, BitNetError: As for :meth:`submit`. Either all are taken or none.
            InvalidInputError: They are more than may ever run and wait.
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
        """What there is to do now."""
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

    @property
    def busy(self) -> bool:
        """Whether any request runs or waits."""
        return bool(self._tickets)

    def _alive(self) -> list[Replica]:
        return [replica for replica in self.replicas if not replica.lost]

    def _waiting(self) -> list[TokenSequence]:
        return [ticket.sequence for ticket in self._tickets.values() if ticket.sequence.table is None]

    def _check_room(self, prompts: Sequence[Sequence[TokenSequence]]) -> None:
        """Raise QueueFullError where ``prompts`` are too many for the queue, InvalidInputError where they always would
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
                    f"{len(self._tickets)} requests run or wait; {most} may.",
                    hint="Ask again later, or raise max_queue.",
                )
        if self._max_queue_tokens is not None and (waiting := self._waiting()):
            tokens = sum(len(s.tokens) for s in waiting)
            if tokens + sum(len(sequences[0].tokens) for sequences in prompts) > self._max_queue_tokens:
                raise QueueFullError(
                    f"{tokens} prompt tokens wait; {self._max_queue_tokens} may.",
                    hint="Ask again later, or raise max_queue_tokens.",
                )

    def check_here(self) -> None:
        """Raise InvalidInputError in a fork of the process that owns the thread."""
        if self.elsewhere:
            raise InvalidInputError(
                "the model was used before this process was forked.", hint="Load it, or use it first, after that."
            )

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
        """Why no more requests are taken; anew from where it came, as each ``raise`` adds its callers to an error."""
        assert self._end is not None
        return self._end.with_traceback(self._origin)

    @property
    def elsewhere(self) -> bool:
        """Whether this is a fork of the process that has the threads. Locks that it held then are never free here."""
        return self._process is not None and os.getpid() != self._process

    @property
    def runs_this(self) -> bool:
        """Whether the caller is a thread that steps an engine; it cannot wait for its own end."""
        thread = threading.current_thread()
        return any(thread is replica.thread or replica.engine.works_in(thread) for replica in self.replicas)

    def close(self) -> None:
        """Finish the steps that run and end every request with an error. Closing twice is allowed."""
        self._stop(InvalidInputError("the model is closed."))
        for replica in self.replicas:
            # An interrupt may have come before it was started.
            if replica.thread is not None and replica.thread.is_alive():
                replica.thread.join()
        with self._changed:  # the frames that its error came through hold this worker, and all that they hold with it
            self._origin = None
            if self._end is not None:
                self._end.with_traceback(None)

    def _stop(self, why: BaseException) -> None:
        """Take no more requests, and end those of the queue; each replica's thread ends its own."""
        with self._changed:
            if self._end is None:
                self._end, self._origin = why, why.__traceback__
            queued = [self._tickets.pop(s.number) for group in self._queue for s in group.sequences]
            self._queue.clear()
            self._changed.notify_all()
        wake([ticket.put(None) for ticket in queued])

    def _group(self, sequences: Sequence[TokenSequence]) -> Group:
        """One prompt's sequences; where there is a choice of replicas, with what tells which one has its prefix."""
        chain = prefix_digests(sequences[0].tokens, self.engine.kv.block_size) if len(self.replicas) > 1 else ()
        return Group(list(sequences), tuple(chain))

    def _dispatch(self) -> None:
        """Send what waits to the replicas, in order of arrival, as long as one has a place. The lock is held."""
        alive = self._alive()
        while self._queue:
            free = alive if len(alive) == 1 else [replica for replica in alive if not replica.full]
            if not free:
                break
            group = self._queue.popleft()
            replica = free[0] if len(free) == 1 else min(free, key=lambda replica: replica.cost(group))
            replica.take(group)
            if replica.thread is None:
                self._process = os.getpid()
                replica.thread = threading.Thread(
                    target=self._loop, args=(replica,), name=f"bitnet-engine-{replica.engine.device}", daemon=True
                )
                replica.thread.start()
        self._changed.notify_all()

    def _loop(self, replica: Replica) -> None:
        engine, deliver = replica.engine, partial(self._deliver, replica)
        engine.interrupted = lambda: bool(self._end or replica.added or replica.cancelled)
        try:
            while self._take_in(replica):
                engine.advance(deliver)
        except BaseException as error:
            if not self._passed_on(replica, error):
                self._stop(error)
        engine.interrupted = never  # or worker and engine would hold each other
        engine.close()
        with self._changed:
            tickets = [self._tickets.pop(number) for number in replica.held]
            replica.held.clear()
        wake([ticket.put(None) for ticket in tickets])

    def _passed_on(self, replica: Replica, error: BaseException) -> bool:
        """Whether the requests of a replica whose device failed are the others' now: ahead of what waits."""
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
        logger.warning("A device was lost: %s Its %d requests are answered by %s.", error, count, names)
        return True

    def _take_in(self, replica: Replica) -> bool:
        """Wait for something to do and bring in what callers asked for; False once closed."""
        engine = replica.engine
        with self._changed:
            while not (self._end or replica.added or replica.cancelled or engine.busy):
                self._changed.wait()
            if self._end is not None:
                return False
            added, replica.added = replica.added, []
            cancelled, replica.cancelled = replica.cancelled, []
        for group in added:
            engine.add(group.sequences)
        self._deliver(replica, [update for s in cancelled if (update := engine.cancel(s)) is not None])
        return True

    def _deliver(self, replica: Replica, updates: Sequence[Update]) -> None:
        with self._changed:
            tickets = [self._tickets[update.sequence] for update in updates]
            ended = [update.sequence for update in updates if update.result is not None]
            for number in ended:
                del self._tickets[number], replica.held[number]
            if ended and self._queue:
                self._dispatch()
        wake([ticket.put(update) for ticket, update in zip(tickets, updates, strict=True)])
