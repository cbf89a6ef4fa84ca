"""Continuous batching: chooses the sequences and tokens of the next step.

Rules, in order:

1. Every decoding sequence, which needs one more position, gets it. If the cache is full, the sequence admitted last
  releases its blocks and waits at the head of the queue to be recomputed; blocks still cached by then are reused like
  any prefix.
2. Waiting sequences are admitted, first come, first served, while there is a place in the batch and their whole prompt
  fits the cache with a spare block for each running sequence. So prefill never runs out of blocks. Layers with windows
  need room for the window and the largest chunk only: blocks behind a window are released before each step. One whose
  beginning a running prompt is computing waits for that, and keeps its place meanwhile.
3. The rest of the token budget goes to prompts in chunks: an even share to the oldest, so that it does not starve, then
  as much as they need to the shortest. So each first token comes as early as possible. While sequences decode, prompts
  get as many tokens as the device computes in a set time, or a quarter of the budget if that is more. This bounds the
  time between two tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from bitnet.core.engine.blocks import BlockPool, BlockTable, cached_prefix
from bitnet.core.engine.common_prefix import Leader, find_leader
from bitnet.core.engine.drafter import Drafter
from bitnet.core.engine.drafts import Drafts
from bitnet.core.engine.pacing import Pace
from bitnet.core.engine.sequence import TokenSequence
from bitnet.core.engine.states import SequenceStates, StatePool
from bitnet.core.hal import Limits


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's part of a step: ``count`` tokens from position ``start`` on, and which logits are wanted.

    ``draft`` is fed after them, and its rows are wanted too; perhaps only part of it turns out to be right. The
    sequence's states are read from the entry ``state_from``, and written to ``state_to``.
    """

    sequence: TokenSequence
    start: int
    count: int
    rows: range
    draft: Sequence[int] = ()
    state_from: int = -1
    state_to: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """A step. ``repeat`` is the number of tokens that the device generates per sequence before the host sees them."""

    work: tuple[Work, ...]
    repeat: int

    @property
    def drafted(self) -> bool:
        """Whether it verifies drafts."""
        return any(item.draft for item in self.work)

    @property
    def mixed(self) -> bool:
        """Whether it computes prompts beside decoding sequences."""
        counts = [item.count for item in self.work]
        return self.repeat == 1 and max(counts) > 1 == min(counts)


MAX_FOLLOWED = 4
"""Maximum sequences whose bursts end at borders of blocks, so that each leaves snapshots while it decodes. With more,
bursts would be too short; a snapshot is then left where a burst happens to end at a border."""


def shares(wanted: list[int], budget: int) -> list[int]:
    """Split ``budget`` among prompts, given oldest first: an even share for the oldest, the rest for the shortest."""
    given = [0] * len(wanted)
    if wanted:
        given[0] = min(wanted[0], -(-budget // len(wanted)))
        budget -= given[0]
    for i in sorted(range(len(wanted)), key=wanted.__getitem__):
        more = min(wanted[i] - given[i], budget)
        given[i] += more
        budget -= more
    return given


class Scheduler:
    """Holds the waiting and running sequences, and the bookkeeping of the KV cache."""

    def __init__(
        self,
        limits: Limits,
        num_blocks: int,
        block_size: int,
        pace: Pace,
        *,
        state_entries: int = 0,
        windows: Sequence[int | None] = (None,),
        drafter: Drafter | None = None,
    ) -> None:
        self._limits, self._block_size, self._pace, self._windows = limits, block_size, pace, windows
        self.drafts = Drafts(limits, pace, drafter)
        self._waiting: deque[TokenSequence] = deque()
        self._running: list[TokenSequence] = []  # in order of admission
        self._leaders: dict[TokenSequence, Leader] = {}  # what waiting sequences follow, as of when they were looked at
        self.pool = BlockPool(num_blocks)
        self.states = StatePool(state_entries) if state_entries else None
        self._max_running = limits.max_seqs if self.states is None else min(limits.max_seqs, self.states.sequences)

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """All running and waiting sequences."""
        return (*self._running, *self._waiting)

    @property
    def busy(self) -> bool:
        """Whether any sequence runs or waits."""
        return bool(self._running or self._waiting)

    def cached(self, digests: Iterable[bytes]) -> int:
        """Positions in the cache of a prompt whose blocks have these digests. May be called from any thread."""
        usable = self._usable
        return cached_prefix(self.pool, digests, self._windows, self._block_size, usable).usable * self._block_size

    def add(self, sequences: Iterable[TokenSequence], *, first: bool = False) -> None:
        """Queue sequences; with ``first``, at the head of the queue."""
        if first:
            self._waiting.extendleft(reversed(list(sequences)))
        else:
            self._waiting.extend(sequences)

    def remove(self, sequence: TokenSequence) -> None:
        """Forget a sequence that has ended; its blocks can still be shared."""
        if sequence in self._running:
            self._running.remove(sequence)
            self._leave_cache(sequence)
        else:
            self._waiting.remove(sequence)
            self._leaders.pop(sequence, None)

    def forget(self) -> None:
        """Give up all sequences, after a failure. Their KV cache is lost, and this scheduler must not be used again."""
        for sequence in self._running:
            sequence.placement.table, sequence.placement.computed, sequence.placement.states = None, 0, None
        self._running.clear()
        self._waiting.clear()
        self._leaders.clear()

    def plan(self, max_repeat: int = 1) -> Plan | None:
        """The next step; its tokens already count as computed. None if there is nothing to do.

        Args:
            max_repeat: Maximum tokens per sequence before the host sees them, if all sequences only decode.
        """
        if self.states is not None:
            self.states.next_step(s.placement.states.source for s in self._running if s.placement.states is not None)
        for sequence in self._running:
            self._slide(sequence)
        waiting = len(self._waiting)
        work = [Work(s, s.placement.computed, 1, range(1)) for s in self._decoding()]
        for sequence in self._running:
            self._snapshot(sequence)
        if len(self._waiting) == waiting:  # the blocks of a sequence that was just preempted are for those that run
            self._admit()
        repeat = 1
        if work and len(work) == len(self._running):
            if drafted := self._drafted(work):
                work = drafted
            else:
                # Waiting sequences cannot be admitted before a running one ends, which is known only after a step.
                repeat = self._repeat(work, max(1, max_repeat // 2) if self._waiting else max_repeat)
        work += self._prefill(work)
        if self.states is not None:
            work = [self._with_states(item) for item in work]
        for item in work:
            placement = item.sequence.placement
            placement.computed += item.count
            self._table(item.sequence).record(item.sequence.tokens, placement.computed)
        return Plan(tuple(work), repeat) if work else None

    def _slide(self, sequence: TokenSequence) -> None:
        """Release the blocks behind the windows of the next token, whose content can still be shared."""
        table, computed = self._table(sequence), sequence.placement.computed
        table.record(sequence.tokens, computed)
        table.slide(computed)

    def _soon(self, sequence: TokenSequence, computed: int) -> int:
        """Positions in the cache after the next step, at most."""
        return min(sequence.target, computed + self._limits.max_tokens)

    def _decoding(self) -> list[TokenSequence]:
        """The sequences that need one more position, each with a block for it. Prompts get blocks for a chunk."""
        ready, gone = [], set()
        for sequence in tuple(self._running):
            if sequence in gone:
                continue
            computed = sequence.placement.computed
            while not self._table(sequence).reserve(sequence.target, self._soon(sequence, computed)):
                last = self._running.pop()
                self._leave_cache(last)
                self._waiting.appendleft(last)
                gone.add(last)
                if last is sequence:
                    break
            else:
                if sequence.target - computed == 1:
                    ready.append(sequence)
        return ready

    def _drafted(self, work: list[Work]) -> list[Work]:
        """The work of decoding sequences with their drafts; empty if there are none, or if plain steps are faster."""
        drafts = self.drafts.made([item.sequence for item in work])
        if not drafts or not self._reserve(work, [1 + len(draft) for draft in drafts]):
            return []
        return [
            replace(item, rows=range(1 + len(draft)), draft=draft) for item, draft in zip(work, drafts, strict=True)
        ]

    def _repeat(self, work: list[Work], most: int) -> int:
        """Number of tokens for which a step of decoding sequences can run without the host."""
        if any(item.sequence.needs_logits for item in work):
            return 1
        repeat = min(most, *(item.sequence.steps_left for item in work))
        if self.states is not None and len(work) <= MAX_FOLLOWED:  # a snapshot needs a step that ends at a border
            repeat = min(repeat, *(self._block_size - item.start % self._block_size for item in work))
        while repeat > 1 and not self._reserve(work, [repeat] * len(work)):
            repeat //= 2
        return repeat

    def _reserve(self, work: list[Work], counts: list[int]) -> bool:
        """Reserve the given number of positions from each start on. If blocks are too few, change nothing and return
        False."""
        tables = [(self._table(item.sequence), item.start + count) for item, count in zip(work, counts, strict=True)]
        if sum(table.missing(length) for table, length in tables) > self.pool.available:
            return False
        for table, length in tables:
            table.reserve(length)
        return True

    def _admit(self) -> None:
        following: list[TokenSequence] = []
        while self._waiting and len(self._running) + len(following) < self._max_running:
            sequence = self._waiting[0]
            leader = self._leaders.pop(sequence, None)
            if leader is None or not leader.computing:
                table = BlockTable(self.pool, self._block_size, self._windows)
                cached = table.reuse(sequence.tokens, sequence.first_row, self._usable)
                leader = find_leader(sequence, cached, self._running, self._block_size)
                if leader is None:
                    if not self._fits(sequence, cached, table):
                        table.release()
                        break
                    self._enter(self._waiting.popleft(), cached, table)
                    continue
                table.release()
                if (states := leader.sequence.placement.states) is not None:
                    states.borders |= {leader.length}
            self._leaders[sequence] = leader
            following.append(self._waiting.popleft())
        self._waiting.extendleft(reversed(following))

    def _fits(self, sequence: TokenSequence, cached: int, table: BlockTable) -> bool:
        """Whether there is room for a prompt beside those that run."""
        running = ((s.target, s.placement.computed, self._table(s)) for s in self._running)
        promised = sum(max(1, self._outstanding(*each)) for each in running)
        return self._outstanding(sequence.target, cached, table) + promised <= self.pool.available or not self._running

    def _enter(self, sequence: TokenSequence, cached: int, table: BlockTable) -> None:
        """Let a sequence run that has ``cached`` positions in the cache."""
        table.reserve(sequence.target, self._soon(sequence, cached))
        sequence.placement.table, sequence.placement.computed = table, cached
        if self.states is not None:
            source = self.states.use(table.last_digest) if cached else -1
            borders = frozenset((table.matched, sequence.first_row // self._block_size * self._block_size))
            sequence.placement.states = SequenceStates(self.states.allocate(), source, borders=borders)
        sequence.started(cached)
        self._running.append(sequence)

    def _usable(self, digest: bytes) -> bool:
        """Whether a prompt can go on after a cached prefix whose last block has this digest."""
        return self.states is None or self.states.holds(digest)

    def _outstanding(self, target: int, computed: int, table: BlockTable) -> int:
        """Blocks to take besides those held until a prompt is in the cache, with a token after it."""
        return table.peak(target + 1, min(self._limits.max_tokens, target + 1 - computed)) - table.held

    def _prefill(self, decoding: list[Work]) -> list[Work]:
        planned = {id(item.sequence) for item in decoding}
        prompts = [s for s in self._running if id(s) not in planned and not s.held]
        budget = self._limits.max_tokens - len(decoding)
        if decoding:
            budget = min(budget, self._pace.beside_decode)
        given = shares([s.target - s.placement.computed for s in prompts], budget)
        rows = self._limits.max_rows - len(decoding)
        work = []
        for i, (sequence, share) in enumerate(zip(prompts, given, strict=True)):
            spare = rows - (len(prompts) - i - 1)  # leave a row for each later prompt
            before_rows = max(0, sequence.first_row - sequence.placement.computed)
            count = min(share, before_rows + spare, self._until_border(sequence))
            if count > 0:
                wanted = range(before_rows, count)
                rows -= len(wanted)
                work.append(Work(sequence, sequence.placement.computed, count, wanted))
        return work

    def _until_border(self, sequence: TokenSequence) -> int:
        """Positions up to the next border after which a snapshot is wanted; the whole context if there is none."""
        states, computed = sequence.placement.states, sequence.placement.computed
        borders = () if states is None else states.borders
        most = self._limits.max_blocks * self._block_size
        return min((border - computed for border in borders if border > computed), default=most)

    def _snapshot(self, sequence: TokenSequence) -> None:
        """If a sequence's states are those at a border of blocks where a later prompt may go on, leave them there.

        That is at the wanted borders of its prompt and, while it decodes, at each border; only the last one is kept.
        """
        placement, pool = sequence.placement, self.states
        states, computed = placement.states, placement.computed
        if pool is None or states is None or states.source != states.entry or computed % self._block_size:
            return
        decodes = computed > max(states.borders)
        if not decodes and computed not in states.borders:
            return
        table = self._table(sequence)
        table.record(sequence.tokens, computed)
        if table.recorded != computed or pool.holds(digest := table.last_digest):
            return
        pool.keep(states.entry, digest)
        pool.use(digest)
        if decodes:
            if states.last is not None:
                pool.drop(states.last)
            states.last = digest
        states.entry = pool.allocate()

    def _with_states(self, item: Work) -> Work:
        """A sequence's part with its entries. A step with a draft writes a spare one, as the draft may be wrong."""
        states, pool = item.sequence.placement.states, self.states
        assert states is not None
        assert pool is not None
        source = states.source
        if item.draft:
            states.spare = pool.allocate()
            return replace(item, state_from=source, state_to=states.spare)
        states.source = states.entry
        return replace(item, state_from=source, state_to=states.entry)

    def verified(self, item: Work, accepted: int) -> None:
        """Record that a step has verified a draft, and which number of tokens it gave.

        If a part of the draft was wrong, the states after the right part are not known: those tokens are computed
        again, from the states before the step.
        """
        placement, pool = item.sequence.placement, self.states
        if pool is None or placement.states is None or placement.states.spare is None:
            return
        states, spare = placement.states, placement.states.spare
        states.spare = None
        if accepted > len(item.draft):
            spare, states.entry = states.entry, spare
            states.source = states.entry
        else:
            placement.computed = item.start
        pool.release(spare)

    def _leave_cache(self, sequence: TokenSequence) -> None:
        placement, table = sequence.placement, self._table(sequence)
        table.record(sequence.tokens, placement.computed)
        if self.states is not None and (states := placement.states) is not None:
            if states.spare is not None:
                self.states.release(states.spare)
            self.states.release(states.entry)
        table.release()
        placement.table, placement.computed, placement.states = None, 0, None

    @staticmethod
    def _table(sequence: TokenSequence) -> BlockTable:
        table = sequence.placement.table
        assert table is not None
        return table
