"""Forms that begin in the midst of an answer, where a tool call does."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from bitnet.core.text.tokenizer import StreamDecoder, Tokenizer
from bitnet.server.forms.matchers import FormError, FormSource, Matcher, Matchers

KEPT_TOKENS = 256
"""Number of tokens after which those are forgotten that can no longer be part of a mark."""
MAX_HEAD = 400
"""Maximum characters of an answer in which a call without a mark may begin."""


@dataclass(frozen=True, slots=True)
class LazyForm:
    """The form of a call, and how one begins.

    Attributes:
        mark: The text with which a call begins, anywhere in an answer; empty: one begins as ``head`` says. From the
            middle of the mark on the grammar holds, as a token may end the mark and go on. So it allows other text,
            too, as long as that does not complete the mark.
        head: A regular expression; a call begins where the beginning of the answer matches it.
        grammars: Lark grammars of a call from its beginning on. A later one is tried if those before cannot be
            compiled.
    """

    mark: str
    head: str
    grammars: tuple[str, ...]

    def begins(self, text: str, searched: int) -> int | None:
        """Where a call begins in ``text``; None: nowhere yet.

        Args:
            searched: Number of characters after which nothing has been looked for.
        """
        if self.mark:
            since = max(0, searched - len(self.mark))
            if text.find(self.mark[0], since) < 0:
                return None
            at = text.find(self.mark, since)
            if at >= 0:
                return at
            lengths = range(len(self.mark) - 1, len(self.mark) // 2 - 1, -1)
            return next((len(text) - n for n in lengths if text.endswith(self.mark[:n])), None)
        return 0 if re.match(self.head, text) else None

    def may_begin(self, text: str) -> bool:
        """Whether a call may still begin after ``text``."""
        return bool(self.mark) or (len(text) < MAX_HEAD and text.lstrip()[:1] in ("", "[", "{", "<"))


class LazyMatchers:
    """Makes the constraints of a request, each for one continuation.

    Args:
        form: The form, or what makes it when the first constraint is made.
    """

    def __init__(self, matchers: Matchers, form: LazyForm | Callable[[], LazyForm], tokenizer: Tokenizer) -> None:
        self._matchers, self._form, self._tokenizer = matchers, form, tokenizer
        self._made: list[LazyMatcher] = []

    def __call__(self) -> LazyMatcher:
        if not isinstance(self._form, LazyForm):
            self._form = self._form()
        self._made.append(LazyMatcher(self._matchers, self._form, self._tokenizer))
        return self._made[-1]

    def close(self) -> None:
        """Free them; their generations have ended."""
        for one in self._made:
            one.close()


class LazyMatcher:
    """The constraint of one continuation: none until a call begins, and after one has ended.

    If no grammar of the form can be compiled, or a matcher fails, the answer goes on as the model writes it, as nobody
    has asked for enforcement.

    Attributes:
        waiting: Whether the next token may be any.
        watching: Whether a call may begin with the next token.
    """

    def __init__(self, matchers: Matchers, form: LazyForm, tokenizer: Tokenizer) -> None:
        self._matchers, self._form, self._tokenizer = matchers, form, tokenizer
        self._left = list(form.grammars)
        self._compiled: Future[None] | None = None
        self._matcher: Matcher | None = None
        self._restart()

    def _restart(self) -> None:
        """Wait for the next call."""
        self.waiting = self.watching = True
        self._forget_all()
        self._at = 0  # where the call begins, in characters
        self._undecided = False  # whether the mark is not complete

    def _forget_all(self) -> None:
        """Go on as if nothing had come, which is so for the next mark."""
        self._decoder = StreamDecoder(self._tokenizer)
        self._text, self._tokens = "", list[int]()
        self._ends = list[int]()  # characters up to each token

    def watch(self, tokens: Sequence[int]) -> int:
        if not self.watching:
            return len(tokens)
        mark = self._form.mark
        if mark and self._decoder.lacks(mark[0], tokens) and mark[0] not in self._text[1 - len(mark) :]:
            if self._tokens:  # no mark has begun
                self._forget_all()
            return len(tokens)
        if len(tokens) <= 1:
            for token in tokens:
                self._look(token)
            return len(tokens)
        half = len(tokens) // 2  # one of them may still hold no mark's beginning
        count = self.watch(tokens[:half])
        return count + self.watch(tokens[half:]) if self.waiting else count

    def accept(self, token: int) -> None:
        if self._matcher is not None:
            self._matcher.accept(token)
        if self.watching and (self.waiting or self._undecided):
            self._look(token)

    def _look(self, token: int) -> None:
        """Look for the beginning of a call in the text with one more token."""
        if self._tokenizer.is_hidden(token):
            return
        searched = len(self._text)
        self._text += self._decoder.push(token)
        self._tokens.append(token)
        self._ends.append(len(self._text))
        mark, since = self._form.mark, self._text[self._at :]
        if self._undecided and not since.startswith(mark):
            if mark.startswith(since):
                return
            self._drop_matcher()
            self.waiting = True
        self._undecided = False
        if not self.waiting:
            return
        if mark and len(self._tokens) >= KEPT_TOKENS:
            searched -= self._forget(len(self._text) - 2 * len(mark))
        at = self._form.begins(self._text, searched)
        if at is not None:
            self._at, self.waiting = at, False
            self._undecided = not self._text.startswith(mark, at)
            self._compile()
        elif not self._form.may_begin(self._text):
            self.watching = False

    def _forget(self, before: int) -> int:
        """Drop the tokens whose text ends before a place; return the number of characters dropped."""
        first = bisect_left(self._ends, before)
        dropped = self._ends[first - 1] if first else 0
        self._text, self._tokens = self._text[dropped:], self._tokens[first:]
        self._ends = [end - dropped for end in self._ends[first:]]
        return dropped

    def _compile(self) -> None:
        """Have the next grammar compiled, if there is one."""
        if self._left:
            self._compiled = self._matchers.compile(FormSource("lark", self._left[0]))
        else:
            self._give_up()

    def _give_up(self) -> None:
        self._drop_matcher()
        self.waiting, self.watching = True, False

    def _drop_matcher(self) -> None:
        self.close()
        self._matcher = None

    def allowed(self) -> bytes | None:
        if self._matcher is None and not self.waiting and not self._opened():
            return None
        if self._matcher is None:
            return self._matchers.every
        try:
            mask = self._matcher.allowed()
        except FormError:
            self._give_up()
            return self._matchers.every
        if mask is None:
            return None
        ordinary = self._matchers.ordinary
        bits = np.frombuffer(mask, np.uint8)[: len(ordinary)]
        if self._form.mark and not (bits & ordinary[: len(bits)]).any():  # the call has ended
            self._drop_matcher()
            self._restart()
            return self._matchers.every
        return mask

    def _opened(self) -> bool:
        """Open a matcher, if the grammar has been compiled; False: not yet."""
        assert self._compiled is not None
        if not self._compiled.done():
            return False
        if self._compiled.exception() is not None:
            del self._left[0]
            self._compile()
            return self.waiting
        first = next(i for i, end in enumerate(self._ends) if end > self._at)
        self._matcher = Matcher(self._matchers, FormSource("lark", self._left[0]), self._tokens[first:])
        return True

    def close(self) -> None:
        """Free the matcher. Closing twice is allowed."""
        if self._matcher is not None:
            self._matcher.close()
