"""Structured output: JSON schemas, regular expressions and grammars as constraints, compiled by ``llguidance``.

A form that cannot be compiled is refused before anything is generated, and if a matcher fails, its generation ends with
an error. So an answer never violates the requested form silently.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from bitnet.core.engine import Constraint
from bitnet.core.errors import brief
from bitnet.core.text.tokenizer import Tokenizer
from bitnet.server.call import to_json
from bitnet.server.errors import RequestError, unsupported, wrong
from bitnet.server.fields import Fields

if TYPE_CHECKING:
    import llguidance

MAX_SOURCE = 200_000
"""Maximum characters of a schema or grammar."""

Form = tuple[str, Any, str]
"""Kind (``json``, ``regex``, ``lark`` or ``choice``), source, and the field that contained it."""

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


class Compiler:
    """Makes constraints for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._made: llguidance.LLTokenizer | None = None

    def compile(self, form: Form) -> Callable[[], Constraint]:
        """A function that makes a constraint for each continuation. This is slow: call it outside the event loop.

        Raises:
            RequestError: The source is not a valid schema, expression or grammar, or has unsupported features.
        """
        import llguidance

        kind, source, field = form
        if len(source if isinstance(source, str) else to_json(source)) > MAX_SOURCE:
            raise wrong(field, f"has more than {MAX_SOURCE:,} characters.")
        if kind == "json":
            try:
                options: Any = {"whitespace_flexible": False}
                grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(source), overrides=options)
            except ValueError as error:
                raise wrong(field, f"is not a valid JSON schema: {error}") from None
        elif kind == "lark":
            grammar = llguidance.LLMatcher.grammar_from_lark(source)
        else:
            grammar = llguidance.LLMatcher.grammar_from_regex(
                "|".join(map(re.escape, source)) if kind == "choice" else source
            )
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(self._llguidance(), grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise wrong(field, f"cannot be compiled: {' '.join(matcher.get_error().split())[:300]}")
        return lambda: _Matching(matcher.deep_copy())

    def _llguidance(self) -> llguidance.LLTokenizer:
        import llguidance

        with self._lock:
            if self._made is None:
                wrapper = llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer))
                self._made = llguidance.LLTokenizer(wrapper, eos_token=sorted(self._tokenizer.eos_ids))
            return self._made


class _Vocabulary:
    """Adapts a tokenizer to llguidance."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = range(tokenizer.vocab_size)
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.eos_ids)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(i) for i in ids]
        self.special_token_ids = [i for i in ids if tokenizer.is_special(i)]

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False)


class _Matching:
    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def allowed(self) -> bytes:
        mask = self._matcher.compute_bitmask()
        self._check()
        return mask

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ValueError(self._matcher.get_error())


def available() -> bool:
    """Whether ``llguidance`` is installed."""
    from importlib.util import find_spec

    return find_spec("llguidance") is not None


def checked(form: Form | None, fields: Fields) -> Form | None:
    """Check that a form can be enforced.

    Raises:
        RequestError: ``llguidance`` is not installed, or another field would cut or change the constrained answer.
    """
    if form is None:
        return None
    field = form[2]
    if not available():
        raise unsupported(field, 'the server lacks llguidance (pip install "bitnet-server[structured]").')
    why = f"it would break what {field} asks for."
    fields.refuse({"ignore_eos": why, "min_tokens": why}, (None, False, 0))
    return form


def openai_form(fields: Fields) -> Form | None:
    """The form requested by ``response_format`` or vLLM's ``structured_outputs``; None: none.

    Raises:
        RequestError: The field is invalid.
    """
    fields.refuse(
        dict.fromkeys(("guided_json", "guided_regex", "guided_grammar", "guided_choice"), "use structured_outputs.")
        | {"grammar": "GBNF is not supported; use structured_outputs with a Lark grammar."}
    )
    outputs = fields.object("structured_outputs")
    form = fields.object("response_format")
    found = None if form is None else format_of(form, form.object("json_schema"))
    if outputs is None:
        return checked(found, fields)
    if found is not None:
        raise wrong("structured_outputs", "and response_format cannot both be given.")
    kinds = {"json": "json", "regex": "regex", "grammar": "lark", "choice": "choice"}
    given = [name for name in outputs.values if name in outputs]
    if len(given) != 1 or given[0] not in kinds:
        raise wrong("structured_outputs", f"must have one of {', '.join(kinds)}.")
    (name,) = given
    if name == "json":
        return checked(("json", _schema(outputs, "json"), outputs.name(name)), fields)
    if name == "choice":
        choices = outputs.strings(name)
        if not choices:
            raise wrong(outputs.name(name), "is empty.")
        return checked(("choice", choices, outputs.name(name)), fields)
    return checked((kinds[name], outputs.text(name), outputs.name(name)), fields)


def format_of(form: Fields, holder: Fields | None) -> Form | None:
    """A format by its ``type``: ``text``, ``json_object``, or ``json_schema``, whose schema is in ``holder``."""
    form.require("type")
    kind = form.choice("type", ("text", "json_object", "json_schema"), "")
    if kind == "json_schema":
        if holder is None:
            raise wrong(form.name("json_schema"), "is missing.")
        holder.require("schema")
        return "json", _schema(holder, "schema"), holder.name("schema")
    return ("json", ANY_OBJECT, form.name("type")) if kind == "json_object" else None


def ollama_form(fields: Fields) -> Form | None:
    """The form requested by Ollama's ``format``: ``"json"``, or a schema."""
    value = fields.values.get("format")
    if value is None or value == "":
        return None
    return checked(("json", ANY_OBJECT if value == "json" else _schema(fields, "format"), "format"), fields)


def _schema(fields: Fields, name: str) -> Any:
    value = fields.values[name]
    if not isinstance(value, dict | bool):
        raise wrong(fields.name(name), f"is {brief(value)}; it must be a JSON schema.")
    return value


def failure(reason: object) -> RequestError:
    """The error for an answer whose form could not be enforced."""
    message = f"The answer could not be held to the form that was asked for: {reason}"
    return RequestError(500, message, code="constraint_failed")
