"""One helper process that renders templates, and the limits of a rendering."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bitnet.core.support.helper import Helper, HelperEnded, Limits, Program

MEMORY = 256 << 20
"""Bytes of memory that a helper may use beyond its size after startup."""
CPU_SECONDS = 1.0
"""Maximum CPU time of one rendering in seconds, if the system can limit it."""
SECONDS = 1.5 if sys.platform == "win32" else 15.0
"""Maximum duration of one rendering in seconds. Where the system limits CPU time, that limit ends endless templates,
and a sound one may wait this long for a processor that other work keeps busy."""
OUTPUT = 16 << 20
"""Maximum characters that one rendering may write."""

_PROGRAM = Program(
    code=Path(__file__).with_name("program.py"),
    purpose="chat templates are rendered",
    packages=("jinja2", "markupsafe"),
    memory=MEMORY,
    base=64 << 20,
    output=16 * OUTPUT,  # more than JSON can make of a text
)
_REFUSED = {
    "memory": f"takes more than {MEMORY >> 20} MiB of memory",
    "output": f"writes more than {OUTPUT:,} characters",
    "time": f"takes longer than {SECONDS:g} s",
    "processor": f"takes more than {CPU_SECONDS:g} s of processor time",
}


class TemplateError(Exception):
    """A template fails or reaches a limit. The message continues a sentence that begins with "the template"."""


class OutputError(TemplateError):
    """A text is too long."""


class Renderer:
    """A helper process that renders templates. For one thread at a time."""

    def __init__(self) -> None:
        self._helper = Helper(_PROGRAM)

    def ask(self, request: bytes) -> list[str | None]:
        """Send a request and return the resulting texts.

        Raises:
            TemplateError: The template fails, or reaches a limit.
            BitNetError: The helper does not start.
        """
        try:
            answer = self._helper.ask(request, Limits(SECONDS, CPU_SECONDS))
        except HelperEnded as ended:
            refused = _REFUSED.get(ended.kind) or f"fails: it crashes its interpreter ({ended.how})"
            raise TemplateError(refused) from None
        try:
            return _texts(answer)
        except OutputError:
            self._helper.end()  # to free its memory
            raise


class LocalRenderer:
    """Renders templates in this process, where there are no others: in a browser's worker.

    Jinja2's sandbox and the limit of the output hold here, too. Time and memory are limited by whoever started the
    interpreter: the page can end its worker at any time, and the browser bounds the memory of a page.
    """

    def ask(self, request: bytes) -> list[str | None]:
        """Render, and return the resulting texts.

        Raises:
            TemplateError: The template fails, or memory or the limit of the output is reached.
        """
        from bitnet.core.text.sandbox import program

        try:
            return _texts(program.answer(bytearray(request)))
        except MemoryError:
            raise TemplateError("takes more memory than there is") from None


def _texts(answer: bytes | bytearray) -> list[str | None]:
    """The texts in an answer of the program."""
    kind, texts = json.loads(answer)
    if kind == "texts":
        found: list[str | None] = texts
        return found
    if kind == "output":
        raise OutputError(_REFUSED[kind])
    raise TemplateError(_REFUSED.get(kind) or f"fails: {texts[0]}")
