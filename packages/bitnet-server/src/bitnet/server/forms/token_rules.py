"""Token ids that an answer may hold, and words that it must not, as constraints."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bitnet.core.engine import Constraint
from bitnet.core.engine.constraint import MakesConstraint
from bitnet.core.text.tokenizer import Tokenizer
from bitnet.server.request.errors import wrong
from bitnet.server.request.fields import Fields

MAX_WORDS = 1000


@dataclass(frozen=True, slots=True)
class TokenRules:
    """vLLM's ``allowed_token_ids`` and ``bad_words``.

    Attributes:
        allowed: The only ids that may be chosen, end tokens included; None: all.
        bad_words: Texts whose tokens must not follow each other, with or without a space before them. The same text may
            still come in other tokens.
    """

    allowed: tuple[int, ...] | None
    bad_words: tuple[str, ...]

    @classmethod
    def read(cls, fields: Fields) -> TokenRules | None:
        """The rules of a request; None: it has none.

        Raises:
            RequestError: A field is not what it must be.
        """
        allowed, words = fields.tokens("allowed_token_ids"), fields.strings("bad_words", MAX_WORDS)
        if allowed is not None and not allowed:
            raise wrong(fields.name("allowed_token_ids"), "is empty; name at least one token.")
        return cls(None if allowed is None else tuple(allowed), words) if allowed or words else None

    def over(self, tokenizer: Tokenizer, inner: MakesConstraint | None) -> MakesConstraint:
        """Makes constraints that keep the rules, and those of ``inner``. This is slow: call it outside the event loop.

        Raises:
            RequestError: A token is not in the vocabulary, or no token is left.
        """
        size = tokenizer.vocab_size
        free = np.zeros(size, np.uint8) if self.allowed is not None else np.ones(size, np.uint8)
        for token in self.allowed or ():
            if token >= size:
                raise wrong("allowed_token_ids", f"has token {token}; the vocabulary is 0 … {size - 1}.")
            free[token] = 1
        sequences = {tuple(tokenizer.encode(text, add_special=False)) for w in self.bad_words for text in (w, f" {w}")}
        free[[sequence[0] for sequence in sequences if len(sequence) == 1]] = 0
        if not free.any():
            raise wrong("bad_words" if self.bad_words else "allowed_token_ids", "leaves no token to choose.")
        longer = [sequence for sequence in sequences if len(sequence) > 1]
        mask = np.packbits(free, bitorder="little")
        return lambda: _Ruled(mask, longer, None if inner is None else inner())


class _Ruled:
    """The constraint of one continuation.

    Args:
        mask: One bit for each token.
        sequences: Tokens of which the last must not follow the others.
    """

    def __init__(self, mask: npt.NDArray[np.uint8], sequences: list[tuple[int, ...]], inner: Constraint | None) -> None:
        self._mask, self._sequences, self._inner = mask, sequences, inner
        self._longest = max((len(sequence) - 1 for sequence in sequences), default=0)
        self._tail: tuple[int, ...] = ()

    def allowed(self) -> bytes | None:
        mask = self._mask.copy()
        for *before, last in self._sequences:
            if self._tail[len(self._tail) - len(before) :] == tuple(before):
                mask[last // 8] &= ~np.uint8(1 << last % 8)
        if self._inner is not None:
            given = self._inner.allowed()
            if given is None:
                return None
            other = np.frombuffer(given, np.uint8)[: len(mask)]
            mask[: len(other)] &= other
            mask[len(other) :] = 0
        return bytes(mask)

    def accept(self, token: int) -> None:
        if self._longest:
            self._tail = (*self._tail, token)[-self._longest :]
        if self._inner is not None:
            self._inner.accept(token)
