"""The prompt of ``bitnet chat``: line editing, history and pasted text at a terminal; lines from a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from bitnet.core.cli.console import note, say
from bitnet.core.cli.history import add_to_history, read_history

PASTE_SECONDS = 0.05
"""Seconds within which the next line of pasted text has arrived."""


class Prompt:
    """Asks for messages.

    Args:
        marks_pastes: Whether the terminal marks pasted text ("bracketed paste"), so that its lines arrive as one.
    """

    def __init__(self, *, marks_pastes: bool) -> None:
        self._gathers = sys.stdin.isatty() and not marks_pastes

    def ask(self) -> str | None:
        """The user's next message; None at the end of the input. Ctrl-C at a terminal discards a half-typed one."""
        prompts = _prompts()
        end_line = say if prompts[0] else note  # on the stream that the prompt is on: the other one may be redirected
        lines: list[str] = []
        while True:
            try:
                line = input(prompts[bool(lines)]).rstrip("\r\n")  # a pipe's lines may end in \r
                while self._gathers and _more_lines():
                    line += "\n" + input()
            except EOFError:
                if sys.stdin.isatty():
                    end_line("")
                return "\n".join(lines) if lines else None
            except KeyboardInterrupt:
                if not sys.stdin.isatty():
                    raise
                end_line("")
                note("Ctrl-D or /exit leaves.")
                lines.clear()
                continue
            lines.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                return "\n".join(lines)

    def ask_until(self, end: str) -> str | None:
        """Lines up to one that is ``end``, or to the end of the input; None if Ctrl-C at a terminal discards them."""
        lines: list[str] = []
        try:
            while (line := input(_prompts()[1]).rstrip("\r\n")).strip() != end:
                lines.append(line)
        except EOFError:
            note("")
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            note("")
            return None
        return "\n".join(lines)


def _prompts() -> tuple[str, str]:
    """What asks for a message, and for more lines of it."""
    return ("> ", "… ") if sys.stdin.isatty() and sys.stdout.isatty() else ("", "")


def _more_lines() -> bool:
    """Whether another line is there at once, as the lines of pasted text are."""
    if sys.platform == "win32":
        import msvcrt
        import time

        time.sleep(PASTE_SECONDS)
        return msvcrt.kbhit()
    import select

    return bool(select.select([sys.stdin], [], [], PASTE_SECONDS)[0])


@contextmanager
def prompt(*, keep: bool) -> Iterator[Prompt]:
    """A prompt, with line editing if Python has it and stdin is a terminal.

    Args:
        keep: Load earlier messages for the arrow keys, and save the new ones.
    """
    try:
        if not sys.stdin.isatty():
            raise ImportError("a pipe's lines are not edited")
        import readline
    except ImportError:  # Windows' console edits lines itself
        yield Prompt(marks_pastes=False)
        return
    if keep:
        with suppress(OSError, RuntimeError):
            for message in read_history():
                readline.add_history(message)
    before = readline.get_current_history_length()
    try:
        yield Prompt(marks_pastes=_mark_pastes())
    finally:
        if keep:
            typed = (readline.get_history_item(i + 1) for i in range(before, readline.get_current_history_length()))
            with suppress(OSError, RuntimeError):
                add_to_history([message for message in typed if message])


def _mark_pastes() -> bool:
    """Have GNU readline ask the terminal to mark pasted text; false where it or the terminal cannot."""
    import readline

    if "libedit" in (readline.__doc__ or "") or os.environ.get("TERM", "dumb") == "dumb":
        return False
    readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off
    return True
