"""What schemas allow: keys, references, formats and combinations, in values drawn at random from their masks."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from bitnet.core import Model
from bitnet.server.forms.matchers import FormError, FormSource, Matcher, Matchers
from bitnet.server.forms.schema import MAX_DEPTH, SchemaError, bounded, prepared

HERE = ("packages/bitnet-server/src/bitnet/server/forms", "uv.lock")
FORMATS = jsonschema.FormatChecker()
TIME = re.compile(r"(\d\d):(\d\d):(\d\d)(?:\.\d+)?(?:[zZ]|([+-])(\d\d):(\d\d))")
RECORDED = json.loads(Path(__file__).with_name("schemas.json").read_text(encoding="utf-8"))
"""Schemas as pydantic, zod and LangChain write them, by library and name."""


@FORMATS.checks("date")
def is_date(value: object) -> bool:
    """As RFC 3339 has it, the year 0 included, which Python's dates lack."""
    if not isinstance(value, str):
        return True
    try:
        date.fromisoformat(f"2000{value[4:]}" if value[:4] == "0000" else value)
    except ValueError:
        return False
    return len(value) == len("0000-00-00")


@FORMATS.checks("time")
def is_time(value: object) -> bool:
    """As RFC 3339 has it: a leap second is the last of a day in UTC."""
    if not isinstance(value, str):
        return True
    if (found := TIME.fullmatch(value)) is None:
        return False
    hour, minute, second = map(int, found.groups()[:3])
    sign, *offset = found.groups()[3:]
    hours, minutes = map(int, offset) if sign else (0, 0)
    if max(hour, hours) > 23 or max(minute, minutes) > 59 or second > 60:
        return False
    utc = 60 * hour + minute - (-1 if sign == "-" else 1) * (60 * hours + minutes)
    return second < 60 or utc % 1440 == 1439


@FORMATS.checks("date-time")
def is_date_time(value: object) -> bool:
    return not isinstance(value, str) or (value[10:11] in "tT" and is_date(value[:10]) and is_time(value[11:]))


class Drawing:
    """Draws values at random from what forms allow."""

    def __init__(self, model: Model) -> None:
        self.tokenizer = model.tokenizer
        self.matchers = Matchers(self.tokenizer)
        self._end = min(self.tokenizer.eos_ids)
        self._bytes = [self.tokenizer.token_bytes(i) for i in range(self.tokenizer.vocab_size)]

    def draw(self, schema: Any, chance: random.Random, most: int = 120) -> str | None:
        """The text of a value; None: it had not ended after ``most`` tokens."""
        bounded(schema)
        source = FormSource("json", json.dumps(prepared(schema)))
        self.matchers.compile(source).result()
        matcher, text = Matcher(self.matchers, source), b""
        try:
            for count in range(most):
                while (mask := matcher.allowed()) is None:
                    time.sleep(0.0002)
                bits = int.from_bytes(mask, "little")
                if bits >> self._end & 1 and (count > most // 3 or chance.random() < 0.5):
                    return text.decode()
                ids = [i for i in range(len(self._bytes)) if bits >> i & 1 and i != self._end]
                if not ids:
                    return text.decode()
                ends = [i for i in ids if self._bytes[i] in (b'"', b"}", b"]", b'"}', b'"]', b"0", b"1")]
                token = chance.choice(ends if ends and chance.random() < count / most + 0.3 else ids)
                text += self._bytes[token]
                matcher.accept(token)
        finally:
            matcher.close()
        return None


@pytest.fixture(scope="module")
def drawing(demo_model: Model) -> Iterator[Drawing]:
    found = Drawing(demo_model)
    yield found
    found.matchers.close()


def leaf(chance: random.Random) -> dict[str, Any]:
    low = chance.randrange(-9, 9)
    return chance.choice(
        [
            {"type": "string", "maxLength": 6},
            {"type": "integer", "minimum": low, "maximum": low + 5},
            {"type": "boolean"},
            {"enum": ["red", 1, None]},
            {"type": "string", "pattern": "^[a-c]{2,4}$"},
            {"type": "string", "format": chance.choice(["date", "time", "date-time", "uuid", "binary"])},
            {"type": ["integer", "null"]},
        ]
    )


NAMES = ["a", "b", "name", "größe", "x y"]


def members(chance: random.Random, depth: int) -> dict[str, Any]:
    """Keywords that list an object's keys."""
    names = chance.sample(NAMES, chance.randrange(0, 4))
    found: dict[str, Any] = {"properties": {name: node(chance, depth + 1)[0] for name in names}}
    found["required"] = [name for name in names if chance.random() < 0.6]
    if chance.random() < 0.2:
        found["patternProperties"] = {"^q[0-9]$": leaf(chance)}
    return found


def node(chance: random.Random, depth: int = 0) -> tuple[dict[str, Any], bool]:
    """A schema, with ``unevaluatedProperties`` where it must get no keys that it does not name; whether it is an
    object."""
    if depth > 2 or chance.random() < 0.35:
        return leaf(chance), False
    kind = chance.choice(["plain", "plain", "allOf", "anyOf", "base", "array", "free", "open", "ref", "both"])
    if kind == "array":
        return {"type": "array", "items": node(chance, depth + 1)[0], "maxItems": 2}, False
    if kind == "free":
        return {"type": "object"}, True
    if kind == "ref":
        return {"$ref": "#/$defs/item"}, True
    if kind == "open":
        extra = chance.choice([True, {"type": "integer", "maximum": 5}])
        return {"type": "object", **members(chance, depth), "additionalProperties": extra}, True
    closed: dict[str, Any] = {"type": "object", "unevaluatedProperties": False}
    if kind == "plain":
        return {**closed, **members(chance, depth)}, True
    parts: list[Any] = [members(chance, depth) for _ in range(chance.randrange(1, 3))]
    if kind == "allOf":
        return {**closed, "allOf": [*parts, {"$ref": "#/$defs/open"}]}, True
    if kind == "anyOf":
        return {"anyOf": [{**closed, **part} for part in parts] + [{"type": "null"}]}, True
    if kind == "base":
        return {**closed, **members(chance, depth), "anyOf": [*parts, {"$ref": "#/$defs/open"}]}, True
    return {**closed, **members(chance, depth), "allOf": parts}, True


def without(value: Any) -> Any:
    """A schema without the keyword that only the oracle has."""
    if isinstance(value, dict):
        return {key: without(inner) for key, inner in value.items() if key != "unevaluatedProperties"}
    return [without(inner) for inner in value] if isinstance(value, list) else value


def draw_random_schemas(drawing: Drawing, count: int) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    ended = refused = 0
    for _ in range(count):
        strict = {**node(chance)[0]}
        item = {"properties": {"v": leaf(chance), "w": {"type": "integer"}}, "required": ["v"]}
        strict["$defs"] = {"item": {"type": "object", "unevaluatedProperties": False, **item}, "open": item}
        schema = without(strict)
        try:
            text = drawing.draw(schema, chance)
        except FormError as error:  # what is combined may contradict itself
            if not re.search("nsatisfiable|not supported|disjoint", str(error)):
                raise
            refused += 1
            continue
        if text is not None:
            jsonschema.Draft202012Validator(strict, format_checker=FORMATS).validate(json.loads(text))
            ended += 1
    print(f"{ended} of {count} ended, {refused} were refused")
    assert ended > count // 2
    assert refused < count // 3


def test_draws_from_random_schemas(drawing: Drawing) -> None:
    draw_random_schemas(drawing, 60)


@pytest.mark.nightly(unless_changed=HERE)
def test_draws_from_a_thousand_random_schemas(drawing: Drawing) -> None:
    draw_random_schemas(drawing, 1000)


def closed(schema: Any) -> Any:
    """A recorded schema whose objects get no keys that they do not name."""
    if isinstance(schema, list):
        return [closed(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: value if key == "default" else closed(value) for key, value in schema.items()}
    return {"unevaluatedProperties": False, **made} if "properties" in made or "allOf" in made else made


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_schemas(drawing: Drawing, name: str) -> None:
    chance = random.Random()
    schema = RECORDED[name]
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    for _ in range(4):
        if (text := drawing.draw(schema, chance)) is not None:
            kind(schema, format_checker=FORMATS).validate(json.loads(text))
            if "allOf" not in schema and "prefixItems" not in json.dumps(schema):
                strict = {key: value for key, value in closed(schema).items() if key != "$schema"}
                if not isinstance(strict.get("items"), list):
                    jsonschema.Draft202012Validator(strict).validate(json.loads(text))


def keys_drawn(drawing: Drawing, schema: Any) -> set[str]:
    """The keys of an object, in several draws."""
    found: set[str] = set()
    for seed in range(12):
        if (text := drawing.draw(schema, random.Random(seed))) is not None:
            found |= json.loads(text).keys()
    return found


A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
B: dict[str, Any] = {"properties": {"b": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        (A, {"a"}),
        ({**A, "required": ["a", "z"]}, {"a", "z"}),
        ({"allOf": [A, B]}, {"a", "b"}),
        ({**A, "allOf": [{"$ref": "#/$defs/b"}], "$defs": {"b": B}}, {"a", "b"}),
        ({**A, "$ref": "#/$defs/b", "$defs": {"b": B}}, {"a", "b"}),
        ({**A, "anyOf": [B, {"properties": {"c": {"const": 1}}, "required": ["c"]}]}, {"a", "b", "c"}),
        ({"type": "object", "properties": {}}, set()),
        ({"type": "object", "patternProperties": {"^p$": True}}, {"p"}),
    ],
)
def test_no_keys_but_those_that_are_named(drawing: Drawing, schema: Any, named: set[str]) -> None:
    assert keys_drawn(drawing, schema) <= named


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "required": ["a"]},
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": {"type": "integer"}},
        {"allOf": [A, {**B, "additionalProperties": True}]},
    ],
)
def test_other_keys_where_they_are_asked_for(drawing: Drawing, schema: Any) -> None:
    assert keys_drawn(drawing, schema) - {"a", "b"}


@pytest.mark.parametrize("name", ["date", "time", "date-time"])
def test_formats_are_those_of_rfc_3339(name: str) -> None:
    pattern = re.compile(prepared({"format": name})["pattern"])
    chance = random.Random()
    good = 0
    for _ in range(20_000):
        day = f"{chance.randrange(2100):04}-{chance.randrange(14):02}-{chance.randrange(33):02}"
        clock = f"{chance.randrange(25):02}:{chance.randrange(61):02}:{chance.choice([0, 9, 59, 60]):02}"
        zone = chance.choice(["Z", "", f"{chance.choice('+-')}{chance.randrange(25):02}:{chance.randrange(61):02}"])
        value = {"date": day, "time": clock + zone, "date-time": f"{day}T{clock}{zone}"}[name]
        fits = pattern.search(value) is not None
        leap = ":60" in value.partition("Z")[0][-12:]
        assert fits <= FORMATS.conforms(value, name), value
        assert fits or leap or not FORMATS.conforms(value, name), value  # leap seconds are never written
        good += fits
    assert good > 1000
    assert FORMATS.conforms("23:59:60Z", "time")
    assert not FORMATS.conforms("11:59:60Z", "time")
    assert not FORMATS.conforms("2021-02-29", "date")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"$ref": "#"}, "leads only back to itself"),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}},
            "only back to itself",
        ),
        ({"properties": {"a": {"$ref": "#/properties/a"}}}, "leads only back to itself"),
        ({"$ref": "#/$defs/none"}, "'#/\\$defs/none', where nothing is"),
        ({"const": "x" * 200_000}, "more than 200,000 characters"),
        ({"enum": [0] * 200_001}, "more than 200,000 characters"),
        ({"properties": {"a": {"const": "b\ud800"}}}, "lone surrogate, .* at properties.a.const at position 1"),
        ({"$ref": "#/$defs/d0", "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(999)}}, "references"),
    ],
    ids=range(8),
)
def test_what_is_refused_is_named(schema: Any, message: str) -> None:
    def check() -> None:
        bounded(schema)
        prepared({**schema, "$defs": {**schema.get("$defs", {}), "d999": {}}})

    with pytest.raises(SchemaError, match=message):
        check()


def test_depth_is_found_without_recursion() -> None:
    schema: Any = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(SchemaError, match=f"more than {MAX_DEPTH} levels deep at items.items.items.items.items.items…"):
        bounded(schema)


def test_any_json_is_prepared_or_refused() -> None:
    """Keywords with values of wrong kinds are left to the compiler, which names them."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    words = ["properties", "allOf", "anyOf", "oneOf", "$ref", "$defs", "items", "required", "additionalProperties"]
    words += ["prefixItems", "patternProperties", "discriminator", "propertyName", "format", "minProperties", "$id"]

    def junk(depth: int) -> Any:
        if depth > 5 or chance.random() < 0.3:
            return chance.choice([1, "a", None, True, "#", "#/$defs/a", "#/items/0", "time", 1e9, [], {}])
        if chance.random() < 0.3:
            return [junk(depth + 1) for _ in range(chance.randrange(3))]
        return {chance.choice(words): junk(depth + 1) for _ in range(chance.randrange(4))}

    for _ in range(5000):
        schema = junk(0)
        try:
            bounded(schema)
            prepared(schema)
        except SchemaError:
            continue
