"""Validates the part of JSON Schema (draft 2020-12) that bitnet's documents use, without a further package."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from bitnet.core.errors import brief

_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "number": (int, float),
    "integer": (int,),
    "null": (type(None),),
}
_END = re.compile(r"\$$")
"""``$`` also matches before a final newline in Python, but not in the standard."""
_PLAIN = re.compile(r"[A-Za-z0-9_-]{1,60}")


def problems(value: Any, schema: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """A JSON value's violations of its schema, each with its place (``model_info.layers``)."""
    place = where or "the document"
    if "const" in schema and value != schema["const"]:
        yield f"{place} is {brief(value)}, not {schema['const']!r}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{place} is {brief(value)}, not one of {', '.join(map(str, schema['enum']))}"
    wanted = schema.get("type", [])
    wanted = [wanted] if isinstance(wanted, str) else wanted
    if wanted and not any(_is(value, name) for name in wanted):
        yield f"{place} is {brief(value)}, not of type {' or '.join(wanted)}"
        return
    if isinstance(value, str):
        if len(value) < schema.get("minLength", 0):
            yield f"{place} is too short"
        if "pattern" in schema and not re.search(_END.sub(r"\\Z", schema["pattern"]), value):
            yield f"{place} is {brief(value)}, which does not fit {schema['pattern']}"
    elif _is(value, "number"):
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{place} is {value}, which is not a number"
        if value < schema.get("minimum", -math.inf) or value <= schema.get("exclusiveMinimum", -math.inf):
            yield f"{place} is {brief(value)}, which is too small"
        if value > schema.get("maximum", math.inf):
            yield f"{place} is {brief(value)}, which is too large"
    elif isinstance(value, list):
        if len(value) < schema.get("minItems", 0):
            yield f"{place} has {len(value)} items, which are too few"
        if len(value) > schema.get("maxItems", math.inf):
            yield f"{place} has {len(value)} items, which are too many"
            return
        if schema.get("uniqueItems") and any(item in value[:i] for i, item in enumerate(value)):
            yield f"{place} has an item twice"
        for i, item in enumerate(value):
            yield from problems(item, schema.get("items", {}), f"{where}[{i}]")
    elif isinstance(value, dict):
        yield from _object_problems(value, schema, where)


def _object_problems(value: dict[str, Any], schema: Mapping[str, Any], where: str) -> Iterator[str]:
    if len(value) > schema.get("maxProperties", math.inf):
        yield f"{where or 'the document'} has {len(value)} names, which are too many"
        return
    known, more = schema.get("properties", {}), schema.get("additionalProperties", {})
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{_join(where, name)} is missing"
    for name, item in value.items():
        if name in known:
            yield from problems(item, known[name], _join(where, name))
        elif more is False:
            yield f"{_join(where, name)} is not known"
        else:
            yield from problems(item, more, _join(where, name))


def _is(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[name])


def _join(where: str, name: str) -> str:
    name = name if isinstance(name, str) and _PLAIN.fullmatch(name) else brief(name)
    return f"{where}.{name}" if where else name
