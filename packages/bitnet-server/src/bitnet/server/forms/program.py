"""The program of a helper process that compiles forms and holds matchers, with ``llguidance``.

It imports nothing of this package; :mod:`bitnet.core.support.helper.loop` calls it. A request is a letter for what to
do, and its arguments; an answer is a letter for how it went, and a mask or a text.
"""

from __future__ import annotations

import marshal
import struct
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import llguidance

CACHED = 8
"""Compiled forms that are kept for further requests."""
MESSAGE = 400
"""Maximum characters of an error."""
HEAD = 200
"""Bytes of a forced text that the tokenizer splits; each mask needs the first token only."""
DONE, REFUSED, MISSING = b"d", b"e", b"?"
LIMITS = llguidance.LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
"""With these, a mask takes at most about 0.2 s, with a vocabulary of 128,000 tokens."""

_forms: OrderedDict[bytes, llguidance.LLMatcher] = OrderedDict()
_matchers: dict[int, llguidance.LLMatcher] = {}
_tokenizers: list[Any] = []
_ask: list[Callable[[bytes], bytearray]] = []


class _Vocabulary:
    """A vocabulary as llguidance reads it."""

    def __init__(self, tokens: list[bytes], special: list[int], end: list[int], bos: int | None) -> None:
        self.tokens, self.special_token_ids = tokens, special
        self.eos_token_id, self.bos_token_id = end[0], bos
        self._bytes = {token: i for i, token in enumerate(tokens) if len(token) == 1}

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of a text that a form forces: the tokenizer's for its beginning, single bytes for a long rest."""
        head, rest = text[:HEAD], text[HEAD:]
        while rest and rest[0] & 0xC0 == 0x80:  # in the midst of a character
            head, rest = head + rest[:1], rest[1:]
        if not all(rest[i : i + 1] in self._bytes for i in range(len(rest))):
            head, rest = text, b""
        return [*_split(head), *(self._bytes[rest[i : i + 1]] for i in range(len(rest)))]


@lru_cache(maxsize=1024)
def _split(text: bytes) -> tuple[int, ...]:
    """The tokenizer's tokens of a text; it is in the server."""
    if not text or not _tokenizers:  # it is tried while it is made
        return ()
    found = _ask[0](text)
    return struct.unpack(f">{len(found) // 4}I", found)


def prepare(setup: bytearray, ask: Callable[[bytes], bytearray]) -> None:
    """Take in the vocabulary, and whom to ask for the tokenizer's split."""
    _ask.append(ask)
    tokens, special, end, bos = marshal.loads(setup)
    wrapper = llguidance.TokenizerWrapper(_Vocabulary(tokens, special, end, bos))
    _tokenizers.append(llguidance.LLTokenizer(wrapper, eos_token=end))


def answer(data: bytearray) -> bytes:
    """Do what a request asks: ``f``: compile a form; ``o``: open a matcher; ``n``: accept a token; ``c``: close one."""
    request = bytes(data)
    what, request = request[:1], request[1:]
    if what == b"f":
        return _compiled(request[:32], request[32:33], request[33:].decode())
    (number,) = struct.unpack_from(">Q", request)
    if what == b"c":
        _matchers.pop(number, None)
        return DONE
    if what == b"o":
        form = _forms.get(request[8:40])
        if form is None:
            return MISSING
        _matchers[number] = matcher = form.deep_copy()
        matcher.consume_tokens(list(struct.unpack(f">{(len(request) - 40) // 4}I", request[40:])))
    else:
        if number not in _matchers:
            return MISSING
        matcher = _matchers[number]
        matcher.consume_token(struct.unpack_from(">I", request, 8)[0])
    mask = b"" if matcher.is_error() else matcher.compute_bitmask()
    return _refused(matcher.get_error()) if matcher.is_error() else DONE + mask


def _refused(reason: str) -> bytes:
    return REFUSED + " ".join(reason[:MESSAGE].split())[:MESSAGE].encode()


def _compiled(key: bytes, kind: bytes, source: str) -> bytes:
    maker = llguidance.LLMatcher
    try:
        if kind == b"j":
            grammar = maker.grammar_from_json_schema(source, overrides={"whitespace_flexible": False})
        else:
            grammar = (maker.grammar_from_lark if kind == b"l" else maker.grammar_from_regex)(source)
    except ValueError as error:
        return _refused(str(error))
    matcher = maker(_tokenizers[0], grammar, log_level=0, limits=LIMITS)
    first = matcher.deep_copy()
    if not first.is_error():
        first.compute_bitmask()
    if first.is_error():
        return _refused(first.get_error())
    _forms[key] = matcher
    if len(_forms) > CACHED:
        _forms.popitem(last=False)
    return DONE
