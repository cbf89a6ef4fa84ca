"""The program of a helper process that renders templates: JSON of a source and sets of values in, JSON of texts out.

It imports nothing of this package; :mod:`bitnet.core.support.helper.loop` calls it.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, ext, nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Generation(ext.Extension):
    """``{% generation %}`` … ``{% endgeneration %}``, which marks the assistant's text for training.

    Here it is plain text, but has a scope of its own, as in Hugging Face's environment.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escaping of Jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


OUTPUT = 16 << 20
"""Maximum characters of a text."""


@lru_cache(maxsize=16)
def _template(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment.from_string(source)


def answer(request: bytearray) -> bytes:
    """The helper's answer: a kind and texts, as JSON."""
    return json.dumps(_rendered(request), ensure_ascii=False).encode("utf-8", "surrogatepass")


def _rendered(request: bytearray) -> tuple[str, list[str | None]]:
    """The kind of the answer and its texts. Kinds: ``texts``; ``error``, with the reason; ``output``: a text is too
    long.

    A rendering after the first may fail on its own: its text is None.
    """
    texts: list[str | None] = []
    try:
        source, several = json.loads(request)
        template = _template(source)
    except MemoryError:
        raise
    except Exception as error:  # a template can fail in any way that Python code can
        return "error", [_reason(error)]
    for values in several:
        try:
            text = template.render(values)
        except MemoryError:
            raise
        except Exception as error:
            if not texts:
                return "error", [_reason(error)]
            texts.append(None)
            continue
        if len(text) > OUTPUT:
            return "output", []
        texts.append(text)
    return "texts", texts


def _reason(error: Exception) -> str:
    return " ".join((str(error)[:1000] or type(error).__name__).split())
