"""A small template language for generated text, and the data files that are written in it.

``[a|b|c]`` is one of the alternatives, at random, and may be nested. ``{slot}`` is the value of a slot; ``{Slot}`` the
same with a capital, ``{a:slot}`` and ``{A:slot}`` with "a" or "an" before it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Slots = Mapping[str, object]
_TOKEN = re.compile(r"[\[\]|]|\{[^{}]*\}|[^\[\]|{}]+")


def read_data(name: str) -> dict[str, Any]:
    """The contents of ``data/NAME.toml``."""
    return tomllib.loads((Path(__file__).parent / "data" / f"{name}.toml").read_text(encoding="utf-8"))


class _Slot:
    __slots__ = ("article", "capital", "name")

    def __init__(self, text: str) -> None:
        article, _, name = text.rpartition(":")
        if article not in ("", "a", "A"):
            raise ValueError(f"template slot {{{text}}}: only a: and A: may stand before a slot.")
        self.article = bool(article)
        self.capital = article == "A" or (not article and name[:1].isupper())
        self.name = name[:1].lower() + name[1:]

    def expand(self, slots: Slots) -> str:
        text = str(slots[self.name])
        if self.article:
            text = with_article(text)
        return capitalised(text) if self.capital else text


_Sequence: TypeAlias = "list[str | _Slot | list[_Sequence]]"
"""Text, slots, and choices between sequences."""


def fill(template: str, rng: Random, slots: Slots | None = None) -> str:
    """The template with its choices made and its slots filled.

    Raises:
        ValueError: It is no template.
        KeyError: A slot has no value.
    """
    return _expand(_parsed(template), rng, slots or {})


def capitalised(text: str) -> str:
    """The text with its first letter in upper case, the rest as it is."""
    return text[:1].upper() + text[1:]


def with_article(noun: str) -> str:
    """``a`` or ``an`` before a noun, by its first letter but for a few words that sound otherwise."""
    vowel = noun[:1].lower() in "aeiou" and not noun.lower().startswith(("uni", "use", "one", "eu"))
    return ("an " if vowel or noun.lower().startswith(("hour", "honest")) else "a ") + noun


def plural(noun: str) -> str:
    """More than one of a creature or a thing, whose last word decides."""
    irregular = {"mouse": "mice", "goose": "geese", "wolf": "wolves", "elf": "elves", "fish": "fish", "sheep": "sheep"}
    irregular |= {"deer": "deer", "salmon": "salmon", "moose": "moose", "leaf": "leaves", "fly": "flies"}
    head, space, last = noun.rpartition(" ")
    if last in irregular:
        many = irregular[last]
    elif last.endswith(("s", "x", "z", "ch", "sh")):
        many = f"{last}es"
    elif last.endswith("y") and last[-2:-1] not in "aeiou":
        many = f"{last[:-1]}ies"
    elif last.endswith("man"):
        many = f"{last[:-3]}men"
    else:
        many = f"{last}s"
    return head + space + many


def _expand(sequence: _Sequence, rng: Random, slots: Slots) -> str:
    parts = []
    for node in sequence:
        if isinstance(node, str):
            parts.append(node)
        elif isinstance(node, _Slot):
            parts.append(node.expand(slots))
        else:
            parts.append(_expand(node[int(rng.random() * len(node))], rng, slots))
    return "".join(parts)


@cache
def _parsed(template: str) -> _Sequence:
    tokens = _TOKEN.findall(template)
    if "".join(tokens) != template:
        raise ValueError(f"not a template: {template!r}")
    stack: list[list[_Sequence]] = [[[]]]
    for token in tokens:
        if token == "[":
            stack.append([[]])
        elif token == "]" and len(stack) > 1:
            choice = stack.pop()
            stack[-1][-1].append(choice)
        elif token == "|" and len(stack) > 1:
            stack[-1].append([])
        elif token in ("]", "|"):
            raise ValueError(f"unexpected {token!r} in the template {template!r}")
        else:
            stack[-1][-1].append(_Slot(token[1:-1]) if token[0] == "{" else token)
    if len(stack) > 1:
        raise ValueError(f"a choice is not closed in the template {template!r}")
    return stack[0][0]
