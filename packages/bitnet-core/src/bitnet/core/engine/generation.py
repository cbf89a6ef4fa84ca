"""Generations: prompts that are being continued, with their options, stop rules and results.

Long, because drafts, thoughts, constraints and stop rules all decide about the same token, in one order.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from bitnet.core.engine.answer_text import AnswerText
from bitnet.core.engine.constraint import Constraint, LazyConstraint, masked
from bitnet.core.engine.options import GenerationOptions
from bitnet.core.engine.prompt_logprobs import PromptLogprobs
from bitnet.core.engine.prompt_lookup import NO_DRAFT, Draft, PromptLookup
from bitnet.core.engine.results import Chunk, Completion, FinishReason, PromptTimings, Timings, Update
from bitnet.core.engine.sampling import TokenLogprob, adjusted_logits, sample, token_logprob
from bitnet.core.engine.sequence import F32, TokenSequence
from bitnet.core.engine.thought import ThoughtControl
from bitnet.core.hal import IN_OUTPUT, IN_PROMPT, Adjustment, SamplingParams
from bitnet.core.text.thinking import TextStream, Thinking


class Generation(TokenSequence):
    """A prompt that is being continued.

    Args:
        stop_tokens: Token ids that end it.
        context: Maximum length of prompt plus output, in tokens.
        seed: Seed of this completion.
        text: Makes a decoder of the text that continues the prompt.
        constraint: Decides which tokens it may choose after its thought; None: any.
        thinking: How a thought is marked; None: none is looked for.
        lookup: Whether prompt lookup may draft tokens for it.
        clock: Returns the time in seconds, from any origin.
    """

    def __init__(
        self,
        number: int,
        prompt: Sequence[int],
        options: GenerationOptions,
        *,
        stop_tokens: frozenset[int],
        context: int,
        seed: int,
        text: Callable[[], TextStream],
        constraint: Constraint | None = None,
        thinking: Thinking | None = None,
        lookup: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(number, prompt)
        self._prompt = tuple(prompt)
        self._options, self._stop_tokens, self._constraint = options, stop_tokens, constraint
        self._text, self._thinking = AnswerText(text(), thinking, options.stop_strings), thinking
        self._lazy = cast(LazyConstraint, constraint) if hasattr(constraint, "watch") else None
        budget, constrained = options.reasoning_budget, constraint is not None and self._lazy is None
        self._thought = None
        if thinking is not None and (budget is not None or constraint is not None):
            self._thought = ThoughtControl(thinking, text(), budget=budget, constrained=constrained)
        self._params = SamplingParams(options.temperature, options.top_k, options.top_p, options.min_p, seed)
        room = context - len(prompt)
        self._most = room if options.max_tokens is None else min(options.max_tokens, room)
        self._at_most: FinishReason = "length" if self._most == options.max_tokens else "context"
        self._stop_reason: int | str | None = None
        self._counts: Counter[int] = Counter()
        self._reshapes = options.changes_logits
        self._logprobs: list[TokenLogprob] = []
        asked = options.prompt_logprobs
        self._of_prompt = None if asked is None else PromptLogprobs(prompt, asked)
        self._first = True  # whether nothing has been reported yet
        self._clock, self._submitted = clock, clock()
        self._started: float | None = None
        self._cached = 0
        self._times: list[float] = []
        self._devices: list[str] = []
        self._forbids_end = False  # whether the slot forbids end tokens
        self._lookup = PromptLookup(self.tokens, options.predicted_tokens) if lookup else None
        self._drafted = self._agreed = 0
        self._predicted = self._agreed_predicted = 0  # those of them that came from the prediction
        self._reported = len(prompt)  # number of tokens in updates so far
        self._reason: FinishReason | None = None
        self._logits: F32 | None = None  # those held

    @property
    def _generated(self) -> int:
        return len(self.tokens) - len(self._prompt)

    @property
    def target(self) -> int:
        return len(self.tokens)

    @property
    def _prompt_left(self) -> int:
        """Tokens of the prompt whose log-probabilities are still to come."""
        return 0 if self._of_prompt is None else self._of_prompt.left

    @property
    def first_row(self) -> int:
        return len(self.tokens) - 1 - self._prompt_left

    @property
    def _must_go_on(self) -> bool:
        least = self._options.min_tokens
        return least > 0 and self._generated < least

    @property
    def _changes_logits(self) -> bool:
        return self._reshapes or self._must_go_on

    @property
    def _read_on_host(self) -> bool:
        asked = self._options.logprobs
        if asked is not None and asked > self.placement.max_logprobs:  # the device cannot report them
            return True
        if self._constraint is not None and not (asked is None and self._constraint_waits):
            return True
        return (self._thought is not None and bool(self._thought.forced)) or self._prompt_left > 0

    @property
    def _constraint_waits(self) -> bool:
        """Whether the next token may be any: it belongs to a thought, or the constraint has not begun."""
        return (self._lazy is not None and self._lazy.waiting) or self._in_thought

    @property
    def _is_watched(self) -> bool:
        """Whether the next token may begin what the constraint constrains."""
        return self._lazy is not None and self._lazy.waiting and self._lazy.watching

    @property
    def _can_go_back(self) -> bool:
        """Whether tokens that the device has gone on with can be dropped; recurrent states and slots count them."""
        return self.placement.states is None and not self.wants_slot

    @property
    def _in_thought(self) -> bool:
        return self._thought is not None and self._thought.constraint_waits

    @property
    def logprobs_wanted(self) -> int | None:
        asked = self._options.logprobs
        return None if asked is None or self.needs_logits else asked

    @property
    def needs_logits(self) -> bool:
        return self._read_on_host or (self._changes_logits and self.placement.slot is None)

    @property
    def wants_slot(self) -> bool:
        return self._changes_logits and not self._read_on_host

    @property
    def slot_is_stale(self) -> bool:
        return self._forbids_end != self._must_go_on

    def slot_contents(self, vocab_size: int) -> tuple[npt.NDArray[np.int32], F32]:
        output = np.asarray(
            self.tokens[len(self._prompt) :], np.intp
        )  # bincount takes no more, and wasm32's has 32 bits
        marks = (IN_OUTPUT * np.bincount(output, minlength=vocab_size)).astype(np.int32)
        marks[list(self._prompt)] |= IN_PROMPT
        biases = np.zeros(vocab_size, np.float32)
        if given := self._options.logit_bias:
            biases[list(given)] = list(given.values())
        self._forbids_end = self._must_go_on
        if self._forbids_end:
            biases[list(self._stop_tokens)] = -np.inf
        return marks, biases

    @property
    def adjustment(self) -> Adjustment | None:
        if self.placement.slot is None or not self.wants_slot:
            return None
        o = self._options
        return Adjustment(self.placement.slot, o.repetition_penalty, o.presence_penalty, o.frequency_penalty)

    @property
    def sampling(self) -> SamplingParams:
        return self._params

    @property
    def steps_left(self) -> int:
        most = self._options.min_tokens if self._must_go_on else self._most
        if self._is_watched and not self._can_go_back:
            return 1
        left = max(1, min(most, self._most) - self._generated)  # a step is needed, even if nothing is to be generated
        return left if self._thought is None or self._appends else min(left, self._thought.steps_left)

    @property
    def _appends(self) -> bool:
        """Whether a thought is ended at its budget by adding the end mark, after dropping what came later; if not, the
        device's steps end at the budget, and the mark's tokens are chosen one by one."""
        unconstrained = self._constraint is None or self._lazy is not None
        plain = self._options.logprobs is None and not self._changes_logits
        return unconstrained and plain and self.placement.states is None

    @property
    def looks_up(self) -> bool:
        return self._lookup is not None and self._may_draft

    @property
    def _may_draft(self) -> bool:
        # A slot is updated one token at a time.
        return not self.needs_logits and not self.wants_slot

    def draft(self, most: int) -> Draft:
        if self._lookup is None or not self._may_draft or self._is_watched:
            return NO_DRAFT
        return self._lookup.propose(self.draft_room(most))

    def draft_room(self, most: int) -> int:
        if not self._may_draft or self._is_watched:
            return 0
        left = self.steps_left if self._thought is None else min(self.steps_left, self._thought.steps_left)
        return min(most, left - 1)

    @property
    def repeats(self) -> bool:
        return self._lookup is not None and self._lookup.repeats

    def started(self, cached: int) -> None:
        if self.placement.device not in self._devices:
            self._devices.append(self.placement.device)
        if self._started is None:
            self._started, self._cached = self._clock() - self._submitted, cached

    def accept(
        self, sampled: Sequence[int], logits: F32 | None, reported: Sequence[TokenLogprob] = (), drafted: int = 0
    ) -> None:
        now = self._clock() - self._submitted
        self.held, self.appended = False, 0
        appends = self._thought is not None and self._appends
        if self._of_prompt is not None and self._of_prompt.left and logits is not None:
            logits = self._of_prompt.take(logits)
            if not len(logits):
                return
        room = self._most - self._generated
        watched = self._lazy if self._lazy is not None and self._lazy.waiting else None
        if logits is not None and room:
            try:
                chosen = self._choose(logits[0])
                if chosen is None:
                    self.held, self._logits = True, logits if logits is self._logits else logits.copy()
                    return
                sampled, self._logits = [chosen], None
            except Exception as error:
                if self._constraint is None:
                    raise
                # The constraint failed, so the tokens allowed next are unknown.
                self._stop_reason, sampled = f"{type(error).__name__}: {error}", ()
                self._end("failed")
        new = list(sampled[:room])
        if self._thought is not None:
            new = self._thought.without_stop(new, self._stop_tokens)
        if watched is not None:
            new = self._until_begun(watched, new)
        elif self._thought is not None and appends:
            count = self._thought.accept_some(new[: self._before_stop(new)])
            new = new[:count] if self._thought.forced else new
        self._end_at(new, room, now)
        if logits is not None and self._options.logprobs is not None:
            self._logprobs += [token_logprob(logits[0], token, self._options.logprobs) for token in new]
        self._logprobs += reported[: len(new)]
        if self._reshapes:
            self._counts.update(new)
        self._times += [now] * len(new)
        self.tokens += new
        if self._thought is not None and not self.finished:
            if appends:
                if self._thought.forced:
                    self._end_thought(self._thought, room - len(new), now)
            elif watched is None:
                self._follow(self._thought, new)
            if self._thought.over and not self._thought.forced:  # nothing depends on it any more
                self._thought = None
        if drafted:
            self._drafted += drafted
            self._agreed += len(sampled) - 1
            if self._lookup is not None and self._lookup.predicted and not self.layer_draft:
                self._predicted += drafted
                self._agreed_predicted += len(sampled) - 1

    def _end_thought(self, thought: ThoughtControl, room: int, now: float) -> None:
        """Add the end mark of a thought that has reached its budget."""
        mark = thought.take_forced(room)
        if not mark:
            return
        self._end_at(mark, room, now)
        thought.accept_some(mark)
        self.tokens += mark
        self.appended = len(mark)
        self._times += [now] * len(mark)

    def _before_stop(self, tokens: Sequence[int]) -> int:
        """Number of tokens before the first stop token."""
        if self._stop_tokens.isdisjoint(tokens):
            return len(tokens)
        return next(i for i, token in enumerate(tokens) if token in self._stop_tokens)

    def _end_at(self, tokens: list[int], room: int, now: float) -> None:
        """End before the first stop token of ``tokens``, which goes with all after it, or because ``room`` is full."""
        if (stop := self._before_stop(tokens)) < len(tokens):
            self._times.append(now)
            self._stop_reason = tokens[stop]
            del tokens[stop:]
            self._end("stop")
        elif len(tokens) == room:
            self._end(self._at_most)

    def _until_begun(self, lazy: LazyConstraint, tokens: list[int]) -> list[int]:
        """The tokens up to the one with which the constraint begins: those after it were chosen without it."""
        thought, taken, end = self._thought, 0, self._before_stop(tokens)
        while thought is not None and not thought.over and taken < end:
            if self._in_thought:
                taken += thought.accept_some(tokens[taken:end], thought_only=True)
            else:  # a token may begin a thought, and is the constraint's if it does not
                self._follow(thought, tokens[taken : taken + 1])
                lazy.watch(tokens[taken : taken + 1])
                taken += 1
            if self.finished or thought.forced or not lazy.waiting:
                return tokens[:taken]
        taken += lazy.watch(tokens[taken:end]) if taken < end else 0
        return tokens if taken == end and lazy.waiting else tokens[:taken]

    def _follow(self, thought: ThoughtControl, tokens: Sequence[int]) -> None:
        try:
            thought.accept(tokens)
        except ValueError as error:
            self._stop_reason = str(error)
            self._end("failed")

    def resume(self) -> None:
        if self.held:
            self.accept((), self._logits)

    @property
    def awaited(self) -> bool:
        return self._first or self.finished

    def update(self) -> Update | None:
        return None if self._prompt_left else self._report()

    def end(self, reason: FinishReason) -> Update:
        self._end(reason)
        return self._report()

    def _end(self, reason: FinishReason) -> None:
        self.finished, self._reason = True, reason

    def _choose(self, logits: F32) -> int | None:
        """The next token; None: the tokens that may be chosen are not known yet."""
        thought = self._thought
        if thought is not None and thought.forced:
            return thought.forced.popleft()
        forbidden = tuple(self._stop_tokens) if self._must_go_on else ()
        logits = adjusted_logits(logits, self._options, prompt=self._prompt, counts=self._counts, forbidden=forbidden)
        if self._constraint is None or self._constraint_waits:
            return sample(logits, self._params, len(self.tokens) - 1)
        if thought is not None and thought.starts(free := sample(logits, self._params, len(self.tokens) - 1)):
            return free
        allowed = self._constraint.allowed()
        if allowed is None:
            return None
        token = sample(masked(logits, allowed), self._params, len(self.tokens) - 1)
        if token not in self._stop_tokens:
            self._constraint.accept(token)
        return token

    @property
    def _prompt_timings(self) -> PromptTimings | None:
        if self._started is None:
            return None
        first = self._times[0] if self._times else self._clock() - self._submitted
        return PromptTimings(len(self._prompt), self._cached, self._started, first - self._started)

    def _report(self) -> Update:
        """A chunk with what is new up to the first stop string, and the whole result if it has ended."""
        new, text, reason = self.tokens[self._reported :], self._text, self._reason
        kept = text.push(new)
        if text.matched is not None:  # later tokens are dropped
            del self.tokens[self._reported + kept :], self._times[self._generated :], self._logprobs[self._generated :]
            self._stop_reason = text.matched
            self._end("stop")
            reason = "stop"
        elif reason is not None:
            text.end()
            if text.matched is not None and self._stop_reason is None:
                self._stop_reason, reason = text.matched, "stop"
        first, self._first = self._first, False
        piece = text.take()
        before, self._reported = self._reported - len(self._prompt), len(self.tokens)
        asked = self._options.logprobs is not None
        of_prompt = None if self._of_prompt is None else tuple(self._of_prompt.entries)
        chunk = Chunk(
            piece.text,
            tuple(self.tokens[len(self._prompt) + before :]),
            tuple(self._logprobs[before:]) if asked else None,
            reason,
            of_prompt if first else None,
            piece.reasoning,
            self._prompt_timings if first else None,
            text.before,
        )
        if reason is None:
            return Update(self.number, chunk)
        total = self._clock() - self._submitted
        timings = Timings(
            prompt_tokens=len(self._prompt),
            cached_tokens=self._cached,
            started=total if self._started is None else self._started,
            token_times=tuple(self._times),
            total=total,
            drafted_tokens=self._drafted,
            accepted_tokens=self._agreed,
            prediction_tokens=self._predicted,
            accepted_prediction_tokens=self._agreed_predicted,
        )
        completion = Completion(
            text=text.whole.text,
            tokens=tuple(self.tokens[len(self._prompt) :]),
            finish_reason=reason,
            stop_reason=self._stop_reason,
            logprobs=tuple(self._logprobs) if asked else None,
            prompt_tokens=self._prompt,
            seed=self._params.seed,
            timings=timings,
            options=self._options,
            devices=tuple(self._devices),
            prompt_logprobs=of_prompt,
            reasoning=text.whole.reasoning,
            reasoning_tokens=text.reasoning_tokens,
            thinking=self._thinking,
            before_answer=len(self.tokens) - len(self._prompt) if text.before is None else text.before,
        )
        return Update(self.number, chunk, completion)
