"""The engine: requests in, steps of the device, tokens out."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bitnet.core.engine.aside import Aside
from bitnet.core.engine.blocks import BlockPool
from bitnet.core.engine.lookup import REFRESH_REPEAT, agreeing
from bitnet.core.engine.prepare import Preparer
from bitnet.core.engine.results import Update
from bitnet.core.engine.rounds import Rounds
from bitnet.core.engine.sampling import told_logprobs
from bitnet.core.engine.scheduler import Plan, Scheduler
from bitnet.core.engine.sequence import TextStream, TokenSequence
from bitnet.core.engine.slots import Slots
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
    Logprobs,
    SequenceStep,
    Step,
    StepLayout,
)

_LOGPROBS = HeaderWord.LOGPROBS.value  # looked up once: steps are run thousands of times a second
BURST_SECONDS = 0.05
"""Longest time in seconds that tokens stay on the device before the host sees them; 20 updates a second look fluent."""

PROMPT_SECONDS = 0.025
"""Seconds that prompt chunks may take in a step with decoding sequences; a quarter of the step's tokens is always
allowed."""

MAX_REPEAT = 16
"""Maximum tokens generated per sequence in a step; those generated past a stop rule are thrown away."""

WATCHED = 2
"""Tokens per run of a sequence that repeated a passage recently, on devices that do not go on by themselves. Runs are
short, as no draft can begin within one."""

RUN_SECONDS, WATCHED_RUN_SECONDS = 0.0016, 0.0004
"""Minimum duration of a run of a sequence that may have drafts, and of one that repeated a passage recently, on devices
that go on by themselves. During the shorter one, the host can just take in the tokens of the run before."""

ROUNDS = 16
"""Maximum rounds of a step, on devices that begin a round while the host processes the previous one."""


HELD_SECONDS = 0.0005
"""Seconds between attempts to choose tokens, while all sequences are held."""


def never() -> bool:
    """The default for ``interrupted``: always False."""
    return False


class Result(NamedTuple):
    """A step's results: the sampled tokens, and logits and log-probabilities if they were requested.

    Attributes:
        tokens: ``int32[repeat, rows]``.
        logits: ``float32[rows, vocab]``.
    """

    tokens: npt.NDArray[np.int32]
    logits: npt.NDArray[np.float32] | None
    logprobs: Logprobs | None


class Engine(Preparer):
    """Runs many sequences through one executable. Only the ``prepare`` methods and ``cached`` are thread-safe.

    Before the next step begins, the engine does only what that step depends on: it records the tokens of the last step
    and checks them for stop tokens. It decodes their text and searches it for stop strings while the device computes.

    Args:
        executable: Of a program built by :func:`bitnet.core.model.program.build_program`.
        limits, kv: The program's limits and KV cache layout.
        context, vocab_size, eos, text, lookup, longest: As for :class:`~bitnet.core.engine.prepare.Preparer`.
        device: The device's name, for errors.
        check: Called after each step; raises if the weights just read may no longer be the model's.
        first: Context manager around the first step, in which drivers do work that they have put off.
        features: Names of the device's optional features.
    """

    def __init__(
        self,
        executable: Executable,
        *,
        limits: Limits,
        kv: KVSpec,
        context: int,
        vocab_size: int,
        eos: frozenset[int],
        text: Callable[[Sequence[int]], TextStream],
        device: str,
        check: Callable[[], None] = lambda: None,
        first: Callable[[], AbstractContextManager[None]] = nullcontext,
        features: Collection[str] = (),
        lookup: bool = False,
        longest: int | None = None,
    ) -> None:
        if context > limits.max_blocks * kv.block_size or limits.max_blocks > kv.num_blocks:
            raise InvalidInputError(f"a context of {context} does not fit {limits} and {kv.num_blocks} KV blocks.")
        if limits.max_seqs > min(limits.max_tokens, limits.max_rows):
            raise InvalidInputError(f"max_tokens and max_rows must be at least max_seqs: {limits}.")
        super().__init__(context=context, vocab_size=vocab_size, eos=eos, text=text, lookup=lookup, longest=longest)
        self.kv, self.limits, self.device = kv, limits, device
        self._executable, self._layout, self._block_size = executable, StepLayout(limits), kv.block_size
        self._check_weights, self._around = check, first
        self._scheduler = Scheduler(limits, kv.num_blocks, kv.block_size)
        self._features = features
        self._looks_ahead = LOOK_AHEAD in features
        self.interrupted: Callable[[], bool] = never
        """Called between rounds: whether there is work other than the next tokens of the running sequences."""
        self._logprobs_told = MAX_LOGPROBS if LOGPROBS in features else -1
        self._slots = Slots(executable, limits.slots, vocab_size) if PENALTIES in features else None
        self._siblings: dict[TokenSequence, tuple[TokenSequence, ...]] = {}
        self._token_seconds = BURST_SECONDS
        self._failure: BaseException | None = None
        self._text_thread = Aside(f"bitnet-text-{device}")
        self._untold: list[TokenSequence] = []  # sequences with results not yet reported

    @property
    def busy(self) -> bool:
        """Whether there is a step to run, or a result to report."""
        return self._scheduler.busy or bool(self._untold)

    @property
    def pool(self) -> BlockPool:
        """The blocks of the KV cache; read-only for callers."""
        return self._scheduler.pool

    def cached(self, digests: Sequence[bytes]) -> int:
        """Positions in the cache of a prompt whose blocks have these digests. May be called from any thread."""
        find = self.pool.find
        return self._block_size * next((i for i, digest in enumerate(digests) if find(digest) is None), len(digests))

    def add(self, sequences: Sequence[TokenSequence]) -> None:
        """Queue prepared sequences of one prompt. All but the first wait for its prompt, to share the KV cache.

        Raises:
            BitNetError: The engine failed earlier; this is that error.
        """
        if self._failure is not None:
            raise self._failure
        first, *others = sequences
        for sequence in sequences:
            sequence.device, sequence.slot, sequence.logprobs_told = self.device, None, self._logprobs_told
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
        return updates + self.news()

    def advance(self, deliver: Callable[[list[Update]], None]) -> None:
        """Run one step; meanwhile, in another thread, decode the text of earlier tokens and ``deliver`` it.

        If there is no step to run, the text is decoded in this thread. If this raises, the engine is unusable and its
        sequences are lost.

        Raises:
            DeviceError: The device failed. The results of the previous step are delivered first.
            ModelFileError: The file that weights are read from was cut short.
        """
        with self._fails():
            try:
                self._advance(deliver)
            except BitNetError:  # if this step did not begin, the previous step's results have not been delivered yet
                deliver(self.news())
                raise

    def _advance(self, deliver: Callable[[list[Update]], None]) -> None:
        self._resume()
        began, pace = time.perf_counter(), self._scheduler.pace
        most = REFRESH_REPEAT if pace.stale else MAX_REPEAT
        each = max(1, min(most, int(BURST_SECONDS / self._token_seconds)))
        if self._looks_ahead:  # a round's tokens are processed while the next round is computed
            each = max(1, each // 2)
        watched = min(each, self._watched())
        plan = self._scheduler.plan(each * ROUNDS if self._looks_ahead and not pace.stale else watched)
        if plan is None:
            if not self._untold:  # all are held
                time.sleep(HELD_SECONDS)
            deliver(self.news())
            return
        step, wanted = self._prepared(plan)
        each = min(watched, plan.repeat)
        rounds = Rounds(self._executable, step, plan.repeat, each, lambda: self._may_go_on(plan))
        handed = time.perf_counter()
        while self._begin(rounds):
            if self._untold:
                self._text_thread.begin(lambda: deliver(self.news()))
                try:
                    result = self._timed(step, rounds, wanted, handed)
                finally:
                    self._text_thread.wait()
            else:
                result = self._timed(step, rounds, wanted, handed)
            self._accept(plan, result, fed=rounds.passes > len(result.tokens))
            handed = time.perf_counter()
            began, seconds = handed, handed - began
            if plan.drafted:
                pace.drafted(step.tokens - step.seqs, seconds)
            elif step.tokens == step.seqs:
                pace.plain(step.seqs, seconds / len(result.tokens))

    def news(self) -> list[Update]:
        """What is new since the last call.

        A sequence that a stop string ends here may already be part of a step; the result of that step is thrown away.
        """
        sequences, self._untold = self._untold, []
        updates = []
        for sequence in sequences:
            ended = sequence.finished
            update = sequence.news()
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
        self._untold = [s for s in self._untold if s is not sequence]
        return sequence.end("cancelled")

    def usual_steps(self) -> Iterator[Step]:
        """Steps of the usual sizes, to prepare the device with."""
        return usual_steps(self.limits, self.kv, self.context, features=self._features, lookup=self.lookup)

    def stand_ins(self) -> Iterator[Step]:
        """A few large steps that stand in for all other sizes, to prepare the device with before anything runs."""
        return stand_ins(self.limits, self.kv, self.context, features=self._features)

    def close(self) -> None:
        """End the thread that decodes text."""
        self._text_thread.close()

    def works_in(self, thread: threading.Thread) -> bool:
        """Whether ``thread`` is the one that decodes text."""
        return thread is self._text_thread.thread

    @contextmanager
    def _fails(self) -> Iterator[None]:
        """Remember an error raised in this context, and raise it again the next time."""
        if self._failure is not None:
            raise self._failure
        try:
            yield
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
        told = (item.sequence.logprobs_wanted for item in plan.work if item.rows)
        step = Step(
            self._layout,
            [
                SequenceStep(
                    tokens=[*item.sequence.tokens[item.start : item.start + item.count], *item.draft],
                    length=item.start + item.count + len(item.draft),
                    blocks=item.sequence.table.blocks if item.sequence.table else (),
                    rows=item.rows,
                    sampling=GREEDY if item.sequence.needs_logits else item.sequence.sampling,
                    adjustment=item.sequence.adjustment if item.rows else None,
                )
                for item in plan.work
            ],
            block_size=self._block_size,
            logits=wanted,
            logprobs=max((n for n in told if n is not None), default=None),
        )
        return step, wanted

    def _watched(self) -> int:
        """Maximum tokens of a run of a sequence that may have drafts, as none can begin within a run.

        Where several sequences run, short runs would cost more than they give.
        """
        running = self._scheduler.sequences
        if len(running) != 1 or not running[0].looks_up:
            return MAX_REPEAT
        repeats, token = running[0].repeats, self._scheduler.pace.token
        if not self._looks_ahead:
            return WATCHED if repeats else MAX_REPEAT
        return math.ceil((WATCHED_RUN_SECONDS if repeats else RUN_SECONDS) / token) if token else MAX_REPEAT

    def _may_go_on(self, plan: Plan) -> bool:
        """Whether the plan's sequences should go on token by token before other work is done."""
        sequences = [item.sequence for item in plan.work]
        if self.interrupted() or any(sequence.finished for sequence in sequences):
            return False
        return not self._scheduler.drafts(sequences)

    def _begin(self, rounds: Rounds) -> bool:
        with self._around():
            return rounds.begin()

    def _timed(self, step: Step, rounds: Rounds, wanted: bool, handed: float) -> Result:
        """:meth:`_compute`, timed to estimate the tokens of the next burst and the prompt tokens of a step.

        Args:
            handed: When the device got the work that the host had for it.
        """
        result = self._compute(step, rounds, wanted)
        seconds = time.perf_counter() - handed
        if step.tokens == step.seqs:
            self._token_seconds = seconds / len(result.tokens)
        elif step.tokens >= self.limits.max_tokens // 4:
            self._scheduler.beside_decode = int(PROMPT_SECONDS * step.tokens / seconds)
        return result

    def _compute(self, step: Step, rounds: Rounds, wanted: bool) -> Result:
        """The tokens that a round samples, and its logits if ``wanted``. Does not change the engine's state."""
        with self._around():
            tokens = rounds.take()
        self._around = nullcontext
        self._check_weights()
        if (tokens == NO_TOKEN).any():
            raise DeviceError(
                "it computed logits that are NaN: the model's weights are damaged, or values overflow.",
                device=self.device,
                hint="Check the model file (bitnet inspect), and try another device (--device cpu).",
            )
        if tokens.size and tokens.view(np.uint32).max() >= self._vocab_size:  # or below 0
            raise DeviceError(f"it sampled a token outside the vocabulary: {tokens.tolist()}.", device=self.device)
        told = self._executable.logprobs() if step.data[_LOGPROBS] else None
        return Result(tokens, self._executable.read("logits", step.rows) if wanted else None, told)

    def _accept(self, plan: Plan, result: Result, *, fed: bool) -> None:
        """Record a round's tokens, as far as the next step depends on them.

        Args:
            fed: Whether the first of them follows a token that the previous round sampled.
        """
        (tokens, logits, logprobs), row = result, 0
        for item in plan.work:
            if not item.rows:
                continue
            sequence, rows = item.sequence, slice(row, row + len(item.rows))
            row = rows.stop
            if sequence.finished:  # while the step ran
                continue
            seen = logits[rows] if logits is not None and sequence.needs_logits else None
            drawn, told = tokens[:, rows].ravel().tolist(), []
            if item.draft:
                del drawn[agreeing(item.draft, drawn) :]
            if (top := sequence.logprobs_wanted) is not None and logprobs is not None:
                told = told_logprobs(logprobs, rows, drawn, top)
            sequence.accept(drawn, seen, told, len(item.draft))
            # Every token but the last was also fed to the model, and so was the last one of the previous round.
            sequence.computed += (len(drawn) if item.draft else len(tokens)) - 1 + fed
            self._release_siblings(sequence)
            self._accepted(sequence)

    def _accepted(self, sequence: TokenSequence) -> None:
        """Note that a sequence has accepted a result, unless it is held."""
        if sequence.finished:
            self._scheduler.remove(sequence)
        if not sequence.held:
            self._untold.append(sequence)

    def _resume(self) -> None:
        """Have the sequences that are held choose their tokens, if they can."""
        for sequence in [s for s in self._scheduler.sequences if s.held]:
            sequence.resume()
            self._accepted(sequence)

    def _release_siblings(self, first: TokenSequence) -> None:
        self._scheduler.add(self._siblings.pop(first, ()), first=True)
