"""Turns requests into sequences: checks prompts, texts and options before an engine sees them."""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Callable, Sequence
from numbers import Integral

from bitnet.core.engine.constraint import MakesConstraint
from bitnet.core.engine.generation import Generation
from bitnet.core.engine.options import GenerationOptions
from bitnet.core.engine.sampling import sibling_seed
from bitnet.core.engine.scoring import Scoring
from bitnet.core.errors import ContextFullError, InvalidInputError, brief
from bitnet.core.text.thinking import TextStream, Thinking


class Preparer:
    """Makes the sequences that an engine can run. May be called from any thread.

    Args:
        context: Maximum tokens of a sequence.
        vocab_size: Number of token ids, which start at 0.
        eos: Ids that end a generation.
        text: Makes the decoder for the text that continues a prompt.
        lookup: Whether text that repeats an earlier passage is drafted from it
            (:mod:`bitnet.core.engine.prompt_lookup`).
        longest: Maximum context of the model; None: ``context``.
    """

    def __init__(
        self,
        *,
        context: int,
        vocab_size: int,
        eos: frozenset[int],
        text: Callable[[Sequence[int]], TextStream],
        lookup: bool,
        longest: int | None = None,
    ) -> None:
        self.context, self.vocab_size, self.lookup = context, vocab_size, lookup
        self._eos, self._text = eos, text
        self._numbers = itertools.count()
        more = longest is not None and context < longest
        self._or_longer = ", or load the model with a longer context (--context)." if more else "."
        """How advice to a prompt that is too long goes on."""

    def prepare(
        self,
        prompt: Sequence[int],
        options: GenerationOptions,
        n: int = 1,
        constraint: MakesConstraint | None = None,
        thinking: Thinking | None = None,
    ) -> tuple[Generation, ...]:
        """``n`` continuations of ``prompt``, checked; :meth:`~bitnet.core.engine.Engine.add` begins them.

        Args:
            constraint: Makes the constraint of each continuation; None: unconstrained. It holds for the answer, not for
                a thought before it.
            thinking: How a thought is marked; None: none is looked for.

        Raises:
            ContextFullError: The prompt leaves no room for a token.
            InvalidInputError: The prompt is empty, a token id is not in the vocabulary, or ``constraint`` is no
                function.
        """
        self._check_tokens("the prompt", prompt)
        if not isinstance(n, Integral) or n < 1:
            raise InvalidInputError(f"n is {n!r}; it must be an integer ≥ 1.")
        if constraint is not None and not callable(constraint):
            raise InvalidInputError(f"constraint is {brief(constraint)}; it must be a function that makes one.")
        if len(prompt) >= self.context:
            raise ContextFullError(
                f"the prompt has {len(prompt)} tokens; the context holds {self.context}, including one new token.",
                hint=f"Shorten the prompt{self._or_longer}",
                tokens=len(prompt),
                context=self.context,
            )
        for name, ids in (
            ("stop_tokens", options.stop_tokens),
            ("logit_bias", options.logit_bias or ()),
            ("prediction", options.predicted_tokens),
        ):
            if ids:
                self._check_tokens(name, tuple(ids))
        seed = options.seed
        if seed is None:
            seed = 0 if options.temperature == 0 else secrets.randbits(63)
        stop = frozenset(options.stop_tokens) | (frozenset() if options.ignore_eos else self._eos)
        forbidden = {token for token, bias in (options.logit_bias or {}).items() if bias == -math.inf}
        if len(forbidden | stop if options.min_tokens else forbidden) >= self.vocab_size:
            by = "logit_bias and min_tokens forbid" if options.min_tokens else "logit_bias forbids"
            raise InvalidInputError(f"{by} every token.", hint="Allow at least one.")
        return tuple(
            Generation(
                next(self._numbers),
                prompt,
                options,
                stop_tokens=stop,
                context=self.context,
                seed=sibling_seed(seed, i),
                text=lambda: self._text(prompt),
                constraint=None if constraint is None else constraint(),
                thinking=thinking,
                lookup=self.lookup,
            )
            for i in range(n)
        )

    def prepare_score(self, tokens: Sequence[int], start: int = 1) -> Scoring:
        """The scoring of ``tokens[start:]``, each given all before it; :meth:`~bitnet.core.engine.Engine.add` begins
        it.

        Raises:
            ContextFullError: There are more tokens than the context holds.
            InvalidInputError: There are fewer than two tokens, one is not in the vocabulary, or ``start`` is not in
                ``1 … len(tokens) - 1``.
        """
        self._check_tokens("the text", tokens)
        if len(tokens) > self.context:
            raise ContextFullError(
                f"{len(tokens)} tokens are to be scored; the context holds {self.context}.",
                hint=f"Score fewer tokens at a time{self._or_longer}",
            )
        if len(tokens) < 2:
            raise InvalidInputError(
                "the text has one token; at least two are needed, as each is scored given those before it."
            )
        if not isinstance(start, Integral) or not 1 <= start < len(tokens):
            raise InvalidInputError(f"start is {start}; it must be in 1 … {len(tokens) - 1}.")
        return Scoring(next(self._numbers), tokens, int(start))

    def _check_tokens(self, what: str, tokens: Sequence[int]) -> None:
        if not len(tokens):
            raise InvalidInputError(f"{what} has no tokens.")
        if min(tokens) < 0 or max(tokens) >= self.vocab_size:
            wrong = next(t for t in tokens if not 0 <= t < self.vocab_size)
            raise InvalidInputError(f"{what} has token {wrong}; the vocabulary is 0 … {self.vocab_size - 1}.")
