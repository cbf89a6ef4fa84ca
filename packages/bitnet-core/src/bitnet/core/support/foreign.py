"""Foreign text, as it is shown to a person: names, keys and messages of files, drivers and plug-ins.

Such a text may hold what a terminal takes for a command, a newline that begins a line of its own, or characters that
turn the direction of writing. None of these may reach a terminal as they are.
"""

from __future__ import annotations

import re

LONGEST = 100
"""Maximum characters of a name that are shown."""

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
_CONTROLS[ord("\r")] = ""


def printable(text: str) -> str:
    """The text on one line, with an escape such as ``\\x1b`` or ``\\u202e`` for each character that is not printable.

    That is: controls (C0, C1), line and paragraph separators, direction overrides and other formats, surrogates, and
    code points that stand for no character.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in text)


def label(text: str) -> str:
    """A name, :func:`printable`, in at most 100 characters and with no run of blanks that could move what follows."""
    shown = re.sub("  +", " ", printable(text[: LONGEST + 1]))
    return shown if len(text) <= LONGEST and len(shown) <= LONGEST else f"{shown[: LONGEST - 1]}…"


def indented(text: str) -> str:
    """Lines that belong together, each :func:`printable`, and each after the first indented: none looks like ours."""
    return "\n  ".join(map(printable, text.split("\n")))


def without_controls(text: str) -> str:
    """A model's text, in any script: lines and tabs stay, other controls (C0, C1) are shown as escapes.

    A carriage return is left out: it comes before a newline, or would overwrite the line.
    """
    return text.translate(_CONTROLS)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
