"""Reads the beginning of a JSON object that was cut off."""

from __future__ import annotations

import json
import re
from typing import Any

_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*|true|false|null|[{}\[\]:,])', re.DOTALL)
_ENDINGS = {"{": "}", "[": "]"}
_DEPTH = 200
_TRIES = 4
"""The last tokens before a cut may be a key, its colon and a number in mid-digit, none of which makes a value."""


def complete_part(text: str) -> dict[str, Any]:
    """The members of an object that are complete in ``text``, with lists and objects closed where the text ends.

    Returns:
        An empty object if ``text`` does not begin one, is not the beginning of valid JSON, or is nested too deeply.
    """
    open_: list[str] = []
    ends: list[tuple[int, str]] = []  # after each token: where it ends, and what closes the rest
    at = 0
    while token := _TOKEN.match(text, at):
        if closing := _ENDINGS.get(token[1]):
            open_.append(closing)
            if len(open_) > _DEPTH:
                return {}
        elif token[1] in "}]" and (not open_ or open_.pop() != token[1]):
            break
        at = token.end()
        ends = [*ends[1 - _TRIES :], (at - (token[1] == ","), "".join(reversed(open_)))]
    for end, closing in reversed(ends):
        try:
            found = json.loads(text[:end] + closing)
        except (ValueError, RecursionError):
            continue
        return found if isinstance(found, dict) else {}
    return {}
