"""A generation's thought, as its next step depends on it: when it ends, and when it must be ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from bitnet.core.text.thinking import TextStream, Thinking, ThoughtReader

UNLIMITED = 1 << 62


class ThoughtControl:
    """Ends a thought at its budget, and holds a constraint back until the thought is over.

    Args:
        budget: Maximum tokens of the thought; None: no limit.
        constrained: Whether a constraint holds for the answer.

    Attributes:
        forced: Tokens of an end mark that must come next.
    """

    def __init__(self, thinking: Thinking, decoder: TextStream, *, budget: int | None, constrained: bool) -> None:
        self._thinking, self._reader = thinking, ThoughtReader(thinking, decoder)
        self._budget = UNLIMITED if budget is None else budget
        self._constrained = constrained
        self.forced: deque[int] = deque()
        self._ended = False  # whether an end mark was begun here
        self._begun = False  # whether there was a token
        self._without = False  # whether a constrained answer has begun without a thought

    @property
    def over(self) -> bool:
        """Whether all further tokens belong to the answer."""
        return self._reader.over or self._without

    @property
    def constraint_waits(self) -> bool:
        """Whether the next token belongs to a thought, to which a constraint does not apply."""
        return bool(self.forced) or self._reader.inside

    @property
    def steps_left(self) -> int:
        """Number of tokens that may come before the host must look at them."""
        if self.over:
            return UNLIMITED
        if self.forced or self._constrained:
            return 1
        return max(1, self._budget - self._reader.tokens)

    def starts(self, token: int) -> bool:
        """Whether ``token``, as the first one, begins a thought."""
        return not self._begun and not self._reader.inside and token == self._thinking.start_token

    def without_stop(self, tokens: list[int], stop: frozenset[int]) -> list[int]:
        """Tokens with an end mark begun in place of a stop token that comes within the thought, if a constrained answer
        must follow it."""
        if not (self._constrained and self._reader.inside and not self.forced and tokens and tokens[-1] in stop):
            return tokens
        self._end()
        return [*tokens[:-1], self.forced.popleft()]

    def accept(self, tokens: Sequence[int]) -> None:
        """Take in tokens that were chosen.

        Raises:
            ValueError: A token ends the thought and begins the answer that a constraint should decide.
        """
        if self.over:
            return
        was_inside, self._begun = self._reader.inside, True
        text = self._reader.push(tokens).text
        if self._constrained and text and was_inside:
            raise ValueError("a token ended the thought and began the answer at once.")
        self._without = self._constrained and not was_inside and not self._reader.inside
        self._check_budget()

    def accept_some(self, tokens: Sequence[int], *, thought_only: bool = False) -> int:
        """Take in tokens up to the one that reaches the budget; return how many those are.

        Args:
            thought_only: Whether to end with the thought, too; the tokens begin within it.
        """
        some = tokens if self._ended else tokens[: max(0, self._budget - self._reader.tokens)]
        if some and self._reader.skip_thought(some):
            self._begun = True
            self._check_budget()
            return len(some)
        if len(tokens) <= 1:
            if tokens and not self.over:
                self._begun = True
                self._reader.push(tokens)
                self._check_budget()
            return len(tokens)
        half = len(tokens) // 2  # one of them may still be taken in at once
        count = self.accept_some(tokens[:half], thought_only=thought_only)
        if self.forced or (thought_only and not self._reader.inside):
            return count
        return count + self.accept_some(tokens[half:], thought_only=thought_only)

    def take_forced(self, most: int) -> list[int]:
        """The tokens that must come next, ``most`` of them at most; none must come after them."""
        taken = list(self.forced)[:most]
        self.forced.clear()
        return taken

    def _check_budget(self) -> None:
        if self._reader.inside and not self.forced and self._reader.tokens >= self._budget:
            self._end()

    def _end(self) -> None:
        """Have an end mark come next; only once, as a tokenizer may be unable to write it."""
        if not self._ended:
            self._ended = True
            self.forced.extend(self._thinking.end_tokens)
