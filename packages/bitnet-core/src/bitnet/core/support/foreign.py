"""Safe display of untrusted text: names, keys and messages from files, drivers and plug-ins.

Such text may hold terminal control sequences, newlines that fake a line of output, or characters that change the
writing direction. None of these may reach a terminal unescaped.
"""

from __future__ import annotations

import re

LONGEST = 100
"""Maximum characters shown of a name."""

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
_CONTROLS[ord("\r")] = ""


def printable(text: str) -> str:
    """The text on one line, with an escape such as ``\\x1b`` or ``\\u202e`` for each character that is not printable.

    That is: controls (C0, C1), line and paragraph separators, direction overrides and other formats, surrogates, and
    code points that stand for no character.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in text)


def label(text: str) -> str:
    """A :func:`printable` name, at most 100 characters long, and with runs of blanks collapsed."""
    shown = re.sub("  +", " ", printable(text[: LONGEST + 1]))
    return shown if len(text) <= LONGEST and len(shown) <= LONGEST else f"{shown[: LONGEST - 1]}…"


def indented(text: str) -> str:
    """A multi-line message, made :func:`printable`; lines after the first are indented so that none looks like ours."""
    return "\n  ".join(map(printable, text.split("\n")))


def without_controls(text: str) -> str:
    """A model's text, in any script: lines and tabs stay, other controls (C0, C1) are shown as escapes.

    Carriage returns are dropped: they precede a newline or would overwrite the line.
    """
    return text.translate(_CONTROLS)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
