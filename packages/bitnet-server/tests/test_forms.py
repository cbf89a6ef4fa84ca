"""Forms in helper processes: what is slow or ends there affects its own request only, and within its deadline."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from bitnet.core import Model
from bitnet.core.support.helper import Limits
from bitnet.server.forms import matchers, structured
from bitnet.server.forms.matchers import FormError, FormSource, Matcher, Matchers
from bitnet.server.models import threads as prompt_threads

posix = pytest.mark.skipif(sys.platform == "win32", reason="processes are ended by signals")
DIGITS = FormSource("regex", r"\d{40}")
ENDLESS = FormSource("regex", "a?" * 60_000)


@pytest.fixture
def pool(demo_model: Model) -> Iterator[Matchers]:
    found = Matchers(demo_model.tokenizer)
    yield found
    found.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.01)


def mask(matcher: Matcher) -> bytes:
    end = time.monotonic() + 20
    while (found := matcher.allowed()) is None:
        assert time.monotonic() < end
        time.sleep(0.001)
    return found


def ids(found: bytes) -> list[int]:
    return [i for i in range(8 * len(found)) if found[i >> 3] >> (i & 7) & 1]


def pids(pool: Matchers) -> set[int]:
    running = [worker._helper._running for worker in pool._workers]
    return {found._process.pid for found in running if found is not None}


def test_a_form_is_compiled_once_and_its_error_is_kept(pool: Matchers, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    real = matchers._Worker.compile

    def noted(self: Any, source: FormSource) -> bytes:
        compiled.append(source.text)
        return real(self, source)

    monkeypatch.setattr(matchers._Worker, "compile", noted)
    wrong = FormSource("regex", "(")
    futures = [pool.compile(source) for source in (DIGITS, wrong) * 8]
    for future in futures[::2]:
        future.result()
    for future in futures[1::2]:
        with pytest.raises(FormError, match="invalid regex"):
            future.result()
    assert sorted(compiled) == ["(", DIGITS.text]


def test_a_form_that_takes_too_long_is_ended_and_remembered(pool: Matchers, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FormError, match=r"takes (more than 2 s of processor time|longer than 4 s|more than .* memory)"):
        pool.compile(ENDLESS).result()
    monkeypatch.setattr(matchers._Worker, "compile", lambda *_: pytest.fail("it is compiled again"))
    with pytest.raises(FormError, match="takes"):
        pool.compile(ENDLESS).result()


def test_a_form_that_takes_too_much_memory_is_ended(pool: Matchers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matchers, "COMPILE", Limits(60, 60))
    with pytest.raises(FormError, match="takes more than 96 MiB of memory"):
        pool.compile(ENDLESS).result()


@posix
def test_matchers_outlive_their_process(pool: Matchers) -> None:
    """Whatever ended it was not theirs: they are opened again, with the tokens so far."""
    pool.compile(DIGITS).result()
    found = [Matcher(pool, DIGITS) for _ in range(6)]
    for round_ in range(6):
        for matcher in found:
            matcher.accept(ids(mask(matcher))[round_])
        if round_ % 2:
            for pid in pids(pool):
                os.kill(pid, signal.SIGKILL)
    decoded = [pool._tokenizer.decode(matcher._tokens) for matcher in found]
    assert decoded == decoded[:1] * 6
    assert decoded[0].isdecimal()
    again = Matcher(pool, DIGITS)
    for token in found[0]._tokens:
        mask(again)
        again.accept(token)
    assert mask(again) == mask(found[0])


@posix
def test_a_process_may_end_just_after_a_matcher_has_looked(pool: Matchers, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.compile(DIGITS).result()
    found = Matcher(pool, DIGITS)
    found.accept(ids(mask(found))[0])
    mask(found)
    (running,) = [worker._helper._running for worker in pool._workers if worker._helper._running is not None]
    os.kill(running.pid, signal.SIGKILL)
    running._process.wait(10)
    monkeypatch.setattr(matchers._Worker, "lost", False)
    found.accept(ids(mask(found))[1])
    after = mask(found)
    monkeypatch.undo()
    again = Matcher(pool, DIGITS)
    for token in found._tokens:
        mask(again)
        again.accept(token)
    assert after == mask(again)


SMALL_STACK = """
import json, resource
from bitnet.core import load_model
from bitnet.server.forms.matchers import FormSource, Matchers

links = 200
definitions = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(links)}
schema = {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{links}": {"type": "string"}}}
with load_model(device="cpu") as model:
    matchers = Matchers(model.tokenizer)
    resource.setrlimit(resource.RLIMIT_STACK, (256 << 10, resource.RLIM_INFINITY))
    matchers.compile(FormSource("json", json.dumps(schema))).result()
    matchers.close()
"""


@posix
def test_forms_are_compiled_on_a_stack_of_their_own_size() -> None:
    """Threads have 128 KiB with musl, and 512 on macOS: enough for a few references only."""
    done = subprocess.run([sys.executable, "-c", SMALL_STACK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_slow_mask_ends_its_own_matcher_only(pool: Matchers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matchers, "HELPERS", 1)
    slow = FormSource("json", json.dumps({"const": "long " * 12_000}))
    for source in (slow, DIGITS):
        pool.compile(source).result()
    monkeypatch.setattr(matchers, "MASK", Limits(seconds=0.001, cpu_seconds=0.001))
    victim = Matcher(pool, slow)
    first = ids(mask(victim))[0]
    other = Matcher(pool, DIGITS)
    before = mask(other)
    victim.accept(first)
    with pytest.raises(FormError, match=r"takes (longer|more) than"):
        mask(victim)
    monkeypatch.setattr(matchers, "MASK", Limits(seconds=5, cpu_seconds=5))
    other.accept(ids(before)[0])
    assert pool._tokenizer.decode([ids(mask(other))[0]]).isdecimal()


def test_matchers_are_closed(demo: Any) -> None:
    pool = demo.service.backend.compiler._matchers
    for stream in (False, True):
        demo.chat("x", structured_outputs={"regex": r"\d{4}"}, stream=stream)
    demo.chat("x", structured_outputs={"regex": r"\d{4}"}, n=3, temperature=1)
    until(lambda: not any(worker.sessions for worker in pool._workers))


def endless(number: int) -> dict[str, Any]:
    return {"structured_outputs": {"regex": "a?" * (60_000 + number)}}


@pytest.mark.parametrize("stream", [False, True])
def test_submitting_is_under_the_deadline(
    script_model: Model, running: Any, scripted: Any, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where forms wait for others, and where a prompt takes long."""
    scripted(script_model, "yes")
    with running(script_model, timeout=4.0) as server, ThreadPoolExecutor(8) as threads:
        server.chat("x", structured_outputs={"choice": ["yes"]})
        for turn in range(3):  # a machine that does much else may be late, but not each time
            began = time.monotonic()
            asked = [threads.submit(server.chat, "x", stream=stream, **endless(6 * turn + i)) for i in range(6)]
            known = server.chat("x", structured_outputs={"choice": ["yes"]})
            for answer in asked:  # a fast machine comes to the bound of memory before the deadline
                said = answer.result()
                assert said.status_code == 504 or "takes more than 96 MiB of memory" in said.text, said.text
            seconds = time.monotonic() - began
            if known.status_code == 200 and seconds < 5:
                break
        assert known.status_code == 200, known.text
        assert seconds < 5
        go_on, over = threading.Event(), threading.Event()
        real = type(server.service).chat_tokens

        def waits(*arguments: Any, **options: Any) -> Any:
            go_on.wait(20)
            over.set()
            return real(*arguments, **options)

        monkeypatch.setattr(type(server.service), "chat_tokens", waits)
        assert server.chat("x", stream=stream).status_code == 504
        assert not over.is_set()  # the answer did not wait for it
        go_on.set()


@pytest.mark.parametrize("path", ["/tokenize", "/apply-template", "/v1/messages/count_tokens"])
def test_what_generates_nothing_is_under_the_deadline(
    script_model: Model, running: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, over = threading.Event(), threading.Event()

    def waits(*_: Any, **__: Any) -> None:
        go_on.wait(20)
        over.set()

    with running(script_model, timeout=0.5) as server:
        for owner, name in (
            (type(server.service), "chat_tokens"),
            (type(server.service), "text_tokens"),
            (type(server.service), "chat_text"),
        ):
            monkeypatch.setattr(owner, name, waits)
        messages = [{"role": "user", "content": "x"}]
        answer = server.client.post(path, json={"model": None, "content": "x", "messages": messages, "max_tokens": 1})
        assert answer.status_code == 504, answer.text
        assert not over.is_set()  # the answer did not wait for it
        go_on.set()


def test_health_tells_of_threads_that_are_stuck(
    script_model: Model, running: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(script_model, "yes")
    monkeypatch.setattr(prompt_threads, "STUCK_SECONDS", 0.2)
    go_on = threading.Event()
    with running(script_model, timeout=0.5) as server, ThreadPoolExecutor(8) as threads:
        real = type(server.service).chat_tokens

        def waits(*arguments: Any, **options: Any) -> Any:
            go_on.wait(20)
            return real(*arguments, **options)

        monkeypatch.setattr(type(server.service), "chat_tokens", waits)
        for answer in [threads.submit(server.chat, "x") for _ in range(prompt_threads.PROMPT_THREADS - 1)]:
            assert answer.result().status_code == 504
        time.sleep(0.3)
        assert server.client.get("/health").status_code == 200  # one is free
        assert server.chat("x").status_code == 504
        until(lambda: bool(server.client.get("/health/ready").status_code == 503))
        assert server.client.get("/health/ready").json() == {"status": "all threads are stuck"}
        assert server.client.get("/health/live").status_code == 200
        go_on.set()
        until(lambda: bool(server.client.get("/health").status_code == 200))


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({"regex": "a\ud800"}, "structured_outputs.regex has a lone surrogate, which is no character, at position 1."),
        ({"grammar": 'start: "\udfff"'}, "structured_outputs.grammar has a lone surrogate"),
        ({"choice": ["a", "b\ud800"]}, "structured_outputs.choice has a lone surrogate, .* at [1] at position 1"),
        ({"json": {"$ref": "#"}}, "structured_outputs.json has a $ref to '#' that leads only back to itself."),
        ({"json": {"const": "a\ud800"}}, "structured_outputs.json has a lone surrogate, .* at const at position 1"),
        ({"regex": "a" * 200_001}, "structured_outputs.regex has more than 200,000 characters."),
        ({"choice": ["a"] * 30_000}, "structured_outputs.choice has 30,000 strings; at most 16,384 are allowed"),
    ],
    ids=range(7),
)
def test_what_is_wrong_is_said_with_its_place(demo: Any, outputs: dict[str, Any], message: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "structured_outputs": outputs}
    answer = demo.client.post("/v1/chat/completions", content=json.dumps(body))
    assert answer.status_code == 400, answer.text
    found = answer.json()["error"]["message"]
    first, _, last = message.partition(".*")
    assert found.startswith(first), found
    assert last in found


def nested(count: int, around: Callable[[Any], Any]) -> Any:
    found: Any = {"type": "string"}
    for _ in range(count):
        found = around(found)
    return found


def test_forms_that_people_use_stay_far_from_the_limits(demo: Any) -> None:
    schemas = [
        nested(30, lambda inner: {"type": "object", "properties": {"a": inner}, "required": ["a"]}),
        {"enum": [f"value number {i}" for i in range(5_000)]},
        {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(300)}},
        {"type": "string", "maxLength": 100_000},
        {"type": "array", "items": {"type": "integer"}, "minItems": 1_000},
    ]
    for schema in schemas:
        answer = demo.chat("x", max_tokens=8, structured_outputs={"json": schema})
        assert answer.status_code == 200, answer.text


def test_a_helper_that_does_not_start_is_told(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from multiprocessing import spawn

    compiler = structured.Compiler(demo.model.tokenizer)
    monkeypatch.setattr(demo.service.backend, "compiler", compiler)
    monkeypatch.setattr(spawn, "get_executable", lambda: "/nowhere/python")
    answer = demo.chat("x", structured_outputs={"regex": "a"})
    assert answer.status_code == 500
    assert "compiled in a separate Python process, which does not start" in answer.text
    monkeypatch.undo()
    compiler.close()
    assert demo.chat("x", structured_outputs={"regex": "a"}).status_code == 200
