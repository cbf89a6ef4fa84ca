"""Input and output: UTF-8 from files and pipes, JSON on stdout, progress on a terminal's stderr, readable numbers.

Every command writes through this module, which keeps control characters in untrusted text away from the terminal.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from bitnet.core.cli import markdown
from bitnet.core.cli.wrapping import Wrapping
from bitnet.core.errors import InvalidInputError
from bitnet.core.support.files import read_bytes
from bitnet.core.support.foreign import label, printable, without_controls

MAX_TEXT = 1 << 28
"""Maximum bytes of a prompt's or a text's file; nothing reads so many tokens."""
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
"""Control sequences that a terminal shows text dimmed after, and as usual again."""
NARROW = 50
"""A terminal with fewer columns has no room for tables and bars."""


def read_text(source: Path | None, *, hint: str = "Check the path.") -> str:
    """The text of a file, or of standard input if ``source`` is None.

    Args:
        hint: What to do if the file cannot be read.

    Raises:
        InvalidInputError: It cannot be read, or is not UTF-8.
    """
    where = "standard input" if source is None else source
    try:
        data = sys.stdin.buffer.read(MAX_TEXT + 1) if source is None else read_bytes(source, MAX_TEXT)
        if len(data) > MAX_TEXT:
            raise InvalidInputError(f"{where} has more than {MAX_TEXT} bytes.")
        return data.decode("utf-8-sig")  # Windows begins files with a byte order mark
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{where} is not UTF-8 (at byte {error.start}).") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInputError(f"{where} cannot be read: {reason}.", hint=None if source is None else hint) from None


def say(*lines: str) -> None:
    """Print lines on standard output; unprintable characters in them, including newlines, are shown as escapes."""
    _put("".join(f"{printable(line)}\n" for line in lines))


def print_json(value: Any) -> None:
    """Print a document on standard output; unprintable characters are written as JSON escapes.

    JSON cannot represent non-finite numbers; they become the strings ``inf``, ``-inf`` and ``nan``.
    """
    text = json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False)
    _put(re.sub(r"[^ -~\n]", lambda c: c[0] if c[0].isprintable() else json.dumps(c[0])[1:-1], text) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def answer(text: str) -> None:
    """Print a piece of a model's text at once: unchanged to files and pipes, without controls to a terminal."""
    _put(without_controls(text) if sys.stdout.isatty() else text)


class Shown:
    """Prints the chunks of an answer as they come. A terminal gets whole words, and the thought before the answer,
    dimmed and apart; files and pipes get the answer alone.

    Args:
        thoughts: Whether a thought may be shown.
        formatted: Whether a terminal shows Markdown formatted, if the library rich is installed.
    """

    def __init__(self, *, thoughts: bool = True, formatted: bool = False) -> None:
        self._thoughts = thoughts and sys.stdout.isatty()
        self._dims = os.environ.get("TERM") != "dumb"
        self._thinking = False
        self._wrapping = Wrapping() if sys.stdout.isatty() else None
        console = markdown.console() if formatted and sys.stdout.isatty() else None
        self._formatting = None if console is None else markdown.Formatting(console)

    def chunk(self, reasoning: str, text: str) -> None:
        """Print a chunk's parts of the thought and of the answer."""
        if reasoning and self._thoughts:
            if not self._thinking:
                self._begin()
            self._put(reasoning)
        if text:
            if self._thinking:
                self._end()
                say("", "")
            if self._formatting is None:
                self._put(text)
            else:
                _put(self._formatting.add(without_controls(text), _columns(), _rows()))

    def __enter__(self) -> Shown:
        return self

    def __exit__(self, *error: object) -> None:
        if self._thinking:  # else the terminal would stay dimmed
            self._end()
        else:
            self._put_rest()
            if self._formatting is not None:
                _put(self._formatting.rest(_columns(), _rows()))

    def _put(self, text: str) -> None:
        if self._wrapping is None:
            answer(text)
        else:
            _put(self._wrapping.add(without_controls(text), _columns()))

    def _put_rest(self) -> None:
        """Print the word that wrapping has held back."""
        if self._wrapping is not None:
            _put(self._wrapping.rest(_columns()))
            self._wrapping = Wrapping()

    def _begin(self) -> None:
        self._thinking = True
        if self._dims:
            _put(DIM)

    def _end(self) -> None:
        self._thinking = False
        self._put_rest()
        if self._dims:
            _put(PLAIN)


def _columns() -> int:
    """Columns that text may take; the last one stays free, as some terminals go on by themselves after it."""
    return max(shutil.get_terminal_size().columns - 1, 1)


def _rows() -> int:
    return shutil.get_terminal_size().lines


def note(*lines: str) -> None:
    """Print lines for the user on stderr; if it cannot be written to, the command goes on."""
    with suppress(OSError):
        sys.stderr.write("".join(f"{printable(line)}\n" for line in lines))
        sys.stderr.flush()


def _put(text: str) -> None:
    """Write to standard output; an OSError raised here names the stream."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        error.filename = "standard output"
        raise


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function to call with the amount done and the total; it draws a bar if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    looks: dict[str, Any] = {}
    if shutil.get_terminal_size().columns < NARROW:
        looks = {"bar_template": "%(label)s %(info)s", "show_eta": False, "width": 1}
    with click.progressbar(length=1, label=label, file=sys.stderr, **looks) as bar:

        def update(done: int, total: int) -> None:
            bar.length = total
            bar.update(done - bar.pos)

        yield update


@contextmanager
def compile_progress() -> Iterator[None]:
    """Show on a terminal's stderr which kernels are being compiled: a device's first launch takes seconds."""
    if not sys.stderr.isatty():
        yield
        return
    from bitnet.core.support import cache

    compiled: list[str] = []

    def show(name: str, taken: float) -> None:
        compiled.append(name)
        line = f"compiled {len(compiled)} kernels; last: {label(name)}, {seconds(taken)}"
        click.echo(f"\r{line[: shutil.get_terminal_size().columns - 1]}\x1b[K", nl=False, err=True)

    cache.listeners.append(show)
    try:
        yield
    finally:
        cache.listeners.remove(show)
        if compiled:
            click.echo("\r\x1b[K", nl=False, err=True)


def seconds(duration: float) -> str:
    """``340 ms``, ``1.2 s``."""
    return f"{duration * 1000:.3g} ms" if duration < 1 else f"{duration:.3g} s"
