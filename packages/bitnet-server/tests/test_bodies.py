"""Bodies made to cost much, one by one and together: what they cost the server, and whoever else it serves."""

from __future__ import annotations

import json
import random
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from bitnet.core import Model
from bitnet.server.request import bounded_json, call
from bitnet.server.request.bodies import BODIES, SMALL
from bitnet.server.request.bounded_json import (
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_ENTRIES,
    MAX_ITEMS,
    STRIDE,
    Count,
    TooComplexError,
)
from bitnet.server.request.fields import MAX_LENGTH
from bombs.bodies import SHAPES, Shape
from bombs.live import Live, serving

SIZE = 16_000_000
GAP, MEMORY, TIMEOUT = 1.0, 1 << 30, 20.0
"""Bounds: seconds that another client's stream may stand still, bytes of the server, seconds of ``--timeout``."""
TRIES = 3
"""Tries of which one must keep the first bound: a machine that does much else may be late, but not each time."""

linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


def counted(text: bytes, ends: Sequence[int] = ()) -> Count:
    count = Count()
    for begin, end in zip((0, *ends), (*ends, len(text)), strict=True):
        count.feed(text[begin:end])
    return count


def parts(value: Any) -> tuple[int, int]:
    """Commas and entries of the JSON of a value."""
    inner = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    below = [parts(v) for v in inner]
    commas, entries = (sum(one[i] for one in below) for i in (0, 1))
    entries += isinstance(value, (dict, list)) + (len(value) if isinstance(value, dict) else 0)
    return commas + max(0, len(inner) - 1), entries


def made(chance: random.Random, depth: int = 0) -> Any:
    """A value of any shape, whose texts have whatever could be taken for structure."""
    kind = chance.randrange(6 if depth < 5 else 4)
    if kind < 2:
        return "".join(chance.choices('\\"\\",:[]{}ab\n\u20ac\U0001f600', k=chance.randrange(12)))
    if kind < 4:
        return chance.choice([None, True, -1.5, 10**20, 0])
    inner = [made(chance, depth + 1) for _ in range(chance.randrange(5))]
    return inner if kind == 4 else {f'{made(chance, 9)}"\\{i}': v for i, v in enumerate(inner)}


def test_the_count_is_that_of_what_the_parser_makes() -> None:
    """However the text is cut into pieces, in the midst of an escape or a character, too."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(500):
        value = made(chance)
        text = json.dumps(value, ensure_ascii=chance.random() < 0.5, indent=chance.choice([None, 1])).encode()
        ends = sorted(chance.choices(range(len(text) + 1), k=chance.randrange(20)))
        count = counted(text, ends)
        assert (count.items, count.entries) == parts(value), text
        assert bounded_json.parse(text) == value == bounded_json.parse_text(text.decode())


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        (b"[" + b"1," * MAX_ITEMS + b"1]", True),
        (b"[" + b"1," * (MAX_ITEMS + 1) + b"1]", False),
        (b"[" + b"{}," * (MAX_ENTRIES - 2) + b"{}]", True),
        (b"[" + b"{}," * (MAX_ENTRIES - 1) + b"{}]", False),
        (b"{" + b'"":1,' * (MAX_ENTRIES - 2) + b'"":1}', True),
        (b"{" + b'"":1,' * (MAX_ENTRIES - 1) + b'"":1}', False),
        (b'"' + b",:[{" * MAX_ENTRIES + b'"', True),
    ],
    ids=["items", "items + 1", "objects", "objects + 1", "members", "members + 1", "text"],
)
def test_bounds_on_parts(text: bytes, fits: bool) -> None:
    ends = range(STRIDE, len(text), STRIDE)
    if fits:
        counted(text, ends)
        bounded_json.parse(text)
    else:
        with pytest.raises(TooComplexError, match="more than the"):
            counted(text, ends)
        with pytest.raises(ValueError, match="more than the"):
            bounded_json.parse_text(text.decode())


def test_bounds_on_depth_and_digits() -> None:
    counted(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    for text, why in ((b"[" * (MAX_DEPTH + 1), "nested more than"), (b"[]]", "more brackets than")):
        with pytest.raises(ValueError, match=why):
            counted(text)
    assert bounded_json.parse(b"1" * MAX_DIGITS) == int("1" * MAX_DIGITS)
    for bad in (b"1" * (MAX_DIGITS + 1), b"NaN", "[]".encode("utf-16"), b"\xff", b"["):
        with pytest.raises(ValueError, match=r".+"):
            bounded_json.parse(bad)
    assert bounded_json.parse(b"\xef\xbb\xbf[]") == []  # as some programs on Windows begin a text


CHAT, ANTHROPIC = "/v1/chat/completions", "/v1/messages"
SOUND: dict[str, Any] = {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
LISTS: dict[str, tuple[str, Callable[[list[Any]], dict[str, Any]]]] = {
    "messages": (CHAT, lambda many: {"messages": many}),
    "messages[0].content": (CHAT, lambda many: {"messages": [{"role": "user", "content": many}]}),
    "messages[0].tool_calls": (CHAT, lambda many: {"messages": [{"role": "assistant", "tool_calls": many}]}),
    "tools": (CHAT, lambda many: {**SOUND, "tools": many}),
    "stop": (CHAT, lambda many: {**SOUND, "stop": many}),
    "stop_token_ids": (CHAT, lambda many: {**SOUND, "stop_token_ids": many}),
    "logit_bias": (CHAT, lambda many: {**SOUND, "logit_bias": {f"x{i}": 1 for i in range(len(many))}}),
    "modalities": (CHAT, lambda many: {**SOUND, "modalities": many}),
    "structured_outputs.choice": (CHAT, lambda many: {**SOUND, "structured_outputs": {"choice": many}}),
    "input": ("/v1/responses", lambda many: {"input": many}),
    "include": ("/v1/responses", lambda many: {"input": "x", "include": many}),
    "prompt": ("/v1/completions", lambda many: {"prompt": many}),
    "system": (ANTHROPIC, lambda many: {**SOUND, "system": many}),
    "stop_sequences": (ANTHROPIC, lambda many: {**SOUND, "stop_sequences": many}),
    "options.stop": ("/api/chat", lambda many: {**SOUND, "options": {"stop": many}}),
    "messages ": ("/api/chat", lambda many: {**SOUND, "messages": many}),
}


@pytest.mark.parametrize("field", LISTS)
def test_a_length_is_checked_before_the_elements(demo: Any, field: str) -> None:
    """The first element is wrong everywhere, so any look at it would tell."""
    path, body = LISTS[field]
    answer = demo.client.post(path, json=body([[""]] * (MAX_LENGTH + 1)))
    message = answer.text
    assert answer.status_code == 400, message
    assert f"{field.strip()} has 16,385 " in message
    assert "at most" in message


MANY = 6000
LONG: dict[str, tuple[str, dict[str, Any], Callable[[Any], Any]]] = {
    "floats": ("/v1/embeddings", {"input": ["x"] * 200, "encoding_format": "float"}, lambda v: len(v["data"]) == 200),
    "base64": ("/v1/embeddings", {"input": ["x"] * 200, "encoding_format": "base64"}, lambda v: len(v["data"]) == 200),
    "vectors": ("/api/embed", {"model": "demo", "input": ["x"] * 200}, lambda v: len(v["embeddings"]) == 200),
    "pieces": (
        "/tokenize",
        {"content": "x " * MANY, "with_pieces": True},
        lambda v: (
            len(v["tokens"]) == v["count"] >= MANY and v["tokens"][0] == {"id": v["tokens"][0]["id"], "piece": "x"}
        ),
    ),
    "texts": (
        "/tokenize",
        {"content": "x " * MANY, "return_token_strs": True},
        lambda v: "".join(v["token_strs"]) == "x " * MANY and len(v["tokens"]) == v["count"],
    ),
}


@pytest.mark.parametrize("kind", LONG)
def test_long_answers_are_written_a_piece_at_a_time_outside_the_event_loop(
    demo: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """While Python encodes a value as JSON, nothing else runs, in any thread."""
    path, body, right = LONG[kind]
    made: list[tuple[str, int]] = []
    real = call.to_json

    def noted(value: Any) -> bytes:
        data = real(value)
        made.append((threading.current_thread().name, len(data)))
        return data

    monkeypatch.setattr(call, "to_json", noted)
    answer = demo.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert right(answer.json())
    assert len(answer.content) > 50_000
    assert max(size for _, size in made) < len(answer.content) / 1.2
    assert all(name.startswith("bitnet-http") for name, size in made if size > 1000)


@contextmanager
def unfinished(port: int, size: int, path: str = "/tokenize") -> Iterator[socket.socket]:
    """A connection on which a body of ``size`` bytes has been sent that is to go on."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size + 1000}\r\n\r\n"
        connection.sendall(head.encode() + b'{"content": "' + b"x" * (size - 13))
        yield connection


def until(condition: Any, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.005)


def test_all_bodies_share_a_budget_and_give_it_back(demo_model: Model, running: Any) -> None:
    with running(demo_model) as server, ExitStack() as held:
        bodies = server.state.bodies
        whole = bodies.left = 1_000_000
        for taken in (1, 2, 3):
            held.enter_context(unfinished(server.port, 300_000 + SMALL))
            until(lambda taken=taken: whole - bodies.left >= taken * 300_000)
        large = json.dumps({"content": "x" * 300_000}).encode()
        refused = server.client.post("/tokenize", content=large)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["code"] == "bodies_full"
        assert server.client.post("/tokenize", content=b"{}" + b" " * (SMALL - 2)).status_code == 400
        assert server.chat(max_tokens=1).status_code == 200  # what is small gets through
        held.close()
        until(lambda: bodies.left == whole)
        assert server.client.post("/tokenize", content=large).status_code == 400  # too long for the context
        for bad in (large[:-1], b"[" * 200_000, large + b"}"):
            assert server.client.post("/tokenize", content=bad).status_code == 400
        until(lambda: bodies.left == whole)


def test_bodies_that_do_not_end_neither_fill_the_queue_nor_outlast_the_timeout(demo_model: Model, running: Any) -> None:
    with running(demo_model, max_queue=0, timeout=2) as server, ExitStack() as held:
        for _ in range(3):  # a machine that does much else may be late, but not each time
            begin = time.monotonic()
            waiting = [held.enter_context(unfinished(server.port, 100, "/v1/chat/completions")) for _ in range(20)]
            assert server.chat(max_tokens=1).status_code == 200
            for connection in waiting:
                assert connection.recv(4096).startswith(b"HTTP/1.1 408")
            seconds = time.monotonic() - begin
            assert seconds > 1.9
            if seconds < 5:
                break
        assert seconds < 5


def largest(shape: Shape) -> int:
    """The most units of a shape whose parts are within the bounds."""
    count = Count()
    count.feed(b"[" + shape.unit + shape.comma)
    return min((MAX_ENTRIES - 100) // max(1, count.entries), (MAX_ITEMS - 100) // max(1, count.items))


def check(live: Live, shape: Shape, most: int | None) -> None:
    body = shape.body(SIZE, most)
    for _ in range(TRIES):
        live.longest_gap()
        status, seconds, said = live.post(shape.path, body)
        gap, memory = live.longest_gap(), live.memory()
        print(f"{shape.name}: {len(body) / 1e6:.1f} MB, {status}, {seconds:.2f} s, gap {gap:.2f} s, {memory >> 20} MiB")
        assert status in (200, 400, 413), said
        assert status == 200 or len(said) < 1000, said[:2000]
        assert seconds < TIMEOUT + 1
        assert memory < MEMORY
        if gap < GAP:
            break
    assert gap < GAP


@linux
def test_some_large_bodies_beside_a_stream() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    with serving("--timeout", str(TIMEOUT)) as live:
        for name in chance.sample([*SHAPES], 4):
            check(live, SHAPES[name], chance.choice([None, largest(SHAPES[name]), MAX_LENGTH]))


@linux
@pytest.mark.nightly
def test_every_large_body_beside_a_stream() -> None:
    with serving("--timeout", str(TIMEOUT)) as live:
        for shape in SHAPES.values():
            for most in (None, largest(shape), MAX_LENGTH):
                check(live, shape, most)


@linux
def test_sixty_unfinished_bodies_beside_a_stream() -> None:
    for _ in range(TRIES):
        gap = gap_beside_sixty_unfinished_bodies()
        if gap < GAP:
            break
    assert gap < GAP


def gap_beside_sixty_unfinished_bodies() -> float:
    """The stream's longest pause. Each body is as large as is allowed but for its last byte; together, a gigabyte."""
    head = b'POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n{"content":"' % SIZE
    text = b"x" * 250_000
    with serving("-np", "2", "--max-queue", "0") as live, ExitStack() as held:
        before = live.memory()
        live.longest_gap()
        connections = [
            held.enter_context(socket.create_connection(("127.0.0.1", live.port), timeout=60)) for _ in range(60)
        ]
        for piece in (head, *[text] * (SIZE // len(text) - 1), text[: len(text) - 13]):
            for connection in connections:
                connection.sendall(piece)
        until(lambda: len(select.select(connections, [], [], 0)[0]) == 60 - BODIES, 60)
        gap, memory = live.longest_gap(), live.memory()
        print(f"gap {gap:.2f} s, {before >> 20} → {memory >> 20} MiB")
        for connection in select.select(connections, [], [], 0)[0]:
            assert connection.recv(4096).startswith(b"HTTP/1.1 503")
        assert memory - before < 256 << 20
        return gap
