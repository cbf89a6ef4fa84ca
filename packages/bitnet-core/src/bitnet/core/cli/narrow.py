"""Help texts as wide as the terminal, also where it is narrower than click's layout allows."""

from __future__ import annotations

import shutil
from collections.abc import Iterable

import click
from click.formatting import wrap_text

from bitnet.core.cli.console import NARROW

MIN_COLUMNS = 20
"""Smallest width of the layout, in columns."""


class Help(click.HelpFormatter):
    """click's formatter at the terminal's width.

    Below 50 columns each term is on its own line, with its meaning below it.
    """

    def __init__(self, indent_increment: int = 2, width: int | None = None, max_width: int | None = None) -> None:
        columns = shutil.get_terminal_size().columns
        self.narrow = width is None and columns < NARROW
        super().__init__(indent_increment, max(columns, MIN_COLUMNS) if self.narrow else width, max_width or columns)

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        if not self.narrow:
            super().write_dl(list(rows), col_max, col_spacing)
            return
        for term, meaning in rows:
            for text, more in ((term, 0), (meaning, self.indent_increment)):
                indent = " " * (self.current_indent + more)
                self.write(wrap_text(text, self.width, indent, indent + " " * (self.indent_increment - more)) + "\n")


class HelpContext(click.Context):
    formatter_class = Help


def fits_narrow(command: click.Command) -> None:
    """Make a command and its subcommands use this formatter."""
    command.context_class = HelpContext
    for below in getattr(command, "commands", {}).values():
        fits_narrow(below)
