"""The text of a generation: decoded, split into thought and answer, and cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from bitnet.core.engine.stop import StopMatcher
from bitnet.core.text.thinking import Piece, TextStream, Thinking, ThoughtReader


class AnswerText:
    """Collects a generation's text. Stop strings are looked for in the answer, not in a thought.

    Args:
        thinking: How a thought is marked; None: all text is the answer's.
        stop: Stop strings.
    """

    def __init__(self, stream: TextStream, thinking: Thinking | None, stop: Sequence[str]) -> None:
        self._stream = stream
        self._reader = None if thinking is None else ThoughtReader(thinking, stream)
        self._stopper, self._stops = StopMatcher(stop), bool(stop)
        self._pieces: list[Piece] = []
        self._taken = 0  # pieces that take() has returned

    @property
    def matched(self) -> str | None:
        """The stop string that was found; text after it is dropped."""
        return self._stopper.matched

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the thought, without those of its marks."""
        return 0 if self._reader is None else self._reader.tokens

    @property
    def before(self) -> int | None:
        """Number of tokens before the answer's first one; None: it has not come."""
        return 0 if self._reader is None else self._reader.before

    @property
    def whole(self) -> Piece:
        """All text so far."""
        return _joined(self._pieces)

    def push(self, tokens: Sequence[int]) -> int:
        """Take in further tokens, up to the one that completes a stop string; return how many those are."""
        if not self._stops:
            self._add(tokens)
            return len(tokens)
        for i, token in enumerate(tokens):
            self._add((token,))
            if self.matched is not None:
                return i + 1
        return len(tokens)

    def end(self) -> None:
        """Take in what was held back. Call it after the last token, unless a stop string was found."""
        reasoning, text = Piece("", self._stream.flush()) if self._reader is None else self._reader.end()
        self._pieces += [Piece(reasoning, self._stopper.push(text)), Piece("", self._stopper.flush())]

    def take(self) -> Piece:
        """The text since the last call."""
        new, self._taken = self._pieces[self._taken :], len(self._pieces)
        return new[0] if len(new) == 1 else _joined(new)

    def _add(self, tokens: Sequence[int]) -> None:
        reader = None if self._reader is None or self._reader.in_answer else self._reader
        piece = Piece("", self._stream.push(*tokens)) if reader is None else reader.push(tokens)
        self._pieces.append(Piece(piece.reasoning, self._stopper.push(piece.text)) if self._stops else piece)


def _joined(pieces: Sequence[Piece]) -> Piece:
    return Piece("".join(p.reasoning for p in pieces), "".join(p.text for p in pieces))
