"""Grammars in GBNF: random ones allow the texts that Python's regular expressions do, and errors name the place."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator

import llguidance
import pytest

from bitnet.server.forms.gbnf import MAX_DEPTH, GrammarError, to_lark

ALPHABET = 'ab-]"\\\n é中😀'


class Bytes:
    """A vocabulary of single bytes."""

    tokens = (*(bytes([i]) for i in range(256)), b"<end>")
    special_token_ids = (256,)
    eos_token_id = 256
    bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@pytest.fixture(scope="module")
def tokenizer() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()), eos_token=[256])


def matcher(tokenizer: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    made = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(to_lark(grammar)), log_level=0)
    assert not made.is_error(), (grammar, made.get_error())
    return made


def allows(start: llguidance.LLMatcher, text: str) -> bool:
    found = start.deep_copy()
    for byte in text.encode():
        if not found.compute_bitmask()[byte // 8] >> byte % 8 & 1:
            return False
        found.consume_token(byte)
    return bool(found.compute_bitmask()[32] & 1)  # the end


class Grammars:
    """Random grammars without recursion, as GBNF and as regular expressions; and texts that they derive."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.rules: dict[str, tuple[str, str, object]] = {}

    def escaped(self, character: str) -> str:
        return {"\n": "\\n", '"': '\\"', "\\": "\\\\", "]": "\\]"}.get(character, character)

    def made(self, depth: int) -> tuple[str, str, object]:
        """A part in GBNF, as a regular expression, and what derives its texts."""
        chance = self.chance
        kind = chance.choice(("literal", "class", "any") if depth == 0 else ("group", "repeat", "rule", "literal"))
        if kind == "any":
            return ".", "(?s:.)", ("class", ALPHABET)
        if kind == "literal":
            text = "".join(chance.choices(ALPHABET, k=chance.randrange(4)))
            return f'"{"".join(map(self.escaped, text))}"', f"(?:{re.escape(text)})", ("literal", text)
        if kind == "class":
            some, negated = chance.sample(ALPHABET, chance.randrange(1, 4)), chance.random() < 0.3
            left = [c for c in ALPHABET if (c in some) != negated]
            written = "".join(f"\\U{ord(c):08x}" if c == "-" else self.escaped(c) for c in some)
            sign = "^" if negated else ""
            return f"[{sign}{written}]", f"[{sign}{''.join(map(re.escape, some))}]", ("class", left)
        if kind == "group":
            options = [
                [self.made(depth - 1) for _ in range(chance.randrange(4))] for _ in range(chance.randrange(1, 4))
            ]
            line = chance.choice((" | ", "\n | ", " |\n", "|# a comment\n"))
            return (
                f"({line.join(' '.join(p[0] for p in option) for option in options)})",
                f"(?:{'|'.join(''.join(p[1] for p in option) for option in options)})",
                ("group", [[p[2] for p in option] for option in options]),
            )
        inner = self.made(depth - 1)
        if kind == "rule":
            name = f"r-{len(self.rules)}"
            self.rules[name] = inner
            return name, inner[1], inner[2]
        least, more = chance.randrange(3), chance.randrange(3)
        counts = {
            "*": (0, 3),
            "+": (1, 3),
            "?": (0, 1),
            f"{{{least}}}": (least, least),
            f"{{{least},}}": (least, least + 2),
            f"{{{least},{least + more}}}": (least, least + more),
        }
        sign, count = chance.choice([*counts.items()])
        return f"{inner[0]}{sign}", f"(?:{inner[1]}){sign}", ("repeat", inner[2], count)

    def derived(self, part: object) -> str:
        assert isinstance(part, tuple)
        kind, value, *more = part
        if kind == "literal":
            return str(value)
        if kind == "class":
            return self.chance.choice(value) if value else ""
        if kind == "group":
            return "".join(map(self.derived, self.chance.choice(value)))
        return "".join(self.derived(value) for _ in range(self.chance.randint(*more[0])))

    def one(self) -> tuple[str, str, Iterator[str]]:
        root = self.made(3)
        rules = [("root", root), *self.rules.items()]
        self.chance.shuffle(rules)
        grammar = "# a grammar\n\n" + "\n".join(f"{name} ::= {part[0]}" for name, part in rules)
        return grammar, root[1], self.texts(root[2])

    def texts(self, root: object) -> Iterator[str]:
        while True:
            text = self.derived(root)[:40]
            yield text
            at = self.chance.randrange(len(text) + 1)
            yield text[:at] + self.chance.choice(ALPHABET) + text[at + self.chance.randrange(2) :]
            yield text[:at]


def test_random_grammars(tokenizer: llguidance.LLTokenizer) -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    allowed = refused = 0
    for _ in range(60):
        grammar, expression, texts = Grammars(chance).one()
        start = matcher(tokenizer, grammar)
        for _ in range(12):
            text = next(texts)
            expected = re.fullmatch(expression, text) is not None
            assert allows(start, text) == expected, (seed, grammar, text)
            allowed, refused = allowed + expected, refused + (not expected)
    assert allowed > 100, seed
    assert refused > 100, seed


JSON = r"""
root ::= object
value ::= object | array | string | number | ("true" | "false" | "null")
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}"
array ::= "[" ws (
    value
    ("," ws value)*
  )? "]"
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\""   # escapes
number ::= "-"? ([0-9] | [1-9] [0-9]{0,15}) ("." [0-9]+)? ([eE] [-+]? [0-9]+)?
ws ::= | " " | "\n" [ \t]{0,20}
"""


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def test_grammars_that_recurse(tokenizer: llguidance.LLTokenizer) -> None:
    start = matcher(tokenizer, JSON)
    good = json.dumps({"a": [1, -2.5e-7, 'x"\\\n', None, True, {}], "ü": {"b": [[]]}})
    assert allows(start, good)
    for at in range(0, len(good), 3):
        for text in (good[:at], good[:at] + "}" + good[at:]):
            assert allows(start, text) == is_object(text), text
    left = matcher(tokenizer, 'root ::= root "+" root | "x"')
    assert allows(left, "x+x+x")
    assert not allows(left, "x+")


WRONG = [
    ("", "it has no rule root"),
    ('start ::= "a"', "it has no rule root"),
    ('root ::= "a" foo', "line 1, column 14: the rule foo is used"),
    ('root ::= "a"\nroot ::= "b"', "line 2, column 1: the rule root has been defined"),
    ("root ::= x\nx = y", r"line 2, column 3: ::= is expected"),
    ("root ::= this is (not valid GBNF", r"line 1, column 18: this \( is not closed"),
    ('root ::= "a', 'line 1, column 10: this " is not closed'),
    ("root ::= [a", r"line 1, column 10: this \[ is not closed"),
    ("root ::= []", "column 10: .* allows no character"),
    ("root ::= [z-a]", "column 11: the range"),
    ('root ::= "a" )', "column 14: a new line or the end is expected"),
    ('root ::= "\\q"', r"column 11: \\q is no escape"),
    ('root ::= "\\', r"column 11: \\ is no escape"),
    ('root ::= "\\x4"', r"column 11: \\x needs 2 hexadecimal digits"),
    ('root ::= "\\ud800"', "column 11: .* is no Unicode character"),
    ('root ::= "\\UFFFFFFFF"', "column 11: .* is no Unicode character"),
    ('root ::= "a"{3,2}', "column 13: the second number"),
    ('root ::= "a"{x}', "column 13: a repetition"),
    ('root ::= "a"{99999}', "column 13: at most 2000"),
    ("root ::= <think>", "column 10: tokens"),
    ("root ::= " + "(" * (MAX_DEPTH + 1), f"more than {MAX_DEPTH} groups"),
    ('root ::= "a"' + "*" * (MAX_DEPTH + 1), "a new line or the end is expected"),
]


@pytest.mark.parametrize(("grammar", "message"), WRONG, ids=range(len(WRONG)))
def test_errors_name_the_place(grammar: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        to_lark(grammar)
