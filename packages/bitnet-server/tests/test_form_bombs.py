"""Forms that want too much time, memory or stack: the server lives, and others hardly notice.

Each family makes a form of a size. A server in a process of its own gets them, four at a time, while another client
streams.

Long, because it is one list: each family of forms is a function of a few lines.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

HERE = [
    "packages/bitnet-server/src/bitnet/server/forms",
    "packages/bitnet-core/src/bitnet/core/support/helper",
    "uv.lock",
]
"""What becomes of a form depends on: what prepares and compiles it, and llguidance's version."""
TIMEOUT = 3.0
AT_ONCE = 4
BODY = 16_000_000

Form = tuple[str, Any]
"""Key of ``structured_outputs``, and its value."""
S: dict[str, Any] = {"type": "string"}
FAMILIES: dict[str, Callable[[int], Form]] = {}


def family(make: Callable[[int], Form]) -> Callable[[int], Form]:
    FAMILIES[make.__name__] = make
    return make


def nested(count: int, around: Callable[[Any], Any], inner: Any = S) -> Any:
    for _ in range(count):
        inner = around(inner)
    return inner


def nest(around: Callable[[Any], Any], size: int) -> Form:
    """A body is read only if it is nested less than Python's own limit."""
    return "json", nested(max(1, min(size // 30, 300)), around)


def repeat(unit: str, size: int) -> Form:
    return "regex", unit * max(1, size // len(unit))


def chain(link: Callable[[str], Any], size: int) -> Form:
    count = max(1, size // (len(json.dumps(link("#/$defs/d1234"))) + 12))
    definitions = {f"d{i}": link(f"#/$defs/d{i + 1}") for i in range(count)}
    return "json", {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{count}": S}}


# JSON schemas: deep, wide, chained, repeated
for _name, _link in {
    "references": lambda to: {"$ref": to},
    "references_in_allof": lambda to: {"allOf": [{"$ref": to}]},
    "references_in_anyof": lambda to: {"anyOf": [{"$ref": to}]},
    "references_in_anyof_and_null": lambda to: {"anyOf": [{"$ref": to}, {"type": "null"}]},
    "references_in_items": lambda to: {"type": "array", "items": {"$ref": to}},
    "references_in_prefix_items": lambda to: {"type": "array", "prefixItems": [{"$ref": to}], "minItems": 1},
    "references_in_properties": lambda to: {"type": "object", "properties": {"a": {"$ref": to}}, "required": ["a"]},
    "references_in_two_properties": lambda to: {"properties": {"a": {"$ref": to}, "b": {"$ref": to}}},
    "references_in_patterns": lambda to: {"type": "object", "patternProperties": {"^a": {"$ref": to}}},
    "references_in_extra_keys": lambda to: {"type": "object", "additionalProperties": {"$ref": to}},
    "combined_references": lambda to: {"properties": {"k": S}, "allOf": [{"$ref": to}, {"properties": {"l": S}}]},
    "doubled_references": lambda to: {"allOf": [{"$ref": to}, {"$ref": to}]},
    "doubled_choices": lambda to: {"anyOf": [{"$ref": to}, {"properties": {"a": {"$ref": to}}}]},
}.items():
    FAMILIES[_name] = partial(chain, _link)
for _name, _around in {
    "nested_anyof": lambda x: {"anyOf": [x]},
    "nested_anyof_of_two": lambda x: {"anyOf": [x, {"type": "null"}]},
    "nested_allof": lambda x: {"allOf": [x, {"properties": {"a": S}}]},
    "nested_oneof": lambda x: {"oneOf": [x, {"type": "null"}]},
    "nested_arrays": lambda x: {"type": "array", "items": x},
    "nested_arrays_that_begin": lambda x: {"type": "array", "items": x, "minItems": 3, "maxItems": 9},
    "nested_objects": lambda x: {"type": "object", "properties": {"a": x}, "required": ["a"]},
    "nested_optional_objects": lambda x: {"type": "object", "properties": {"a": x, "b": S, "c": S}},
    "nested_extra_keys": lambda x: {"type": "object", "additionalProperties": x},
}.items():
    FAMILIES[_name] = partial(nest, _around)


@family
def self_reference(size: int) -> Form:
    return "json", {"$ref": "#", "title": "x" * size}


@family
def ring_of_references(size: int) -> Form:
    count = max(2, size // 40)
    return "json", {
        "$ref": "#/$defs/d0",
        "$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{(i + 1) % count}"}]} for i in range(count)},
    }


@family
def all_refer_to_all(size: int) -> Form:
    count = max(2, int((size / 25) ** 0.5))
    refs = [{"$ref": f"#/$defs/d{i}"} for i in range(count)]
    return "json", {"$ref": "#/$defs/d0", "$defs": {f"d{i}": {"anyOf": [*refs, S]} for i in range(count)}}


@family
def all_are_combined_with_all(size: int) -> Form:
    count = max(2, int((size / 25) ** 0.5))
    defs = {
        f"d{i}": {"properties": {f"p{i}": S}, "allOf": [{"$ref": f"#/$defs/d{j}"} for j in range(i)]}
        for i in range(count)
    }
    return "json", {"properties": {f"q{i}": {"$ref": f"#/$defs/d{i}"} for i in range(count)}, "$defs": defs}


@family
def many_optional_properties(size: int) -> Form:
    return "json", {"type": "object", "properties": {f"p{i}": S for i in range(size // 28)}}


@family
def many_required_properties(size: int) -> Form:
    names = [f"p{i}" for i in range(size // 36)]
    return "json", {"type": "object", "properties": dict.fromkeys(names, S), "required": names}


@family
def many_choices_of_objects(size: int) -> Form:
    return "json", {
        "anyOf": [{"properties": {"k": {"const": i}, "v": S}, "required": ["k"]} for i in range(size // 75)]
    }


@family
def one_of_many(size: int) -> Form:
    return "json", {"oneOf": [{"properties": {f"k{i}": S}, "required": [f"k{i}"]} for i in range(size // 65)]}


@family
def many_constants(size: int) -> Form:
    return "json", {"enum": [f"{i:x}" * 3 for i in range(size // 16)]}


@family
def long_constant(size: int) -> Form:
    return "json", {"const": "ab" * (size // 2)}


@family
def many_patterns_at_once(size: int) -> Form:
    return "json", {"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(max(2, size // 40))]}


@family
def many_patterns_of_keys(size: int) -> Form:
    return "json", {"type": "object", "patternProperties": {f"^.*a{i}": S for i in range(size // 30)}}


@family
def patterns_of_choices(size: int) -> Form:
    return "json", {"anyOf": [{"type": "string", "pattern": f".*a{i}.*"} for i in range(size // 45)]}


@family
def pattern_of_a_million(size: int) -> Form:
    return "json", {"type": "string", "pattern": "^((a{100}){100}){100}$", "title": "x" * size}


@family
def counts(size: int) -> Form:
    return "json", {"type": "array", "items": {"type": "array", "items": S, "minItems": size}, "minItems": size}


@family
def lengths(size: int) -> Form:
    return "json", {
        "type": "object",
        "properties": {f"p{i}": {"type": "string", "minLength": 10**9} for i in range(size // 50)},
    }


@family
def numbers(size: int) -> Form:
    number = {"type": "number", "minimum": -1.0000000001, "maximum": 9e99, "multipleOf": 1e-7}
    return "json", {"type": "object", "properties": {f"p{i}": number for i in range(size // 100)}}


@family
def junk(size: int) -> Form:
    return "json", {
        "properties": [5] * (size // 9),
        "allOf": {"a": 1},
        "required": {"b": "c"},
        "items": "x" * 9,
        "$defs": 3,
    }


# regular expressions
for _name, _unit in {
    "optional_letters": "a?",
    "starred_letters": "a*",
    "any_letters": ".*a",
    "counted_letters": "a{1,99}",
    "optional_groups": "(ab|c)?",
    "character_classes": "[^a-y]?",
    "unicode_classes": r"\p{L}?",
    "unlike_words": "w|ab",
    "lookaheads": "(?=a)",
    "ands": "a&(?:b)",
}.items():
    FAMILIES[_name] = partial(repeat, _unit)


@family
def powers(size: int) -> Form:
    return "regex", nested(max(1, min(size // 8, 2000)), lambda x: f"(?:{x}){{100}}", "a")


@family
def thousand_times_a_thousand(size: int) -> Form:
    return "regex", "(a{1000}){1000}" * max(1, min(size // 15, 100))


@family
def exponential_states(size: int) -> Form:
    return "regex", f"(a|b)*a(a|b){{{min(size, 5000)}}}"


@family
def deep_groups(size: int) -> Form:
    return "regex", "(" * (size // 2) + "a" + ")" * (size // 2)


@family
def deep_stars(size: int) -> Form:
    return "regex", "(" * (size // 3) + "a" + ")*" * (size // 3)


@family
def words(size: int) -> Form:
    chance = random.Random(size)
    return "regex", "|".join("".join(chance.choices("abcdefgh", k=9)) for _ in range(size // 10))


@family
def choices(size: int) -> Form:
    return "choice", [f"choice {i}" for i in range(max(1, size // 16))]


@family
def long_choices(size: int) -> Form:
    return "choice", ["x" * (size // 3), "y" * (size // 3)]


@family
def lone_surrogates(size: int) -> Form:
    return random.choice(["regex", "grammar"]), "a" * size + "\ud800"


@family
def lone_surrogate_in_a_choice(size: int) -> Form:
    return "choice", ["a", "b" * size + "\udfff"]


@family
def lone_surrogate_in_a_schema(size: int) -> Form:
    return "json", {"properties": {"a\ud800": {"const": "b" * size}}}


# grammars
@family
def grammar_of_optional_letters(size: int) -> Form:
    return "grammar", "start: " + '"a"? ' * (size // 5)


@family
def chain_of_rules(size: int) -> Form:
    count = max(1, size // 14)
    return "grammar", "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(count)) + f'r{count}: "a"'


@family
def chain_of_terminals(size: int) -> Form:
    count = max(1, size // 14)
    return "grammar", "start: R0\n" + "".join(f"R{i}: R{i + 1}\n" for i in range(count)) + f'R{count}: "a"'


@family
def ring_of_rules(size: int) -> Form:
    count = max(2, size // 14)
    return "grammar", "start: r0\n" + "".join(f"r{i}: r{(i + 1) % count}\n" for i in range(count))


@family
def deep_brackets(size: int) -> Form:
    return "grammar", "start: " + "(" * (size // 2) + '"a"' + ")" * (size // 2)


@family
def ambiguous(size: int) -> Form:
    return "grammar", "start: e\ne: " + " | ".join(
        "e " * i + '"a"' for i in range(1, max(2, int(size**0.5)))
    ) + " | e e"


@family
def many_rules_to_choose_from(size: int) -> Form:
    return "grammar", "start: x\nx: " + " | ".join(f'"k{i}" x' for i in range(size // 9))


@family
def counted_rules(size: int) -> Form:
    return "grammar", 'start: (("a"~1..1000)~1..1000)~1..1000' + "\n// " + "x" * size


@family
def many_schemas(size: int) -> Form:
    count = max(1, size // 50)
    rules = "".join(f'r{i}: %json {{"type": "array"}}\n' for i in range(count))
    return "grammar", f"start: {' '.join(f'r{i}' for i in range(count))}\n{rules}"


@family
def many_expressions(size: int) -> Form:
    count = max(1, size // 22)
    return "grammar", "start: " + " | ".join(f"T{i}" for i in range(count)) + "\n" + "".join(
        f"T{i}: /.*a{i}/\n" for i in range(count)
    )


def test_there_are_enough() -> None:
    assert len(FAMILIES) >= 40


STREAM = """
import json, sys, threading, time, urllib.request

body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "ignore_eos": True, "max_tokens": 200}
gap = [0.0]

def stream():
    while True:
        request = urllib.request.Request(sys.argv[1] + "/v1/chat/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            before = time.monotonic()
            for _ in answer:
                now = time.monotonic()
                gap[0], before = max(gap[0], now - before), now

thread = threading.Thread(target=stream, daemon=True)
thread.start()
for _ in sys.stdin:
    print(gap[0] if thread.is_alive() else "nan", flush=True)
    gap[0] = 0.0
"""
"""Another client, in a process of its own: it prints its longest pause since it was last asked."""


class Served:
    """A server in a process of its own, and what another client sees of it meanwhile.

    Attributes:
        memory: Most bytes that the server and its helpers took.
    """

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url
        self.memory = 0
        self._other = subprocess.Popen(
            [sys.executable, "-c", STREAM, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join()
        self._other.kill()
        self._other.communicate()

    def gap(self) -> float:
        """Longest time in seconds between two pieces of the other client's streams, since the last call."""
        assert self._other.stdin is not None
        assert self._other.stdout is not None
        self._other.stdin.write("\n")
        self._other.stdin.flush()
        return float(self._other.stdout.readline())

    def ask(self, form: Form) -> tuple[int, float, str]:
        """Status, seconds and text of the answer."""
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 20, "structured_outputs": dict([form])}
        data = json.dumps(body).encode()
        began = time.monotonic()
        answer = httpx.post(f"{self.url}/v1/chat/completions", content=data, timeout=60)
        return answer.status_code, time.monotonic() - began, answer.text

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            self.memory = max(self.memory, sum(map(_private, _tree(self.process.pid))))


def _tree(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [inner for child in task.read_text().split() for inner in _tree(int(child))]
        except OSError:
            continue
    return found


def _private(pid: int) -> int:
    """Bytes of memory of a process; what several share counts for each in part."""
    try:
        found = re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return 1024 * int(found[1]) if found else 0


@contextmanager
def served() -> Iterator[Served]:
    words = ("-m", "bitnet.core", "serve", "--device", "cpu", "--port", "0", "--timeout", f"{TIMEOUT:g}", "-np", "8")
    process = subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if found := re.search(r"Serving .* at (\S+)", line):
            break
    else:
        raise AssertionError("".join(lines))
    thread = threading.Thread(target=lambda: lines.extend(process.stderr or ()))
    thread.start()
    server = Served(process, found[1])
    try:
        yield server
        assert process.poll() is None
    finally:
        server.end()
        process.terminate()
        process.wait(30)
        thread.join()
        process.stderr.close()
    assert not any("Traceback" in line for line in lines), "".join(lines)[-3000:]


def check(server: Served, jobs: Sequence[tuple[str, int]]) -> None:
    for i in range(0, len(jobs), AT_ONCE):
        for _ in range(3):  # a machine that does much else may be late, but not each time
            server.gap()
            wrong = [*ask(server, jobs[i : i + AT_ONCE])]
            gap = server.gap()
            print(f"gap {gap:.2f} s, memory {server.memory / 1e6:.0f} MB")
            if not wrong and gap < 1:
                break
        assert wrong == []
        assert gap < 1
        assert server.memory < 1e9


def ask(server: Served, jobs: Sequence[tuple[str, int]]) -> Iterator[str]:
    """Ask for several forms at once; what was wrong."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda job: server.ask(FAMILIES[job[0]](job[1])), jobs))
    assert server.process.poll() is None, jobs
    for (name, size), (status, seconds, text) in zip(jobs, answers, strict=True):
        summary = f"{name} {size}: {status} after {seconds:.2f} s, {text[:200]}"
        print(summary)
        # Of a form that is accepted and then fails, the client learns that no answer can be held to it.
        if (status not in (200, 400, 413, 504) and "constraint_failed" not in text) or seconds > TIMEOUT + 1:
            yield summary


linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is looked at in /proc")


@linux
def test_some_forms_harm_nobody() -> None:
    """A few, others in each run: :func:`test_no_form_harms_anybody` runs all."""
    names = random.sample([*FAMILIES], 8)
    with served() as server:
        check(server, [(name, random.choice([2_000, 20_000, 190_000])) for name in names])


@linux
@pytest.mark.nightly(unless_changed=HERE)
@pytest.mark.parametrize("part", range(4))
def test_no_form_harms_anybody(part: int) -> None:
    with served() as server:
        for size in (300, 5_000, 60_000, 190_000, 1_000_000, BODY // 2, BODY - 1000):
            check(server, [(name, size) for name in [*FAMILIES][part::4]])
