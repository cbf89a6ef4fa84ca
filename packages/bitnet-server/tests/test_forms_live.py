"""Forms that once ended or held a server: each is asked for where it was found, while another client streams."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from bombs.live import Live, serving

HERE = [
    "packages/bitnet-server/src/bitnet/server/forms",
    "packages/bitnet-core/src/bitnet/core/support/helper",
    "uv.lock",
]
"""What becomes of a form depends on: what prepares and compiles it, and llguidance's version."""
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc"),
    pytest.mark.nightly(unless_changed=HERE),
]

TIMEOUT, LONG_TIMEOUT = 3.0, 30.0
GAP, MEMORY = 1.0, 1_000_000_000
"""Bounds: seconds that the other client's stream may stand still, bytes of the server."""
TRIES = 3
"""Tries of which one must keep the bounds of time: a machine that does much else may be late, but not each time."""
CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 20}
STRING = {"type": "string"}


def chain(links: int, combined: bool) -> dict[str, Any]:
    """A schema whose definitions each refer to the next."""
    references: list[Any] = [{"$ref": f"#/$defs/d{i + 1}"} for i in range(links)]
    definitions = {f"d{i}": {"allOf": [ref]} if combined else ref for i, ref in enumerate(references)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{links}": STRING}}


def outputs(kind: str, value: Any) -> dict[str, Any]:
    return {**ASKED, "structured_outputs": {kind: value}}


def nested(before: str, after: str) -> bytes:
    """A body whose schema is in 2,000 others, which Python would not write."""
    schema = before * 2_000 + json.dumps(STRING) + after * 2_000
    return json.dumps(outputs("json", "@")).replace('"@"', schema).encode()


COMBINED = chain(1_400, combined=True)
RULES = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(4_000)) + 'r4000: "a"'
ENDED: dict[str, tuple[str, Any]] = {
    "response_format": (
        CHAT,
        {**ASKED, "response_format": {"type": "json_schema", "json_schema": {"schema": COMBINED}}},
    ),
    "text.format": (
        "/v1/responses",
        {
            "input": "x",
            "max_output_tokens": 20,
            "text": {"format": {"type": "json_schema", "name": "x", "schema": COMBINED}},
        },
    ),
    "format": (
        "/api/chat",
        {"model": "bitnet-demo", "messages": ASKED["messages"], "stream": False, "format": COMBINED},
    ),
    "completions": (
        "/v1/completions",
        {
            "prompt": "x",
            "max_tokens": 20,
            "response_format": {"type": "json_schema", "json_schema": {"schema": COMBINED}},
        },
    ),
    "plain references": (CHAT, outputs("json", chain(4_000, combined=False))),
    "anyOf": (CHAT, nested('{"anyOf": [', "]}")),
    "arrays": (CHAT, nested('{"type": "array", "items": ', "}")),
    "objects": (CHAT, nested('{"type": "object", "properties": {"a": ', "}}")),
    "rules": (CHAT, outputs("grammar", RULES)),
    "optional letters": (CHAT, outputs("regex", "a?" * 60_000)),
}
"""What ended the process, or took its memory."""
HELD: dict[str, list[Any]] = {
    "a pattern of a million letters": [outputs("json", {"type": "string", "pattern": "^((a{100}){100}){100}$"})] * 16,
    "a million letters": [outputs("regex", "(a{1000}){1000}")] * 16,
    "optional letters in Lark": [outputs("grammar", "start: " + '"a"? ' * 30_000)] * 16,
    "alternatives": [outputs("regex", "|".join(f"{i * 7919:x}" for i in range(25_000)))] * 16,
    "threads": [outputs("regex", "a?" * (10_000 + i)) for i in range(4)],
}
"""What made others wait, as often at once as it was asked for then."""


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving("--timeout", f"{TIMEOUT:g}", "-np", "8") as found:
        yield found


@pytest.fixture(scope="module")
def patient() -> Iterator[Live]:
    """A server whose requests may go on to the masks of their forms."""
    with serving("--timeout", f"{LONG_TIMEOUT:g}", "-np", "8") as found:
        yield found


def sent(body: Any) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


def ask(live: Live, path: str, bodies: list[Any], timeout: float) -> list[str]:
    """Send bodies at once; what was wrong with the answers."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(partial(live.post, path), map(sent, bodies)))
    wrong = []
    for status, seconds, said in answers:
        print(f"{status} after {seconds:.2f} s: {said[:100]}")
        if status not in (200, 400, 413, 504) or seconds > timeout + 1:
            wrong.append(f"{status} after {seconds:.2f} s: {said[:500]}")
    return wrong


def check(live: Live, path: str, bodies: list[Any], timeout: float) -> None:
    for _ in range(TRIES):
        live.longest_gap()
        wrong = ask(live, path, bodies, timeout)
        gap, memory = live.longest_gap(), live.memory()
        print(f"gap {gap:.2f} s, {memory / 1e6:.0f} MB")
        assert live.process.poll() is None, "the server has ended"
        assert memory < MEMORY
        if not wrong and gap < GAP:
            break
    assert wrong == []
    assert gap < GAP


@pytest.mark.parametrize("form", ENDED)
def test_the_server_lives(live: Live, form: str) -> None:
    path, body = ENDED[form]
    check(live, path, [body], TIMEOUT)


@pytest.mark.parametrize("form", HELD)
def test_others_hardly_wait(patient: Live, form: str) -> None:
    check(patient, CHAT, HELD[form], LONG_TIMEOUT)
