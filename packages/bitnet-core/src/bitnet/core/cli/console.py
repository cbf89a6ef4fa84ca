"""Text in and out: UTF-8 from files and pipes, JSON on stdout, progress on a terminal's stderr, numbers for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from bitnet.core.errors import InvalidInputError


def read_text(source: Path | None) -> str:
    """The text of a file, or of standard input where there is none."""
    data = sys.stdin.buffer.read() if source is None else source.read_bytes()
    try:
        return data.decode("utf-8-sig")  # Windows begins files with a byte order mark
    except UnicodeDecodeError as error:
        where = "standard input" if source is None else source
        raise InvalidInputError(f"{where} is not UTF-8 (at byte {error.start}).") from None


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def note(text: str) -> None:
    """A line for the person at the terminal, on stderr."""
    click.echo(text, err=True)


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """A function to call with how much is done and how much there is; it draws a bar where stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    with click.progressbar(length=1, label=label, file=sys.stderr) as bar:

        def update(done: int, total: int) -> None:
            bar.length = total
            bar.update(done - bar.pos)

        yield update


@contextmanager
def compile_progress() -> Iterator[None]:
    """Say on a terminal's stderr what is being compiled, which takes seconds on a device's first launch."""
    if not sys.stderr.isatty():
        yield
        return
    from bitnet.core import cache

    compiled: list[str] = []

    def show(label: str, taken: float) -> None:
        compiled.append(label)
        click.echo(f"\rcompiled {len(compiled)} kernels; last: {label}, {seconds(taken)}\x1b[K", nl=False, err=True)

    cache.listeners.append(show)
    try:
        yield
    finally:
        cache.listeners.remove(show)
        if compiled:
            click.echo("\r\x1b[K", nl=False, err=True)


def size(count: float) -> str:
    """Bytes as people read them: ``1.2 GB``."""
    return f"{scaled(count)}B"


def scaled(count: float) -> str:
    """A number with the letter of its thousands: ``1.2 G``."""
    for prefix in ("", "k", "M", "G"):
        if count < 1000:
            return f"{count:.3g} {prefix}"
        count /= 1000
    return f"{count:.3g} T"


def seconds(duration: float) -> str:
    """``340 ms``, ``1.2 s``."""
    return f"{duration * 1000:.3g} ms" if duration < 1 else f"{duration:.3g} s"
