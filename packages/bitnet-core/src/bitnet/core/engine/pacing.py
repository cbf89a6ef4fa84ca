"""How much work a step gets, from how long the steps before it took.

Tokens that stay on the device longer cost less, but they reach their reader later, and other requests wait. Drafts save
steps where they are right, and cost time where they are not. :class:`Pace` measures steps and weighs these up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from bitnet.core.engine.prompt_lookup import Draft
from bitnet.core.engine.sequence import TokenSequence

BURST_SECONDS = 0.05
"""Longest time in seconds that tokens stay on the device before the host sees them; 20 updates a second look fluent."""
MAX_BURST = 16
"""Maximum tokens generated per sequence before the host sees them; those after a stop rule are thrown away."""
MAX_BURSTS = 16
"""Maximum bursts of a step, on devices that begin a burst while the host processes the previous one."""
PROMPT_SECONDS = 0.025
"""Seconds that prompt chunks may take in a step with decoding sequences; a quarter of the step's tokens is always
allowed."""
MIN_SECONDS = 1e-6
"""Seconds that a step takes at least: the clock of a browser stands still for up to a tenth of a millisecond."""
UPDATE_SECONDS = 0.01
"""Seconds between two updates of a sequence while short steps compute prompts beside it."""
HELD_SECONDS = 0.0005
"""Seconds between attempts to choose tokens, while all sequences are held."""

WATCHED_BURST = 2
"""Tokens of a burst of a sequence that repeated a passage recently, on devices that do not look ahead. Its bursts are
short, as no draft can begin within one."""
DRAFTABLE_SECONDS, WATCHED_SECONDS = 0.0016, 0.0004
"""Minimum seconds of a burst of a sequence that may have drafts, and of one that repeated a passage recently, on
devices that look ahead. In the shorter time, the host can just take in the tokens of the previous burst."""

DRAFT_SIZES = (1, 3, 7, 15)
"""Choices for the maximum tokens of a draft. With the next token before it, a draft fills a step of a power of two
tokens, and devices are prepared for those."""
MIN_SPEEDUP = 1.03
"""Speedup that a draft must promise over no draft, and a longer draft over a shorter one."""
MAX_DRAFTED_STEPS = 128
"""Steps with drafts after which plain steps are timed again."""
TIMING_BURST = 4
"""Maximum tokens of the burst in which plain steps are timed again."""
COST_DECAY = 1 / 1024
"""Share by which the costs of larger drafts fall each time that a smaller draft is chosen. So a cost that was measured
too high is tried again some day."""
INITIAL_MAKING = 1 / 4
"""Time to make a token of each draft before any was measured, as a share of a plain step's time."""
INITIAL_COST = 1 / 8
"""Cost of a drafted token before any was measured, as a share of a plain step's time per sequence."""
AVERAGE_SHARE = 1 / 8
"""Weight of the newest value in a running average."""


class Burst(NamedTuple):
    """How often a decode step runs on the device.

    Attributes:
        passes: Maximum passes, of one token per sequence each, before the host sees the tokens.
        total: Maximum passes of the step. Bursts follow each other if it is greater than ``passes``.
    """

    passes: int
    total: int


class DraftOption(NamedTuple):
    """Drafts that a step could have.

    Attributes:
        drafts: One for each sequence; it may be empty.
        making: Seconds that it takes to make a token of each; 0 if they are at hand.
    """

    drafts: Sequence[Draft]
    making: float = 0.0

    def seconds(self, size: int) -> float:
        """Seconds to make at most ``size`` tokens of each."""
        return self.making * min(size, max(len(draft.tokens) for draft in self.drafts))


class DraftCosts:
    """Seconds that drafts add to a step, and whether they give more tokens per second than plain steps.

    On one device a step of a few tokens takes hardly longer than a step of one; on another it takes nearly as long as
    that many steps. A draft may also cost something however short it is. So costs are kept by size class: the number of
    binary digits of the number of drafted tokens.
    """

    def __init__(self) -> None:
        self._seqs = 0
        self._plain = 0.0  # seconds of a plain step of `_seqs` sequences, which gives each one token
        self._since = 0  # steps with drafts since a plain step was timed
        self._costs: dict[int, float] = {}  # seconds per drafted token, by size class
        self._timed = [0] * 32  # number of steps timed, by size class
        self._making: dict[int, float] = {}  # seconds to make a token of each draft, by size class of the sequences
        self._made = [0] * 32  # number of times that was timed

    @property
    def token(self) -> float:
        """Seconds of a plain step; 0 before one was timed."""
        return self._plain

    @property
    def stale(self) -> bool:
        """Whether plain steps must be timed again."""
        return self._since >= MAX_DRAFTED_STEPS

    def choose(self, drafts: Sequence[Draft], budget: int) -> int:
        """The maximum tokens of each draft to verify in the next step; 0: plain steps are faster.

        Args:
            drafts: One for each sequence; it may be empty.
            budget: Maximum drafted tokens of the step, all sequences together.
        """
        return self.choose_from([DraftOption(drafts)], budget)[1]

    def choose_from(self, options: Sequence[DraftOption], budget: int) -> tuple[int, int]:
        """The best of several options: its index, and the maximum tokens of each draft, as :meth:`choose` gives it."""
        seqs = len(options[0].drafts)
        if seqs != self._seqs or self.stale:
            return 0, 0
        best, which, chosen, fed = seqs / self._plain, 0, 0, 0
        for index, option in enumerate(options):
            for size in DRAFT_SIZES:
                drafted = sum(min(size, len(draft.tokens)) for draft in option.drafts)
                if drafted > budget:
                    break
                tokens = seqs + sum(draft.gain(size) for draft in option.drafts)
                rate = tokens / (self._plain + drafted * self._cost(drafted) + option.seconds(size))
                if rate > MIN_SPEEDUP * best:
                    best, which, chosen, fed = rate, index, size, drafted
        for size_class in self._costs:
            if size_class > fed.bit_length():
                self._costs[size_class] *= 1 - COST_DECAY / len(self._costs)
        if options[-1].making and which < len(options) - 1:
            self._making[seqs.bit_length()] = options[-1].making * (1 - COST_DECAY)
        return which, chosen

    def making(self, seqs: int) -> float:
        """Seconds to make a token of a draft for each of ``seqs`` sequences, measured or estimated."""
        return self._making.get(seqs.bit_length(), INITIAL_MAKING * self._plain)

    def made(self, seqs: int, tokens: int, seconds: float) -> None:
        """Record that it took ``seconds`` to make ``tokens`` tokens of a draft for each of ``seqs`` sequences."""
        size_class = seqs.bit_length()
        self._made[size_class] += 1
        share = max(AVERAGE_SHARE, 1 / self._made[size_class])
        self._making[size_class] = _average(self.making(seqs), max(MIN_SECONDS, seconds) / tokens, share)

    def plain(self, seqs: int, seconds: float) -> None:
        """Record that a step of ``seqs`` sequences without drafts took ``seconds`` per pass."""
        self._plain = seconds if seqs != self._seqs else _average(self._plain, seconds)
        self._seqs, self._since = seqs, 0

    def drafted(self, tokens: int, seconds: float) -> None:
        """Record that a step with ``tokens`` drafted tokens took ``seconds``."""
        self._since += 1
        size_class = tokens.bit_length()
        self._timed[size_class] += 1
        cost = max(self._plain / 64, seconds - self._plain) / tokens
        share = max(AVERAGE_SHARE, 1 / self._timed[size_class])
        self._costs[size_class] = _average(self._cost(tokens), cost, share)

    def _cost(self, drafted: int) -> float:
        """Seconds per token in a step with ``drafted`` drafted tokens, measured or estimated."""
        size_class = drafted.bit_length()
        if (known := self._costs.get(size_class)) is not None:
            return known
        if smaller := [other for other in self._costs if other < size_class]:
            # As if a step's cost did not depend on the number of tokens. If that is too low, a measurement corrects it.
            return self._costs[max(smaller)] / 2
        if self._costs:
            return self._costs[min(self._costs)]
        return INITIAL_COST * self._plain / self._seqs


class Pace:
    """The measured speed of an engine's device, and the work of a step that follows from it.

    Args:
        max_tokens: Maximum tokens of a step.
        looks_ahead: Whether the device begins a burst while the host processes the previous one.

    Attributes:
        drafts: The costs of drafts.
        looks_ahead: As the argument.
    """

    def __init__(self, max_tokens: int, *, looks_ahead: bool = False) -> None:
        self.drafts, self.looks_ahead = DraftCosts(), looks_ahead
        self._min_prompt = self._prompt = max(1, max_tokens // 4)
        self._token_seconds = BURST_SECONDS

    @property
    def beside_decode(self) -> int:
        """Maximum prompt tokens in a step while sequences decode."""
        return max(self._prompt, self._min_prompt)

    def burst(self, sequences: Sequence[TokenSequence]) -> Burst:
        """The passes of a step in which these sequences, and no others, run and wait."""
        stale = self.drafts.stale
        most = TIMING_BURST if stale else MAX_BURST
        passes = max(1, min(most, int(BURST_SECONDS / self._token_seconds)))
        if self.looks_ahead:  # the tokens of a burst are processed while the next burst is computed
            passes = max(1, passes // 2)
        watched = min(passes, self._until_draft(sequences))
        return Burst(watched, passes * MAX_BURSTS if self.looks_ahead and not stale else watched)

    def computed(self, tokens: int, seqs: int, passes: int, seconds: float) -> None:
        """Record how long the device needed for a burst, and the host to begin it.

        Args:
            tokens: Tokens of the step; ``seqs``, if all of its sequences decode.
            seconds: From the end of the host's work on the previous burst to the end of this one on the device.
        """
        seconds = max(seconds, MIN_SECONDS)
        if tokens == seqs:
            self._token_seconds = seconds / passes
        elif tokens >= self._min_prompt:
            self._prompt = int(PROMPT_SECONDS * tokens / seconds)

    def _until_draft(self, sequences: Sequence[TokenSequence]) -> int:
        """Maximum passes of a burst, as no draft can begin within one.

        Where several sequences run, short bursts would cost more than drafts save.
        """
        if len(sequences) != 1 or not sequences[0].looks_up:
            return MAX_BURST
        repeats, token = sequences[0].repeats, self.drafts.token
        if not self.looks_ahead:
            return WATCHED_BURST if repeats else MAX_BURST
        return math.ceil((WATCHED_SECONDS if repeats else DRAFTABLE_SECONDS) / token) if token else MAX_BURST


def _average(average: float, value: float, share: float = AVERAGE_SHARE) -> float:
    """A running average with a new value, which counts as at most twice the average.

    So one step that was slow because another program ran moves it little.
    """
    return average + (min(value, 2 * average) - average) * share
