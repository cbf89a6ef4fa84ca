"""Prompt look-up: text that repeats is drafted from where it stood before, and verified in one step.

A draft is what followed the latest earlier occurrence of the last tokens (Saxena 2023). The device is fed the draft
beside the token that is due, and draws a token after each. A draw depends on seed, position and logits only, so the
draws are those of single steps as long as the draft agrees with them; from the first that differs on, they are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

AT_ONCE = 1024
"""Tokens that are taken in before another thread may run."""
CAPS = (1, 3, 7, 15)
"""Tokens of a draft at most. With the one that is due, steps have the sizes for which devices are prepared."""
NGRAMS = (3, 2)
"""Tokens that must have occurred before; the first that has counts."""
LONGEST = 8
"""Tokens up to which a longer match is told from a shorter one."""
RUN, RECENT = 4, 64
"""Drafted tokens in a row that must be right for a passage to count as repeated; tokens after it in which another
repeated passage is expected."""
MEMORY = 16
"""Drafted tokens over which the chance of a draft is averaged."""


class Draft(NamedTuple):
    """What a sequence may be fed, and the chance of each token where those before it are right."""

    tokens: Sequence[int]
    chance: float

    def gain(self, most: int) -> float:
        """Tokens more than one that a step is expected to give with ``most`` of the draft."""
        fed, p = min(most, len(self.tokens)), self.chance
        return fed if p == 1 else p * (1 - p**fed) / (1 - p)


NO_DRAFT = Draft((), 0.0)


class Lookup:
    """Where each n-gram of a sequence occurred last, and how often drafts from there were right.

    Drafts are compared with what comes after them whether they were fed or not, so a sequence whose text begins to
    repeat is noticed without a step that tries.

    Args:
        tokens: The sequence's tokens, a list to which its owner appends.
    """

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._after: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in NGRAMS}
        self._known = 0
        self._draft: list[int] = []
        self._match = 0
        self._repeated = -RECENT  # where the last repeated passage ended, as far as is known
        self._chances = [0.5] * (LONGEST + 1)  # by length of the match
        self._trials = [2] * (LONGEST + 1)
        self._learn()

    @property
    def repeats(self) -> bool:
        """Whether the text has repeated a passage a little while ago, and may well do so again."""
        return len(self._tokens) - self._repeated < RECENT

    def propose(self, most: int) -> Draft:
        """What may come next, ``most`` tokens of it; nothing where the last tokens are new."""
        self._compare()
        self._learn()
        tokens, end = self._tokens, len(self._tokens)
        for n in NGRAMS:
            after = self._after[n].get(tuple(tokens[-n:]))
            if after is not None:
                break
        else:
            self._draft = []
            return NO_DRAFT
        self._match = n
        while self._match < min(LONGEST, after) and tokens[after - 1 - self._match] == tokens[end - 1 - self._match]:
            self._match += 1
        self._draft = tokens[after : after + most]
        while len(self._draft) < most:  # it runs into its own beginning: a loop
            self._draft += self._draft[: most - len(self._draft)]
        return Draft(self._draft, self._chances[self._match])

    def _compare(self) -> None:
        """Compare the last draft with what came."""
        hits = 0
        for token, drafted in zip(self._tokens[self._known :], self._draft, strict=False):
            hit = token == drafted
            hits += hit
            self._chances[self._match] += (hit - self._chances[self._match]) / self._trials[self._match]
            self._trials[self._match] = min(MEMORY, self._trials[self._match] + 1)
            if not hit:
                break
        if hits >= RUN:
            self._repeated = self._known + hits

    def _learn(self) -> None:
        """Take in the tokens that are new: what each n-gram is followed by."""
        tokens, end = self._tokens, len(self._tokens)
        while self._known < end:
            until = min(end, self._known + AT_ONCE)
            for n, after in self._after.items():
                first = max(self._known, n)
                grams = (tokens[first - n + i : max(first, until) - n + i] for i in range(n))
                after.update(zip(zip(*grams, strict=True), range(first, until), strict=True))
            self._known = until


def agreeing(draft: Sequence[int], drawn: Sequence[int]) -> int:
    """Tokens of ``drawn`` that count: those that the draft had foreseen, and the one after them."""
    return next((i + 1 for i, token in enumerate(draft) if token != drawn[i]), len(draft) + 1)


SHY = 1.03
"""Speedup that a draft must promise over no draft, and a longer draft over a shorter one."""
REFRESH, REFRESH_REPEAT = 128, 4
"""Drafted steps after which plain ones are timed again, and for how many tokens."""
FORGIVEN = 1 / 1024
"""Share by which costs that are too high fall each time, all together, so that they are measured again some day."""
UNKNOWN_COST = 1 / 8
"""The cost of a drafted token before any was measured, in tokens of plain steps."""


class Pace:
    """How long an engine's steps take, plain and with drafts: which of the two gives more tokens a second.

    A step of a few tokens costs one device hardly more than a step of one, and another nearly as much as so many steps.
    A step with drafts may also cost something however few they are, so costs are kept by size: numbers of drafted
    tokens that have as many binary digits.
    """

    def __init__(self) -> None:
        self._seqs = 0
        self._plain = 0.0  # seconds of a step of so many sequences, which gives each one token
        self._since = 0  # drafted steps since that was measured
        self._costs: dict[int, float] = {}  # seconds that each drafted token adds to a step, by size
        self._timed = [0] * 32  # steps of each size that have been timed

    @property
    def token(self) -> float:
        """Seconds of a plain step; 0 before one was timed."""
        return self._plain

    @property
    def stale(self) -> bool:
        """Whether plain steps have to be timed again."""
        return self._since >= REFRESH

    def _cost(self, drafted: int) -> float:
        """Seconds that each of so many drafted tokens adds to a step, measured or guessed."""
        size = drafted.bit_length()
        if (known := self._costs.get(size)) is not None:
            return known
        if smaller := [other for other in self._costs if other < size]:
            return self._costs[max(smaller)] / 2  # as if it were the step that costs: it is tried, and then measured
        if self._costs:
            return self._costs[min(self._costs)]
        return UNKNOWN_COST * self._plain / self._seqs

    def choose(self, drafts: Sequence[Draft], room: int) -> int:
        """Tokens of each draft to feed at most; 0: none. A step has ``room`` for so many beside those that are due."""
        seqs = len(drafts)
        if seqs != self._seqs or self.stale:
            return 0
        best, chosen, fed = seqs / self._plain, 0, 0
        for cap in CAPS:
            drafted = sum(min(cap, len(draft.tokens)) for draft in drafts)
            if drafted > room:
                break
            rate = (seqs + sum(draft.gain(cap) for draft in drafts)) / (self._plain + drafted * self._cost(drafted))
            if rate > SHY * best:
                best, chosen, fed = rate, cap, drafted
        for size in self._costs:
            if size > fed.bit_length():
                self._costs[size] *= 1 - FORGIVEN / len(self._costs)
        return chosen

    def plain(self, seqs: int, seconds: float) -> None:
        """A plain step of ``seqs`` sequences took so long, for each token of one."""
        self._plain = seconds if seqs != self._seqs else _nearer(self._plain, seconds)
        self._seqs, self._since = seqs, 0

    def drafted(self, tokens: int, seconds: float) -> None:
        """A step with so many drafted tokens took so long."""
        self._since += 1
        size = tokens.bit_length()
        self._timed[size] += 1
        cost = max(self._plain / 64, seconds - self._plain) / tokens
        self._costs[size] = _nearer(self._cost(tokens), cost, max(1 / 8, 1 / self._timed[size]))


def _nearer(average: float, value: float, share: float = 1 / 8) -> float:
    """A running average. One value moves it little, however far off it is: a moment of another program's."""
    return average + (min(value, 2 * average) - average) * share
