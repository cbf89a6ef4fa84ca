"""Markdown at a terminal: a block is printed as it comes, and once it is complete, formatted in its place."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from bitnet.core.cli.wrapping import Wrapping

if TYPE_CHECKING:
    from rich.console import Console

_LINES = re.compile(r"[^\n]*\n|[^\n]+")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")


def console() -> Console | None:
    """What formats for this terminal, by the library rich; None: it is not installed, or the terminal is too plain."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    found = Console()
    return None if found.is_dumb_terminal or found.legacy_windows else found


class Formatting:
    """Formats text in Markdown as it comes; control characters must have been taken out of it.

    Args:
        console: Knows the terminal's colours.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._block = ""
        self._shown, self._rows = 0, 0
        self._wrapping = Wrapping()

    def add(self, text: str, columns: int, rows: int) -> str:
        """What to print now that ``text`` has come.

        Args:
            columns: Width of the terminal; at least 1.
            rows: Its height. A block that is higher stays as it came: what has left the screen cannot be replaced.
        """
        begins_line = "\n" in text or self._block.endswith("\n")  # else no block can end here
        self._block += text
        out = []
        while begins_line and (end := _end(self._block)) is not None:
            self._block, rest = self._block[:end], self._block[end:]
            out.append(self._formatted(columns, rows) + "\n\n")
            self._block = rest
        out.append(self._unseen(columns))
        self._rows += out[-1].count("\n")
        return "".join(out)

    def rest(self, columns: int, rows: int) -> str:
        """What remains to be printed at the end of the text."""
        return self._formatted(columns, rows) if self._block.strip() else ""

    def _unseen(self, columns: int) -> str:
        """What of the block is not printed yet; newlines at its end wait for what follows."""
        known = self._block.rstrip("\n")
        new, self._shown = known[self._shown :], len(known)
        return self._wrapping.add(new, columns)

    def _formatted(self, columns: int, rows: int) -> str:
        """What completes a block that is printed in part, or replaces it."""
        seen, unseen = self._rows, self._unseen(columns) + self._wrapping.rest(columns)
        block, self._block = self._block, ""
        self._shown, self._rows, self._wrapping = 0, 0, Wrapping()
        if seen >= rows:
            return unseen
        from rich.markdown import Markdown

        options: Any = {"width": columns, "no_wrap": False}
        with self._console.capture() as captured:
            self._console.print(Markdown(block, hyperlinks=False), **options)  # an address is seen, and not hidden
        return "\r" + f"\x1b[{seen}A" * bool(seen) + "\x1b[J" + captured.get().strip("\n")


def _end(text: str) -> int | None:
    """Where the first block of a text ends; None: it may go on. Lines that are indented after an empty one belong to
    it, as those of a list's item do."""
    fence, empty, begun = "", False, False
    for found in _LINES.finditer(text):
        line = found[0]
        if fence:
            closing = line.strip()
            if closing.startswith(fence) and not closing.strip(fence[0]):
                fence = ""
            continue
        if begun and empty and line[0] not in " \t\n":
            return found.start()
        if opening := _FENCE.match(line):
            fence = opening[1]
        empty = not line.strip()
        begun |= not empty
    return None
