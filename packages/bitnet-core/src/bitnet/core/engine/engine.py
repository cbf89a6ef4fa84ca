"""The engine: requests in, steps of the device, tokens out.

Long, because planning a step, running it and accepting its tokens share the state of one class.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import numpy as np

from bitnet.core.engine.background import BackgroundThread
from bitnet.core.engine.blocks import BlockPool
from bitnet.core.engine.bursts import Bursts
from bitnet.core.engine.drafter import Drafter
from bitnet.core.engine.pacing import HELD_SECONDS, UPDATE_SECONDS, Pace
from bitnet.core.engine.penalty_slots import PenaltySlots
from bitnet.core.engine.placement import Placement
from bitnet.core.engine.preparer import Preparer
from bitnet.core.engine.prompt_lookup import accepted_count
from bitnet.core.engine.results import Update
from bitnet.core.engine.sampling import device_logprobs
from bitnet.core.engine.scheduler import Plan, Scheduler
from bitnet.core.engine.sequence import TokenSequence
from bitnet.core.engine.wait import Result, Wait, next_wait
from bitnet.core.engine.warm import stand_ins, usual_steps
from bitnet.core.errors import BitNetError, DeviceError, InvalidInputError
from bitnet.core.hal import (
    GREEDY,
    LOGPROBS,
    LOOK_AHEAD,
    MAX_LOGPROBS,
    NO_TOKEN,
    PENALTIES,
    Executable,
    HeaderWord,
    KVSpec,
    Limits,
    SequenceStep,
    Step,
    StepLayout,
)
from bitnet.core.model.cache import most_blocks

_LOGPROBS = HeaderWord.LOGPROBS.value  # looked up once: steps are run thousands of times a second


def never() -> bool:
    """The default for ``interrupted``: always False."""
    return False


class Engine:
    """Runs many sequences through one executable. Only :attr:`preparer` and :meth:`cached` are thread-safe.

    Before the next step begins, the engine does only what that step depends on: it records the tokens of the last step
    and checks them for stop tokens. It decodes their text and searches it for stop strings while the device computes.

    Args:
        executable: Of a program built by :func:`bitnet.core.model.program.build_program`.
        preparer: Makes the sequences that this engine runs.
        limits, kv: The program's limits and KV cache layout.
        device: The device's name, for errors.
        check: Called after each step; raises if the weights just read may no longer be the model's.
        first: Context manager around the first step, in which drivers do work that they have put off.
        features: Names of the device's optional features.
        state_entries: Entries of the program's states; 0: it has none.
        windows: For each block table of the program, the positions that its layers attend to; None: all.
        drafter: Makes drafts with a draft layer, if there is one.
    """

    def __init__(
        self,
        executable: Executable,
        preparer: Preparer,
        *,
        limits: Limits,
        kv: KVSpec,
        device: str,
        check: Callable[[], None] = lambda: None,
        first: Callable[[], AbstractContextManager[None]] = nullcontext,
        features: Collection[str] = (),
        state_entries: int = 0,
        windows: Sequence[int | None] = (None,),
        drafter: Drafter | None = None,
    ) -> None:
        context = preparer.context
        needed = sum(most_blocks(window, context, kv.block_size, limits.max_tokens) for window in windows)
        if context > limits.max_blocks * kv.block_size or max(needed, limits.max_blocks) > kv.num_blocks:
            raise InvalidInputError(f"a context of {context} does not fit {limits} and {kv.num_blocks} KV blocks.")
        if limits.max_seqs > min(limits.max_tokens, limits.max_rows):
            raise InvalidInputError(f"max_tokens and max_rows must be at least max_seqs: {limits}.")
        self.preparer, self.kv, self.limits, self.device = preparer, kv, limits, device
        self._executable, self._layout, self._block_size = executable, StepLayout(limits), kv.block_size
        self._check_weights, self._around, self._features = check, first, features
        self._pace = Pace(limits.max_tokens, looks_ahead=LOOK_AHEAD in features)
        self.drafter = drafter
        self._scheduler = Scheduler(
            limits,
            kv.num_blocks,
            kv.block_size,
            self._pace,
            state_entries=state_entries,
            windows=windows,
            drafter=drafter,
        )
        self.interrupted: Callable[[], bool] = never
        """Called between bursts: whether there is work other than the next tokens of the running sequences."""
        self._max_logprobs = MAX_LOGPROBS if LOGPROBS in features else -1
        self._slots = PenaltySlots(executable, limits.slots, preparer.vocab_size) if PENALTIES in features else None
        self._siblings: dict[TokenSequence, tuple[TokenSequence, ...]] = {}
        self._failure: BaseException | None = None
        self._text_thread = BackgroundThread(f"bitnet-text-{device}")
        self._gone_back: set[TokenSequence] = set()  # sequences that take no more tokens of the plan
        self._unreported: dict[TokenSequence, None] = {}  # sequences with results that no update has reported yet
        self._reported = 0.0  # when all of them were reported last
        self._mixed_seconds = math.inf  # how long the last step took, if prompts were computed beside decoding

    @property
    def busy(self) -> bool:
        """Whether there is a step to run, or a result to report."""
        return self._scheduler.busy or bool(self._unreported)

    @property
    def pool(self) -> BlockPool:
        """The blocks of the KV cache; read-only for callers."""
        return self._scheduler.pool

    def cached(self, digests: Sequence[bytes]) -> int:
        """Positions in the cache of a prompt whose blocks have these digests. May be called from any thread."""
        return self._scheduler.cached(digests)

    def add(self, sequences: Sequence[TokenSequence]) -> None:
        """Queue prepared sequences of one prompt. All but the first wait for its prompt, to share the KV cache.

        Raises:
            BitNetError: The engine failed earlier; this is that error.
        """
        if self._failure is not None:
            raise self._failure
        first, *others = sequences
        for sequence in sequences:
            sequence.placement = Placement(self.device, self._max_logprobs)
        self._scheduler.add([first])
        if others:
            self._siblings[first] = tuple(others)

    def step(self) -> list[Update]:
        """Run one step and return what is new.

        Raises:
            DeviceError: The device failed.
            ModelFileError: The file that weights are read from was cut short.
        """
        updates: list[Update] = []
        self.advance(updates.extend)
        return updates + self.updates()

    def advance(self, deliver: Callable[[list[Update]], None]) -> None:
        """Run one step; meanwhile, in another thread, decode the text of earlier tokens and ``deliver`` it.

        If there is no step to run, the text is decoded in this thread. If this raises, the engine is unusable and its
        sequences are lost.

        Raises:
            DeviceError: The device failed. The results of the previous step are delivered first.
            ModelFileError: The file that weights are read from was cut short.
        """
        with self._fails(deliver):
            steps = self._advance(deliver)
            result = None
            while (wait := next_wait(steps, result)) is not None:
                if wait.meanwhile is None:
                    result = wait.take()
                    continue
                self._text_thread.begin(wait.meanwhile)
                try:
                    result = wait.take()
                finally:
                    self._text_thread.wait()

    async def advance_in_task(self, deliver: Callable[[list[Update]], None]) -> None:
        """:meth:`advance` for a task: other tasks run while the device computes, and no thread is needed."""
        with self._fails(deliver):
            steps = self._advance(deliver)
            result = None
            while (wait := next_wait(steps, result)) is not None:
                if wait.meanwhile is not None:
                    wait.meanwhile()
                await self._executable.arrival()
                result = wait.take()

    def _advance(self, deliver: Callable[[list[Update]], None]) -> Generator[Wait, Result, None]:
        """The host's part of a step. Each burst's result is sent in, once the device has computed it."""
        self._resume()
        began, pace = time.perf_counter(), self._pace
        burst = pace.burst(self._scheduler.sequences)
        plan = self._scheduler.plan(burst.total)
        self._gone_back.clear()
        if plan is None:
            if not self._unreported:  # all are held
                time.sleep(HELD_SECONDS)
            deliver(self.updates())
            return
        step, wanted = self._prepared(plan)
        passes = min(burst.passes, plan.repeat)
        bursts = Bursts(self._executable, step, plan.repeat, passes, lambda: self._may_go_on(plan))
        handed = time.perf_counter()
        while self._begin(bursts):
            take = partial(self._timed, step, bursts, wanted, handed)
            result = yield Wait(take, self._report(deliver, mixed=plan.mixed))
            self._accept(plan, result, fed=bursts.taken > len(result.tokens))
            handed = time.perf_counter()
            began, seconds = handed, handed - began
            self._mixed_seconds = seconds if plan.mixed else math.inf
            if plan.drafted:
                pace.drafts.drafted(step.tokens - step.seqs, seconds - self._scheduler.drafts.making)
            elif step.tokens == step.seqs:
                pace.drafts.plain(step.seqs, seconds / len(result.tokens))

    def updates(self) -> list[Update]:
        """What is new since the last call.

        A sequence that a stop string ends here may already be part of a step; the result of that step is thrown away.
        """
        self._reported = time.perf_counter()
        sequences, self._unreported = self._unreported, {}
        return self._updates_of(sequences)

    def _report(self, deliver: Callable[[list[Update]], None], *, mixed: bool) -> Callable[[], None] | None:
        """What delivers the updates that are due while the next step is computed; None: there are none.

        While prompts arrive, each step gives a token, and telling each reader of each token takes the time in which
        the next prompts are made. So first and last tokens are reported at once, others a little later.

        Args:
            mixed: Whether the next step computes prompts beside decoding.
        """
        if not self._unreported:
            return None
        late = time.perf_counter() - self._reported >= UPDATE_SECONDS
        if late or not mixed or self._mixed_seconds >= UPDATE_SECONDS:
            return lambda: deliver(self.updates())
        due = [sequence for sequence in self._unreported if sequence.awaited]
        for sequence in due:
            del self._unreported[sequence]
        return (lambda: deliver(self._updates_of(due))) if due else None

    def _updates_of(self, sequences: Iterable[TokenSequence]) -> list[Update]:
        updates = []
        for sequence in sequences:
            ended = sequence.finished
            update = sequence.update()
            if sequence.finished and not ended:
                self._scheduler.remove(sequence)
            if update is not None:
                updates.append(update)
        return updates

    def cancel(self, sequence: TokenSequence) -> Update | None:
        """End a sequence at its current position; None if it has already ended."""
        if sequence.finished:
            return None
        for first, others in self._siblings.items():
            if sequence in others:  # not queued yet
                self._siblings[first] = tuple(s for s in others if s is not sequence)
                return sequence.end("cancelled")
        self._scheduler.remove(sequence)
        self._release_siblings(sequence)
        self._unreported.pop(sequence, None)
        return sequence.end("cancelled")

    def usual_steps(self) -> Iterator[Step]:
        """Steps of the usual sizes, to prepare the device with."""
        return usual_steps(
            self.limits,
            self.kv,
            self.preparer.context,
            features=self._features,
            lookup=self.preparer.lookup or self.drafter is not None,
        )

    def stand_ins(self) -> Iterator[Step]:
        """A few large steps that stand in for all other sizes, to prepare the device with before anything runs."""
        return stand_ins(self.limits, self.kv, self.preparer.context, features=self._features)

    def close(self) -> None:
        """End the thread that decodes text."""
        self._text_thread.close()

    def works_in(self, thread: threading.Thread) -> bool:
        """Whether ``thread`` is the one that decodes text."""
        return thread is self._text_thread.thread

    @contextmanager
    def _fails(self, deliver: Callable[[list[Update]], None]) -> Iterator[None]:
        """Remember an error raised in this context, and raise it again the next time."""
        if self._failure is not None:
            raise self._failure
        try:
            try:
                yield
            except BitNetError:  # if this step did not begin, the previous step's results have not been delivered yet
                deliver(self.updates())
                raise
        except BaseException as error:
            self._failure = error
            raise

    def surrender(self) -> list[tuple[TokenSequence, ...]]:
        """Give up all sequences after a step has failed; return them in groups that another engine's :meth:`add`
        accepts.

        The groups are in order of arrival. Generated tokens are kept; the other engine recomputes the KV cache.
        """
        groups = [(first, *self._siblings.pop(first, ())) for first in self._scheduler.sequences]
        self._scheduler.forget()
        return groups

    def _prepared(self, plan: Plan) -> tuple[Step, bool]:
        """The step of a plan, and whether the host needs its logits."""
        if self._slots is not None:
            for item in plan.work:
                if item.rows and item.sequence.wants_slot:
                    self._slots.claim(item.sequence)
        wanted = any(item.rows and item.sequence.needs_logits for item in plan.work)
        likeliest = (item.sequence.logprobs_wanted for item in plan.work if item.rows)
        step = Step(
            self._layout,
            [
                SequenceStep(
                    tokens=[*item.sequence.tokens[item.start : item.start + item.count], *item.draft],
                    length=item.start + item.count + len(item.draft),
                    blocks=item.sequence.placement.tables[0],
                    rows=item.rows,
                    sampling=GREEDY if item.sequence.needs_logits else item.sequence.sampling,
                    adjustment=item.sequence.adjustment if item.rows else None,
                    state_from=item.state_from,
                    state_to=item.state_to,
                    more_blocks=item.sequence.placement.tables[1:],
                )
                for item in plan.work
            ],
            block_size=self._block_size,
            logits=wanted,
            logprobs=max((n for n in likeliest if n is not None), default=None),
        )
        return step, wanted

    def _may_go_on(self, plan: Plan) -> bool:
        """Whether the plan's sequences should go on token by token before other work is done."""
        sequences = [item.sequence for item in plan.work]
        if self.interrupted() or self._gone_back or any(sequence.finished for sequence in sequences):
            return False
        return not self._scheduler.drafts.at_hand(sequences)

    def _begin(self, bursts: Bursts) -> bool:
        with self._around():
            return bursts.begin()

    def _timed(self, step: Step, bursts: Bursts, wanted: bool, handed: float) -> Result:
        """:meth:`_compute`, timed for the pace.

        Args:
            handed: When the device got the work that the host had for it.
        """
        result = self._compute(step, bursts, wanted)
        self._pace.computed(step.tokens, step.seqs, len(result.tokens), time.perf_counter() - handed)
        return result

    def _compute(self, step: Step, bursts: Bursts, wanted: bool) -> Result:
        """The tokens that a burst samples, and its logits if ``wanted``. Does not change the engine's state."""
        with self._around():
            tokens = bursts.take()
        self._around = nullcontext
        self._check_weights()
        if (tokens == NO_TOKEN).any():
            raise DeviceError(
                "it computed logits that are NaN: the model's weights are damaged, or values overflow.",
                device=self.device,
                hint="Check the model file (bitnet inspect), and try another device (--device cpu).",
            )
        if tokens.size and tokens.view(np.uint32).max() >= self.preparer.vocab_size:  # or below 0
            raise DeviceError(f"it sampled a token outside the vocabulary: {tokens.tolist()}.", device=self.device)
        logits = self._executable.read("logits", step.rows) if wanted else None
        return Result(tokens, logits, self._executable.logprobs() if step.data[_LOGPROBS] else None)

    def _accept(self, plan: Plan, result: Result, *, fed: bool) -> None:
        """Record a burst's tokens, as far as the next step depends on them.

        Args:
            fed: Whether the first of them follows a token that the previous burst sampled.
        """
        (tokens, logits, logprobs), row = result, 0
        if self.drafter is not None:
            self.drafter.next_rows(tokens.shape[1])
        for item in plan.work:
            if not item.rows:
                continue
            sequence, rows = item.sequence, slice(row, row + len(item.rows))
            row = rows.stop
            if sequence.finished or sequence in self._gone_back:  # while the step ran
                continue
            seen = logits[rows] if logits is not None and sequence.needs_logits else None
            drawn, reported = tokens[:, rows].ravel().tolist(), []
            if item.draft:
                del drawn[accepted_count(item.draft, drawn) :]
            if (top := sequence.logprobs_wanted) is not None and logprobs is not None:
                reported = device_logprobs(logprobs, rows, drawn, top)
            sequence.accept(drawn, seen, reported, len(item.draft))
            if self.drafter is not None:
                of_last_pass = range(rows.start if item.draft else rows.stop - 1, rows.stop)
                self.drafter.accepted(sequence, of_last_pass, drawn)
            # Every token but the last was also fed to the model, and so was the last one of the previous burst.
            sequence.placement.computed += (len(drawn) if item.draft else len(tokens)) - 1 + fed
            if plan.repeat > 1 and (sequence.needs_logits or sequence.appended) and not sequence.finished:
                # Its constraint has begun, or its thought was ended: what the device drew and draws after that is
                # dropped.
                sequence.placement.computed = len(sequence.tokens) - 1 - sequence.appended
                self._gone_back.add(sequence)
            if item.draft:
                self._scheduler.verified(item, len(drawn))
            self._release_siblings(sequence)
            self._accepted(sequence)

    def _accepted(self, sequence: TokenSequence) -> None:
        """Note that a sequence has accepted a result, unless it is held."""
        if sequence.finished:
            self._scheduler.remove(sequence)
        if not sequence.held:
            self._unreported[sequence] = None

    def _resume(self) -> None:
        """Have the sequences that are held choose their tokens, if they can."""
        for sequence in [s for s in self._scheduler.sequences if s.held]:
            sequence.resume()
            self._accepted(sequence)

    def _release_siblings(self, first: TokenSequence) -> None:
        self._scheduler.add(self._siblings.pop(first, ()), first=True)
