"""The rules of begun calls: whatever fits a schema is allowed in every spelling, and what clients rely on is held."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from bitnet.server.forms.json_rules import MAX_ORDERED, TERMINALS, JsonRules

KEYS = ["a", "name", "file_path", "größe", 'q"x', "b/c", "n.m", "long key", "k1", "k2", "k3"]


class Bytes:
    """A vocabulary of bytes."""

    eos_token_id, bos_token_id = 256, None
    tokens = (*(bytes([i]) for i in range(256)), b"<eos>")
    special_token_ids = (256,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()))


class Rules:
    """The grammar of one schema."""

    def __init__(self, schema: Any) -> None:
        made = JsonRules()
        start = made.arguments(schema)
        text = "\n".join(["%llguidance {}", f"start: {start}", *made.rules, TERMINALS])
        self._matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(text))
        assert not self._matcher.is_error(), self._matcher.get_error()

    def allow(self, text: str) -> bool:
        matcher, wanted = self._matcher.deep_copy(), list(text.encode())
        return bool(matcher.try_consume_tokens(wanted) == len(wanted) and matcher.is_accepting())


class Maker:
    """Random schemas, values that fit them, and the spellings of a value."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def schema(self, depth: int = 0) -> Any:
        kinds = ["string", "integer", "number", "boolean", "null", "enum", "any", "either", "text", "reference"]
        kind = self.random.choice(kinds + ["object", "array"] * (depth < 3) * 3)
        if kind == "object":
            return self.object(depth)
        if kind == "array":
            return {"type": "array", "items": self.schema(depth + 1), "minItems": self.random.randrange(2)}
        if kind == "enum":
            return {"enum": self.random.sample(["a", "ü/b", 1, 2.5, None, True, 'x"y'], 3)}
        if kind == "text":
            least = self.random.randrange(3)
            return {"type": "string", "minLength": least, "maxLength": least + self.random.randrange(4)}
        if kind == "either":
            return {"anyOf": [self.schema(depth + 1), {"type": "null"}]}
        if kind == "reference":
            return {"$ref": "#/$defs/leaf"}
        return {} if kind == "any" else {"type": kind}

    def object(self, depth: int = 0) -> Any:
        names = self.random.sample(KEYS, self.random.randrange(1, 9))
        required = [name for name in names if self.random.random() < 0.5]
        more = self.random.choice([False, False, True, {"type": "integer"}])
        made = {"type": "object", "properties": {name: self.schema(depth + 1) for name in names}}
        return {**made, "required": required, "additionalProperties": more}

    def whole(self) -> Any:
        return {**self.object(), "$defs": {"leaf": {"type": ["string", "integer"]}}}

    def value(self, schema: Any, root: Any) -> Any:
        chance = self.random
        if "$ref" in schema:
            return self.value(root["$defs"]["leaf"], root)
        if "enum" in schema:
            return chance.choice(schema["enum"])
        if "anyOf" in schema:
            return self.value(chance.choice(schema["anyOf"]), root)
        kind = schema.get("type", "any")
        kind = chance.choice(kind) if isinstance(kind, list) else kind
        if kind == "object":
            return self._object(schema, root)
        if kind == "array":
            return [self.value(schema["items"], root) for _ in range(chance.randrange(schema["minItems"], 3))]
        if kind == "any":
            return chance.choice([None, 1.5, "x", [1, "]", {}], {"}": [{"a": '"'}]}])
        length = chance.randrange(schema.get("minLength", 0), schema.get("maxLength", 6) + 1)
        text = "".join(chance.choice('ab"\\/\n\t\x01é漢😀 }]') for _ in range(length))
        number = round(chance.uniform(-1e4, 1e4), 3)
        known = {"string": text, "integer": chance.randrange(-(10**6), 10**6), "number": number}
        return {**known, "boolean": True, "null": None}[kind]

    def _object(self, schema: Any, root: Any) -> Any:
        """An object; the required keys stay in the schema's order, if there are many."""
        chance = self.random
        kept = [n for n in schema["properties"] if n in schema["required"] or chance.random() < 0.5]
        if len(schema["required"]) <= MAX_ORDERED:
            chance.shuffle(kept)
        made = {name: self.value(schema["properties"][name], root) for name in kept}
        if schema["additionalProperties"]:
            made[f"other{chance.randrange(9)}"] = chance.randrange(9)
        return made

    def spelled(self, value: Any) -> str:
        """JSON with random white space and escapes."""
        if isinstance(value, dict):
            pairs = (f"{self._key(k)}{self._white()}:{self._white()}{self.spelled(v)}" for k, v in value.items())
            return f"{{{self._white()}{self._list(pairs)}}}"
        if isinstance(value, list):
            return f"[{self._white()}{self._list(map(self.spelled, value))}]"
        if isinstance(value, str) and value not in ("a", "ü/b", 'x"y'):  # those may be of an enumeration
            return '"' + "".join(map(self._character, value)) + '"'
        return json.dumps(value, ensure_ascii=self.random.random() < 0.5)

    def _key(self, name: str) -> str:
        return json.dumps(name, ensure_ascii=self.random.random() < 0.5)

    def _list(self, parts: Any) -> str:
        return f"{self._white()},{self._white()}".join(parts) + self._white()

    def _white(self) -> str:
        return self.random.choice(["", "", " ", "\n  ", "\t", "\r\n"])

    def _character(self, character: str) -> str:
        units = character.encode("utf-16-be")
        escaped = "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))
        ways = [json.dumps(character)[1:-1], escaped, escaped.upper().replace("\\U", "\\u")]
        if character not in '"\\' and character >= " ":
            ways.append(character)
        return self.random.choice([*ways, "\\/"] if character == "/" else ways)


def test_what_fits_is_allowed_in_every_spelling() -> None:
    seed = random.randrange(2**32)
    maker = Maker(seed)
    for _ in range(25):
        schema = maker.whole()
        rules = Rules(schema)
        for _ in range(5):
            value = maker.value(schema, schema)
            jsonschema.validate(value, schema)
            text = maker.spelled(value)
            assert json.loads(text) == value, (seed, text)
            assert rules.allow(text), (seed, schema, text)


def test_a_list_of_anything_may_have_to_have_something() -> None:
    rules = Rules({"type": "object", "properties": {"k": {"type": "array", "minItems": 1}}, "required": ["k"]})
    assert rules.allow('{"k": [[]]}')
    assert not rules.allow('{"k": []}')


def test_what_clients_rely_on_is_held() -> None:
    """A value with a key lost or added, or a part of another type, is allowed only if the schema allows it."""
    seed = random.randrange(2**32)
    maker, refused = Maker(seed), 0
    for _ in range(25):
        schema = maker.whole()
        rules, value = Rules(schema), maker.value(schema, schema)
        key = maker.random.choice([*value, "strange"])
        changed = dict(value)
        if maker.random.random() < 0.6:  # in its place, as the order of many required keys is held
            changed[key] = maker.random.choice([None, 3, "long enough to break a bound", [[]], {"z": 0}, False, 0.5])
        else:
            changed.pop(key, None)
        text = json.dumps(changed, ensure_ascii=False)
        valid = jsonschema.Draft202012Validator(schema).is_valid(changed)
        assert rules.allow(text) == valid, (seed, schema, text)
        refused += not valid
    assert refused > 2, seed


@pytest.mark.parametrize(
    "text",
    [
        '{"a": "\\ud800"}',
        '{"a": "\n"}',
        '{"a": 01}',
        '{"a": 1,}',
        '{"a": 1e999}',
        '{"a" 1}',
        "{a: 1}",
        '{"a": "\\x"}',
        f'{{"a": {"7" * 5000}}}',
        '{"a": NaN}',
        "[]",
        '{"a": 1} x',
        '{"a": [1 2]}',
        '{"a": "x}',
    ],
)
def test_what_is_no_sound_json_is_refused(text: str) -> None:
    assert not Rules({"type": "object"}).allow(text)


def test_definitions_may_refer_to_themselves_and_the_unknown_is_free() -> None:
    tree = {"properties": {"left": {"$ref": "#/$defs/tree"}, "n": {"type": "integer"}}, "required": ["n"]}
    rules = Rules({"properties": {"tree": {"$ref": "#/$defs/tree"}}, "required": ["tree"], "$defs": {"tree": tree}})
    assert rules.allow('{"tree": {"n": 1, "left": {"left": {"n": 3}, "n": 2}}}')
    assert not rules.allow('{"tree": {"n": 1, "left": {"left": {}, "n": 2}}}')
    odds: list[Any] = [{"$ref": "#/nowhere"}, {"if": {}}, {"type": "wrong"}, {"enum": []}, {"$ref": "#/$defs/me"}, 7]
    for odd in odds:
        free = Rules({"properties": {"x": odd}, "$defs": {"me": {"$ref": "#/$defs/me"}}})
        assert free.allow('{"x": [{"y": null}]}'), odd
