"""Structured output: JSON schemas, regular expressions and grammars as constraints, enforced by ``llguidance``.

A form that cannot be compiled is refused before anything is generated, and if a matcher fails, its generation ends with
an error. So an answer never violates the requested form silently.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, Protocol, TypeVar

from bitnet.core.errors import brief
from bitnet.core.text.tokenizer import Tokenizer
from bitnet.server.forms.gbnf import GrammarError, to_lark
from bitnet.server.forms.lazy import LazyMatchers
from bitnet.server.forms.matchers import FormError, FormSource, Matcher, Matchers
from bitnet.server.forms.schema import SchemaError, bounded, prepared
from bitnet.server.request.bounded_json import parse_text
from bitnet.server.request.errors import RequestError, unsupported, wrong
from bitnet.server.request.fields import Fields

Form = tuple[str, Any, str]
"""Kind (``json``, ``regex``, ``lark``, ``gbnf``, ``choice``, ``tools`` or ``lazy``), source, and the field that had
it. The source of ``tools`` is a function that makes a Lark grammar, that of ``lazy`` one that makes a
:class:`~bitnet.server.forms.lazy.LazyForm`, or what it makes."""
T = TypeVar("T")


class InThread(Protocol):
    """Runs host work outside the event loop."""

    def __call__(self, call: Callable[[], T], /) -> Awaitable[T]: ...


ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


class Compiler:
    """Makes constraints for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._matchers, self._tokenizer = Matchers(tokenizer), tokenizer

    async def compile(self, form: Form, in_thread: InThread) -> Constraints | LazyMatchers:
        """A function that makes a constraint for each continuation.

        Args:
            in_thread: Runs host work outside the event loop.

        Raises:
            RequestError: The source is not a valid schema, expression or grammar, has unsupported features, or exceeds
                a limit.
        """
        field = form[2]
        if form[0] == "lazy":  # it is made with the first constraint, and compiled when a call begins
            return LazyMatchers(self._matchers, form[1], self._tokenizer)
        source = await in_thread(lambda: _source(form))
        try:  # other requests may wait for the same form
            await asyncio.shield(asyncio.wrap_future(self._matchers.compile(source)))
        except FormError as error:
            raise wrong(field, f"cannot be compiled: {error}") from None
        return Constraints(self._matchers, source)

    def close(self) -> None:
        """End the helper processes."""
        self._matchers.close()


class Constraints:
    """Makes the constraints of a request, each for one continuation."""

    def __init__(self, matchers: Matchers, source: FormSource) -> None:
        self._matchers, self._source = matchers, source
        self._made: list[Matcher] = []

    def __call__(self) -> Matcher:
        self._made.append(Matcher(self._matchers, self._source))
        return self._made[-1]

    def close(self) -> None:
        """Free them; their generations have ended."""
        for matcher in self._made:
            matcher.close()


def _source(form: Form) -> FormSource:
    """What is compiled.

    Raises:
        RequestError: The form exceeds a limit, is a schema that cannot be prepared, or no grammar.
    """
    kind, given, field = form
    try:
        if kind == "tools":
            return FormSource("lark", given())
        bounded(given)
        if kind == "json":
            return FormSource("json", json.dumps(prepared(given)))
        if kind == "gbnf":
            return FormSource("lark", to_lark(given))
    except SchemaError as error:
        raise wrong(field, str(error)) from None
    except GrammarError as error:
        raise wrong(field, f"is no grammar in GBNF: {error}") from None
    if kind == "choice":
        return FormSource("regex", "|".join(map(re.escape, given)))
    return FormSource("lark" if kind == "lark" else "regex", given)


@lru_cache(maxsize=1)
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
    """The form requested by ``response_format``, vLLM's ``structured_outputs``, or llama.cpp's ``json_schema`` or
    ``grammar``; None: none.

    Raises:
        RequestError: A field is invalid, or several are given.
    """
    given = fields.object("response_format")
    found = [
        None if given is None else format_of(given, given.object("json_schema") or given),
        ("json", _schema(fields, "json_schema"), "json_schema") if "json_schema" in fields else None,
        ("gbnf", grammar, "grammar") if (grammar := fields.text("grammar")) else None,
        _structured_outputs(fields.object("structured_outputs")),
    ]
    forms = [form for form in found if form is not None]
    if len(forms) > 1:
        first, second = (form[2].partition(".")[0] for form in forms[:2])
        raise wrong(second, f"and {first} cannot both be given.")
    return checked(forms[0] if forms else None, fields)


OUTPUTS = ("json", "regex", "choice", "grammar", "json_object")
"""Forms of vLLM's ``structured_outputs``."""


def _structured_outputs(outputs: Fields | None) -> Form | None:
    if outputs is None:
        return None
    outputs.refuse(
        {
            "structural_tag": "use grammar.",
            "whitespace_pattern": "JSON is written without spaces.",
        }
    )
    given = [name for name in OUTPUTS if name in outputs and outputs.values[name] is not False]
    if len(given) != 1:
        raise wrong("structured_outputs", f"must have one of {', '.join(OUTPUTS)}.")
    (name,) = given
    field = outputs.name(name)
    if name == "json_object":
        outputs.flag(name)
        return "json", ANY_OBJECT, field
    if name == "json":
        return "json", _schema(outputs, name), field
    if name == "choice":
        choices = outputs.strings(name)
        if not choices:
            raise wrong(field, "is empty.")
        return "choice", choices, field
    text = outputs.text(name) or ""
    if name == "regex":
        return "regex", text, field
    return ("gbnf" if _DEFINED.search(text) else "lark"), text, field


_DEFINED = re.compile(r"^[ \t]*[A-Za-z0-9_-]+\s*::=", re.MULTILINE)
"""How a rule begins in GBNF, but not in Lark."""


def format_of(form: Fields, holder: Fields) -> Form | None:
    """A format by its ``type``: ``text``, ``json_object``, or ``json_schema``, whose schema is in ``holder``.

    ``json_object`` may have a schema, too, as llama.cpp's users write it.
    """
    form.require("type")
    kind = form.choice("type", ("text", "json_object", "json_schema"), "")
    if kind == "json_schema":
        holder.require("schema")
        return "json", _schema(holder, "schema"), holder.name("schema")
    if kind == "json_object" and "schema" in form:
        return "json", _schema(form, "schema"), form.name("schema")
    return ("json", ANY_OBJECT, form.name("type")) if kind == "json_object" else None


def ollama_form(fields: Fields) -> Form | None:
    """The form requested by Ollama's ``format``: ``"json"``, or a schema."""
    value = fields.values.get("format")
    if value is None or value == "":
        return None
    return checked(("json", ANY_OBJECT if value == "json" else _schema(fields, "format"), "format"), fields)


def _schema(fields: Fields, name: str) -> Any:
    """A schema, perhaps as JSON in a string, as vLLM's and llama.cpp's clients may write it."""
    value = fields.values[name]
    if isinstance(value, str):
        with suppress(ValueError):
            value = parse_text(value)
    if not isinstance(value, dict | bool):
        raise wrong(fields.name(name), f"is {brief(value)}; it must be a JSON schema.")
    return value


def failure(reason: object) -> RequestError:
    """The error for an answer whose form could not be enforced."""
    message = f"The answer could not be held to the form that was asked for: {reason}"
    return RequestError(500, message, code="constraint_failed")
