"""The program of a helper process: reads templates and values and writes texts, as JSON preceded by its length.

It imports nothing of this package, and runs without ``site``: ``process.py`` tells it where Jinja2 is. It is limited
before it reads anything: by the system if possible, else by its parent, which watches it.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
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


@lru_cache(maxsize=16)
def _template(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment.from_string(source)


def _answer(request: bytes, output: int) -> tuple[str, list[str | None]]:
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
        if len(text) > output:
            return "output", []
        texts.append(text)
    return "texts", texts


def _reason(error: Exception) -> str:
    return " ".join((str(error)[:1000] or type(error).__name__).split())


def limit(memory: int) -> None:
    """Limit this process if the system can; ``memory`` is bytes of address space beyond its present size."""
    if sys.platform == "win32":
        import msvcrt

        msvcrt.SetErrorMode(msvcrt.SEM_FAILCRITICALERRORS | msvcrt.SEM_NOGPFAULTERRORBOX)
        return
    import resource

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "darwin":  # takes no such limit
        return
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - pathlib takes long to import
            taken = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        taken = 1 << 30  # more than Python uses at startup on any platform
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = taken + memory if hard == resource.RLIM_INFINITY else min(hard, taken + memory)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _time(seconds: float) -> None:
    """Have the system end this process after so many seconds of CPU time; 0: never."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _read(count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = os.read(0, min(count - len(data), 1 << 20))
        if not part:  # the parent has ended
            os._exit(0)
        data += part
    return bytes(data)


def _message(kind: str, texts: list[str | None]) -> bytes:
    data = json.dumps([kind, texts], ensure_ascii=False).encode("utf-8", "surrogatepass")
    return len(data).to_bytes(8, "big") + data


def _write(data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(1, left) :]


def main(memory: int, seconds: float, output: int) -> NoReturn:
    """Answer requests in a loop, until the parent ends or memory runs out."""
    if sys.platform == "win32":
        import msvcrt

        for file in (0, 1):
            msvcrt.setmode(file, os.O_BINARY)
    limit(memory)
    _write(_message("ready", []))
    while True:
        request = _read(int.from_bytes(_read(8), "big"))
        _time(seconds)
        try:
            reply, spent = _message(*_answer(request, output)), False
        except MemoryError:
            reply, spent = _message("memory", []), True
        _time(0)
        del request
        _write(reply)
        if spent:
            os._exit(0)
