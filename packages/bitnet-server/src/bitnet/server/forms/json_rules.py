"""Lark rules of JSON that fits a schema, in every spelling that JSON allows.

llguidance's own rules of a schema refuse ``\\u0041`` and ``\\/``, which models write, and fix the order of keys. They
hold an answer that is written for them; a model that has begun a call by itself must not be led off its way by a
spelling. So these rules hold what clients rely on: sound JSON, names of keys, required keys, types, constants and short
lengths. They allow all that a schema allows, and more where it has patterns, bounds, conditions or ``not``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

MAX_ORDERED = 4
"""Keys of an object that may come in any order, each once. Of more keys, only the required ones are counted; of more
required ones, each comes after those before it in the schema."""
MAX_LENGTH = 64
"""Longest bound of a string's length that is held."""
MAX_VALUES = 200
"""Most values of an enumeration that are held."""
MAX_NESTED = 8
"""Levels of objects and lists whose schemas are held."""
MAX_RULES = 400
"""Rules after which further values may be any."""

_CHARACTER = (
    r'([^"\\\x00-\x1F]|\\["\\\/bfnrt]|\\u([0-9a-cefA-CEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}'
    r"|[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))"
)
WHITE = r"[ \t\r\n]{1,64}"
"""White space, bounded, as a small model may repeat it without end."""
TERMINALS = rf"""
WS: /{WHITE}/
STRING: /"{_CHARACTER}*"/
INTEGER: /-?(0|[1-9][0-9]{{0,18}})(\.0)?/
NUMBER: /-?(0|[1-9][0-9]{{0,18}})(\.[0-9]{{1,20}})?([eE][+-]?[0-9]{{1,2}})?/
any: any_object | any_list | STRING | NUMBER | "true" | "false" | "null"
any_object: "{{" WS? (any_pair WS? ("," WS? any_pair WS?)*)? "}}"
any_pair: STRING WS? ":" WS? any
any_list: "[" WS? (any WS? ("," WS? any WS?)*)? "]"
"""
"""Terminals and rules of any JSON. White space and digits are bounded, as a small model may repeat them without end; a
string has no lone surrogate."""
PYTHON_TERMINALS = (
    TERMINALS.replace('"true" | "false" | "null"', '"True" | "False" | "None"').replace(
        f'STRING: /"{_CHARACTER}*"/', rf"""STRING: /"{_CHARACTER}*"|'([^'\\\n]|\\[^u\n])*'/"""
    )
    + """any_keywords: any_keyword WS? ("," WS? any_keyword WS?)* ")" | ")"
any_keyword: /[A-Za-z_][A-Za-z0-9_]{0,63}/ WS? "=" WS? any
"""
)
"""The same as Python writes values, and the arguments of any call."""
_SIMPLE = {
    "string": "STRING",
    "integer": "INTEGER",
    "number": "NUMBER",
    "boolean": '("true" | "false")',
    "null": '"null"',
}


def literal(text: str) -> str:
    """A Lark terminal of a text."""
    return json.dumps(text)


def spelled(value: Any) -> str:
    """Lark terminals of a string, a number or a word of JSON, with letters beyond ASCII as they are and escaped."""
    return _either(literal(json.dumps(value, ensure_ascii=escaped)) for escaped in (False, True))


def _either(found: Iterable[str]) -> str:
    different = list(dict.fromkeys(found))
    return different[0] if len(different) == 1 else f"({' | '.join(different)})"


def bounds(schema: Mapping[str, Any]) -> tuple[int, int | None]:
    """The bounds of a string's length that are held: the least, and the greatest or None."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if not isinstance(least, int) or not 0 <= least <= MAX_LENGTH:
        least = 0
    return least, most if isinstance(most, int) and least <= most <= MAX_LENGTH else None


class JsonRules:
    """Collects the rules of values, each under a name of its own.

    Args:
        python: Whether they are written as in Python, which needs :data:`PYTHON_TERMINALS`.

    Attributes:
        python: As in the argument.
        rules: The rules so far, without :data:`TERMINALS`.
    """

    def __init__(self, *, python: bool = False) -> None:
        self.rules: list[str] = []
        self.python = python
        self._names = 0
        self._referred: dict[tuple[int, str], str] = {}

    def arguments(self, schema: Mapping[str, Any]) -> str:
        """The rule of a call's arguments, an object."""
        found = self._value(schema, schema, 0)
        return "any_object" if found == "any" else found

    def keywords(self, schema: Mapping[str, Any]) -> str:
        """The rule of a call's arguments as keywords, and of the parenthesis after them."""
        properties = schema.get("properties")
        if not isinstance(properties, dict) or not all(map(str.isidentifier, properties)):
            return "any_keywords"
        wanted = schema.get("required")
        pairs = {
            name: self._add(self._named(), f'{literal(name)} WS? "=" WS? {self._value(value, schema, 1)}')
            for name, value in properties.items()
        }
        required = [name for name in properties if name in wanted] if isinstance(wanted, list) else []
        return self._ordered(pairs, required, "", opening="", closing='")"')

    def _named(self) -> str:
        self._names += 1
        return f"value_{self._names}"

    def _add(self, name: str, body: str) -> str:
        self.rules.append(f"{name}: {body}")
        return name

    def _value(self, schema: Any, root: Mapping[str, Any], depth: int) -> str:
        if not isinstance(schema, dict) or depth > MAX_NESTED or len(self.rules) > MAX_RULES:
            return "any"
        if isinstance(pointer := schema.get("$ref"), str):
            return self._target(pointer, root, depth)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and 0 < len(values) <= MAX_VALUES:
            if any(isinstance(value, dict | list) for value in values):
                return "any"
            return _either(self._constant(value) for value in values)
        for key in ("anyOf", "oneOf", "allOf"):
            parts = schema.get(key)
            if isinstance(parts, list) and parts and "properties" not in schema:
                if key == "allOf" and len(parts) > 1:
                    return "any"
                return _either(self._value(part, root, depth + 1) for part in parts)
        kinds = schema.get("type") or ("object" if "properties" in schema else None)
        found = [self._typed(kind, schema, root, depth) for kind in (kinds if isinstance(kinds, list) else [kinds])]
        return _either([*found, self._constant(None)] if schema.get("nullable") is True else found)

    def _constant(self, value: Any) -> str:
        return literal(repr(value)) if self.python and not isinstance(value, str) else spelled(value)

    def _definition(self, pointer: str, root: Mapping[str, Any]) -> Any:
        """A schema's definition; None: there is none of that name."""
        kind, _, name = pointer.removeprefix("#/").partition("/")
        known = root.get(kind) if kind in ("$defs", "definitions") else None
        return known.get(name) if isinstance(known, dict) else None

    def _target(self, pointer: str, root: Mapping[str, Any], depth: int) -> str:
        """The rule of a definition, which may refer to itself."""
        defined = self._definition(pointer, root)
        if defined is None:
            return "any"
        place = (id(root), pointer)
        if place not in self._referred:
            rule = self._referred[place] = self._named()
            made = self._value(defined, root, depth + 1)
            self._add(rule, "any" if made == rule else made)
        return self._referred[place]

    def _typed(self, kind: Any, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> str:
        if kind == "object":
            return self._object(schema, root, depth)
        if kind == "array":
            items = self._value(schema.get("items"), root, depth + 1)
            least = schema.get("minItems")
            some = isinstance(least, int) and least > 0
            if items == "any" and not some:
                return "any_list"
            body = f'{items} WS? ("," WS? {items} WS?)*'
            return self._add(self._named(), f'"[" WS? {body} "]"' if some else f'"[" WS? ({body})? "]"')
        if kind == "string":
            return self._string(*bounds(schema))
        if self.python and kind in ("boolean", "null"):
            return _either(map(self._constant, (True, False) if kind == "boolean" else (None,)))
        return _SIMPLE.get(kind, "any") if isinstance(kind, str) else "any"

    def _string(self, least: int, most: int | None) -> str:
        if not least and most is None:
            return "STRING"
        name = self._named().upper()
        return self._add(name, rf'/"{_CHARACTER}{{{least},{"" if most is None else most}}}"/')

    def _object(self, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> str:
        given, others = schema.get("properties"), schema.get("additionalProperties", False)
        properties = given if isinstance(given, dict) else {}
        open_ = given is None or "patternProperties" in schema or others is True
        more = "any" if open_ else "" if not isinstance(others, dict) else self._value(others, root, depth + 1)
        if others is not False and not properties and isinstance(others, dict):
            more = self._value(others, root, depth + 1)
        wanted = schema.get("required")
        required = [name for name in properties if name in wanted] if isinstance(wanted, list) else []
        if not properties and more == "any":
            return "any_object"
        pairs = {}
        for name, value in properties.items():
            pairs[name] = self._add(self._named(), f'{spelled(name)} WS? ":" WS? {self._value(value, root, depth + 1)}')
        free = ""
        if more:
            key = "STRING"
            if properties:
                known = "|".join(
                    re.escape(json.dumps(name, ensure_ascii=False)).replace("/", r"\/") for name in properties
                )
                key = self._add(self._named().upper(), f'/"{_CHARACTER}*"/ & ~/{known}/')
            free = self._add(self._named(), f'{key} WS? ":" WS? {more}')
        return self._ordered(pairs, required, free)

    def _ordered(
        self,
        pairs: Mapping[str, str],
        required: list[str],
        free: str,
        *,
        opening: str = '"{" WS? ',
        closing: str = '"}"',
        separator: str = '"," WS? ',
    ) -> str:
        """The rules of an object by the keys that it has already: each counted one comes once, and none is missing.

        Args:
            pairs: Maps the keys to the rules of their pairs.
            free: The rule of a pair with another key; empty: there is none.
            opening, closing, separator: Lark of what is before, after and between the pairs.
        """
        counted = list(pairs) if len(pairs) <= MAX_ORDERED else required
        one_by_one = len(counted) > MAX_ORDERED
        repeated = [rule for name, rule in pairs.items() if name not in counted] + [free] * bool(free)
        states: dict[frozenset[str], str] = {}

        def after(had: frozenset[str]) -> str:
            """The rule of what follows the pairs with these keys."""
            if had not in states:
                name = states[had] = self._named()
                self._add(name, " | ".join(ends(had) + [separator + way for way in ways(had)]))
            return states[had]

        def ends(had: frozenset[str]) -> list[str]:
            return [] if any(name not in had for name in required) else [closing]

        def ways(had: frozenset[str]) -> list[str]:
            left = [name for name in counted if name not in had]
            steps = [(pairs[name], had | {name}) for name in (left[:1] if one_by_one else left)]
            return [f"{rule} WS? {after(then)}" for rule, then in [*steps, *((rule, had) for rule in repeated)]]

        nothing = frozenset[str]()
        return self._add(self._named(), f"{opening}({' | '.join(ends(nothing) + ways(nothing))})")
