"""Prepares JSON schemas for llguidance: bounds, references, extra keys, formats.

An object with ``properties`` gets no other keys unless the schema asks for them with ``additionalProperties``. Where
``allOf``, ``anyOf`` and ``$ref`` combine several schemas to one object, it gets the keys of all of them: each is left
open, and their combination is closed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from bitnet.core.errors import brief

MAX_SIZE = 200_000
"""Maximum characters of a form."""
MAX_DEPTH = 128
"""Maximum depth of lists and objects in a schema."""
MAX_CHAIN = 256
"""Maximum number of references that lead from one to the next."""
MAX_STEPS = 200_000
"""Maximum number of schemas to look at for the keys of combined objects."""

ONE, MANY = ("items", "additionalProperties", "additionalItems", "contains", "not"), ("prefixItems",)
NAMED = ("properties", "patternProperties")
COMBINE = ("allOf", "anyOf", "oneOf")
OBJECT = (*NAMED, "additionalProperties", "required", "minProperties")
DEFINITIONS = ("$defs", "definitions")

_YEAR_OF_29 = r"(?:\d{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAYS = r"(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8])"
_DATE = rf"(?:\d{{4}}-(?:{_DAYS})|{_YEAR_OF_29}-02-29)"
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
"""Formats that llguidance takes too widely: it writes leap seconds at any hour, and February 29 in any year."""
FORMATS = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Formats that llguidance knows. Others are annotations."""


class SchemaError(Exception):
    """A schema that is refused. The message continues a sentence that begins with its name."""


def bounded(value: Any) -> None:
    """Check size, depth and texts of a form without recursion, and without looking at more than the limit.

    Raises:
        SchemaError: It is too large or too deep, or has a text that is not Unicode.
    """
    left = MAX_SIZE
    waiting: list[tuple[Any, int, Any]] = [(value, 0, None)]
    while waiting:
        item, depth, path = waiting.pop()
        if isinstance(item, str):
            left -= len(item) + 2
            if not item.isascii() and (at := _surrogate(item)) is not None:
                raise SchemaError(f"has a lone surrogate, which is no character,{_at(path)} at position {at}.")
        else:
            left -= 1
        if left < 0:
            raise SchemaError(f"has more than {MAX_SIZE:,} characters.")
        if isinstance(item, dict | list | tuple):
            if depth == MAX_DEPTH:
                raise SchemaError(f"is nested more than {MAX_DEPTH} levels deep{_at(path)}.")
            if len(item) > left:
                raise SchemaError(f"has more than {MAX_SIZE:,} characters.")
            if isinstance(item, dict):
                waiting += ((key, depth + 1, path) for key in item)
            waiting += ((inner, depth + 1, (path, key)) for key, inner in _entries(item))


def _entries(item: Mapping[str, Any] | Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    return iter(item.items()) if isinstance(item, Mapping) else enumerate(item)


def _surrogate(text: str) -> int | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def _at(path: Any) -> str:
    """Where in a schema, such as ``at properties.name``; long paths are cut."""
    parts: list[str] = []
    while path is not None:
        path, key = path
        parts.append(f"[{key}]" if isinstance(key, int) else f".{brief(key).strip(chr(39))}")
    if not parts:
        return ""
    where = "".join(reversed(parts[-6:])).removeprefix(".")
    return f" at {where}{'…' if len(parts) > 6 else ''}"


def prepared(schema: Any) -> Any:
    """A schema as llguidance is to enforce it; ``schema`` passed :func:`bounded`.

    Raises:
        SchemaError: A reference leads nowhere, or only back to itself, or through too many others.
    """
    return _Preparation(schema).run() if isinstance(schema, dict) else schema


class _Preparation:
    """Rewrites one schema.

    Each schema that is referenced is made once closed, for use alone, or once open, for use in a combination.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._names: dict[tuple[str, bool], str] = {}
        self._waiting: list[tuple[str, bool, int]] = []
        self._depth = 0
        self._same: set[str] = set()  # references to what must hold for the same value
        self._foreign = False
        self._steps = 0

    def run(self) -> dict[str, Any]:
        made: dict[str, Any] = self._made(self._root, closed=True, same=True)
        definitions: dict[str, Any] = {}
        same: dict[str, set[str]] = {}
        for pointer, closed, depth in self._waiting:  # grows meanwhile
            self._depth = depth
            if self._depth > MAX_CHAIN:
                raise SchemaError(f"has more than {MAX_CHAIN} references that lead from one to the next.")
            self._same = same[self._names[pointer, closed]] = set()
            definitions[self._names[pointer, closed]] = self._made(self._resolved(pointer), closed=closed, same=True)
        _check_ends(same, self._names)
        if self._foreign:  # llguidance may know where it leads
            given = self._root.get("$defs")
            definitions = {**(given if isinstance(given, dict) else {}), **definitions}
            made |= {key: self._root[key] for key in DEFINITIONS if key in self._root}
        return {**made, "$defs": definitions} if definitions else made

    def _made(self, schema: Any, *, closed: bool, same: bool = False) -> Any:
        """A schema, closed or open. Its depth is bounded.

        Args:
            same: Whether it holds for the same value as the definition that is being made.
        """
        if not isinstance(schema, dict):
            return schema
        combining = [key for key in (*COMBINE, "$ref") if key in schema]
        alone = not any(key in schema for key in OBJECT) and (
            len(combining) == 1 and (combining != ["allOf"] or len(_listed(schema, "allOf")) == 1)
        )
        made: dict[str, Any] = {}
        for key, value in schema.items():
            if key in DEFINITIONS or (key == "propertyNames" and value in ({}, True, {"type": "string"})):
                continue
            made[key] = self._value(key, value, closed and alone, same)
        if closed and not alone:
            self._close(schema, made, combined=bool(combining))
        if "discriminator" in schema and "oneOf" in made:
            self._discriminate(schema, made)
        _set_format(made)
        return made

    def _value(self, key: str, value: Any, closed: bool, same: bool) -> Any:
        if key == "$ref" and isinstance(value, str):
            return self._referred(value, closed, same)
        if key in COMBINE and isinstance(value, list):
            return [self._made(item, closed=closed, same=same and key == "allOf") for item in value]
        if key in NAMED and isinstance(value, dict):
            return {name: self._made(item, closed=True) for name, item in value.items()}
        if (key in MANY or key == "items") and isinstance(value, list):
            return [self._made(item, closed=True) for item in value]
        return self._made(value, closed=True) if key in ONE else value

    def _referred(self, reference: str, closed: bool, same: bool) -> str:
        pointer = self._pointer(reference)
        if pointer is None:
            self._foreign = True
            return reference
        name = self._names.get((pointer, closed))
        if name is None:
            self._resolved(pointer)
            name = self._names[pointer, closed] = f"bitnet-{len(self._names)}"
            self._waiting.append((pointer, closed, self._depth + 1))
        if same:
            self._same.add(name)
        return f"#/$defs/{name}"

    def _pointer(self, reference: str) -> str | None:
        """Where a reference leads in this schema; None: elsewhere."""
        pointer = reference.removeprefix(str(self._root.get("$id", "")))
        return pointer if pointer == "#" or pointer.startswith("#/") else None

    def _resolved(self, pointer: str) -> Any:
        found: Any = self._root
        for part in unquote(pointer[1:]).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                raise SchemaError(f"has a $ref to {brief(pointer)}, where nothing is.")
        return found

    def _close(self, schema: Mapping[str, Any], made: dict[str, Any], *, combined: bool) -> None:
        """Allow the keys that the schema, and all that it combines, name, and no others.

        Of several choices, each is closed with its own keys.
        """
        if not combined:
            self._shut(schema, made, _Keys(schema))
            return
        choices = [key for key in ("anyOf", "oneOf") if _listed(schema, key)]
        if len(choices) != 1:
            self._shut(schema, made, self._keys([schema]))
            return
        (key,) = choices
        base = {name: value for name, value in schema.items() if name != key}
        for i, branch in enumerate(_listed(schema, key)):
            branch_made = {"allOf": [made[key][i]]}
            self._shut(base, branch_made, self._keys([base, branch]))
            made[key][i] = branch_made

    def _keys(self, schemas: list[Any]) -> _Keys:
        """The keys of an object that several schemas, and those that they combine, describe."""
        keys = _Keys()
        seen: set[str] = set()
        waiting = schemas[::-1]
        while waiting:
            part = waiting.pop()
            self._steps += 1
            if self._steps > MAX_STEPS:
                raise SchemaError("combines too many schemas with one another.")
            if not isinstance(part, dict):
                continue
            keys.add(part)
            waiting += (item for key in reversed(COMBINE) for item in reversed(_listed(part, key)))
            reference = part.get("$ref")
            if isinstance(reference, str) and reference not in seen:
                seen.add(reference)
                pointer = self._pointer(reference)
                keys.more |= pointer is None
                if pointer is not None:
                    waiting.append(self._resolved(pointer))
        return keys

    @staticmethod
    def _shut(schema: Mapping[str, Any], made: dict[str, Any], keys: _Keys) -> None:
        if "additionalProperties" in schema or keys.more or not keys.given or keys.least > len(keys.names):
            return
        for key, known in (("properties", keys.names), ("patternProperties", keys.patterns)):
            own = made.setdefault(key, {}) if known else {}
            if isinstance(own, dict):
                own.update((name, True) for name in known if name not in own)
        made["additionalProperties"] = False

    def _discriminate(self, schema: Mapping[str, Any], made: dict[str, Any]) -> None:
        """Exactly one of several objects with a tag holds if the tag is there and its values differ."""
        form = schema["discriminator"]
        name = form.get("propertyName") if isinstance(form, dict) else None
        tags: list[Any] = []
        for branch in _listed(schema, "oneOf"):
            reference = branch.get("$ref") if isinstance(branch, dict) else None
            pointer = self._pointer(reference) if isinstance(reference, str) else None
            target = branch if pointer is None else self._resolved(pointer)
            properties = target.get("properties") if isinstance(target, dict) else None
            tag = properties.get(name) if isinstance(properties, dict) else None
            values = None if not isinstance(tag, dict) else [tag["const"]] if "const" in tag else tag.get("enum")
            if not isinstance(values, list):
                return
            tags += values
        if tags and len({repr(tag) for tag in tags}) == len(tags) and "anyOf" not in made:
            made["anyOf"] = [{"allOf": [branch], "required": [name]} for branch in made.pop("oneOf")]


def _listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else []


class _Keys:
    """The keys of an object that several schemas describe."""

    def __init__(self, *schemas: Mapping[str, Any]) -> None:
        self.names: dict[str, None] = {}
        self.patterns: dict[str, None] = {}
        self.given = False  # whether any schema lists keys
        self.more = False  # whether any schema asks for keys besides those
        self.least = 0
        for schema in schemas:
            self.add(schema)

    def add(self, schema: Mapping[str, Any]) -> None:
        for key, known in (("properties", self.names), ("patternProperties", self.patterns)):
            if isinstance(named := schema.get(key), dict):
                known.update(dict.fromkeys(named))
                self.given = True
        if isinstance(required := schema.get("required"), list):
            self.names.update((name, None) for name in required if isinstance(name, str))
        self.more |= schema.get("additionalProperties", False) is not False
        if isinstance(least := schema.get("minProperties"), int):
            self.least = max(self.least, least)


def _set_format(made: dict[str, Any]) -> None:
    name = made.get("format")
    if not isinstance(name, str) or name in FORMATS:
        return
    del made["format"]
    if (pattern := PATTERNS.get(name)) is not None:
        if "pattern" in made:
            made["allOf"] = [*_listed(made, "allOf"), {"pattern": pattern}]
        else:
            made["pattern"] = pattern


def _check_ends(same: Mapping[str, set[str]], names: Mapping[tuple[str, bool], str]) -> None:
    """Refuse schemas that must hold for the same value if they hold for it: no value follows from that."""
    left = {name: set(others) for name, others in same.items()}
    users: dict[str, list[str]] = {}
    for name, others in left.items():
        for other in others:
            users.setdefault(other, []).append(name)
    ended = [name for name, others in left.items() if not others]
    while ended:
        name = ended.pop()
        del left[name]
        for user in users.get(name, ()):
            left[user].discard(name)
            if not left[user]:
                ended.append(user)
    if left:
        pointers = {name: pointer for (pointer, _), name in names.items()}
        raise SchemaError(f"has a $ref to {brief(pointers[next(iter(left))])} that leads only back to itself.")
