"""Lark rules of the parameters of a call in DSML, held as :mod:`~bitnet.server.forms.json_rules` holds JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from bitnet.server.forms.json_rules import MAX_NESTED, JsonRules, bounds, literal

DSML = "｜DSML｜"
WRAPPERS = ("function_calls", "tool_calls")
"""Names of the tag around calls: V3.2's, and that of later models."""
INVOKE, INVOKED = f'<{DSML}invoke name="', f"</{DSML}invoke>"
PARAMETER, PARAMETER_END = f'<{DSML}parameter name="', f"</{DSML}parameter>"

_KIND = '" string="'
_ANY = r"(.|\n)"
DSML_TERMINALS = rf"""
any_text[lazy]: /{_ANY}*/ {literal(PARAMETER_END)}
any_value: "true\">" any_text | "false\">" WS? any WS? {literal(PARAMETER_END)}
any_parameters: WS? ({literal(PARAMETER)} /[^"<>]{{1,64}}" string="/ any_value WS?)* {literal(INVOKED)}
"""
"""Rules of any parameters; they need :data:`~bitnet.server.forms.json_rules.TERMINALS`."""


class DsmlRules(JsonRules):
    """Collects the rules of parameters; see :class:`~bitnet.server.forms.json_rules.JsonRules`."""

    def parameters(self, schema: Mapping[str, Any]) -> str:
        """The rule of a call's parameters, and of the tag that ends it."""
        properties = schema.get("properties")
        if not isinstance(properties, dict) or any(set('"<>') & set(name) for name in properties):
            return "any_parameters"
        wanted = schema.get("required")
        required = [name for name in properties if name in wanted] if isinstance(wanted, list) else []
        pairs = {}
        for name, value in properties.items():
            ways = " | ".join(self._values(value, schema, 0)) or "any_value"
            pairs[name] = self._add(self._named(), f"{literal(PARAMETER)} {literal(name + _KIND)} ({ways})")
        free = ""
        if schema.get("additionalProperties", False) is not False or "patternProperties" in schema:
            known = f" & ~/({'|'.join(map(_escaped, properties))}){_KIND}/" if properties else ""
            name = self._add(self._named().upper(), f'/[^"<>]{{1,64}}{_KIND}/{known}')
            free = self._add(self._named(), f"{literal(PARAMETER)} {name} any_value")
        return self._ordered(pairs, required, free, opening="WS? ", closing=literal(INVOKED), separator="")

    def _values(self, schema: Any, root: Mapping[str, Any], depth: int) -> list[str]:
        """The ways to write a value after ``string="``; none: any."""
        if not isinstance(schema, dict) or depth > MAX_NESTED:
            return []
        if isinstance(pointer := schema.get("$ref"), str):
            return self._values(self._definition(pointer, root), root, depth + 1)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and values:
            texts = [f'"true\\">" {literal(value + PARAMETER_END)}' for value in values if isinstance(value, str)]
            others = [value for value in values if not isinstance(value, str)]
            return [*texts, self._written(self._value({"enum": others}, root, depth))] if others else texts
        for key in ("anyOf", "oneOf", "allOf"):
            parts = schema.get(key)
            if isinstance(parts, list) and parts and "properties" not in schema:
                if key == "allOf" and len(parts) > 1:
                    return []
                each = [self._values(part, root, depth + 1) for part in parts]
                return [way for ways in each for way in ways] if all(each) else []
        kinds = schema.get("type") or ("object" if "properties" in schema else None)
        listed = [
            *(kinds if isinstance(kinds, list) else [kinds]),
            *(["null"] if schema.get("nullable") is True else []),
        ]
        if None in listed:
            return []
        others = [kind for kind in listed if kind != "string"]
        found = [self._plain(schema)] if "string" in listed else []
        return [*found, *(self._written(self._value({**schema, "type": kind}, root, depth)) for kind in others)]

    def _plain(self, schema: Mapping[str, Any]) -> str:
        """A text of the schema's length as it is, up to the end of the parameter."""
        least, most = bounds(schema)
        if not least and most is None:
            return '"true\\">" any_text'
        length = f"{{{least},{'' if most is None else most}}}"
        ended = self._add(f"{self._named()}[lazy]", f"/{_ANY}{length}/ {literal(PARAMETER_END)}")
        return f'"true\\">" {ended.removesuffix("[lazy]")}'

    def _written(self, value: str) -> str:
        return f'"false\\">" WS? {value} WS? {literal(PARAMETER_END)}'


def _escaped(name: str) -> str:
    """A regular expression of a name, within slashes."""
    return re.escape(name).replace("/", r"\/")
