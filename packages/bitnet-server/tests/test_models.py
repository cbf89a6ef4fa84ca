"""Several models, loaded on demand within a bound; models that fail and come back; files that are loaded anew.

Long, because loading, failing and waiting are tested on one scripted loader.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import socket
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from bitnet.core import Model, load_model
from bitnet.core.errors import BitNetError, DeviceLostError
from bitnet.core.gguf.reader import GGUFFile
from bitnet.core.model.default import default_model_path
from bitnet.server.generation import job
from bitnet.server.models import pool as model_pool
from bitnet.server.models.service import Source

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "go"}], "temperature": 0}
HERE = ("packages/bitnet-server",)


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.005)


def held(opened: threading.Event, advance: Callable[..., Any], *given: Any) -> Any:
    """An engine's next step, held up."""
    assert opened.wait(60)
    return advance(*given)


class Loader:
    """Loads a file as the command does, and keeps what it loaded; a test may hold it up, or have it prepare a model."""

    def __init__(self, file: Path, prepare: Callable[[Model], object] = lambda model: None) -> None:
        self.file, self.prepare = file, prepare
        self.models: list[Model] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self) -> Model:
        assert self.gate.wait(30)
        model = load_model(self.file, device="cpu", threads=1, max_seqs=4, max_queue=64)
        self.prepare(model)
        self.models.append(model)
        return model

    def source(self, *names: str) -> Source:
        return Source(names, self.file, self)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return Path(shutil.copy(default_model_path(), tmp_path / "model.gguf"))


def test_a_fault_is_told_and_the_model_comes_back(file: Path, running: Any, scripted: Any) -> None:
    engines: list[Any] = []
    loader = Loader(file, lambda model: engines.append(scripted(model, f"model {len(engines)} " * 60)))
    with running(None, sources=[loader.source("m")]) as server, ThreadPoolExecutor(2) as pool:
        assert server.chat().text.count("model 0") == 60
        engines[0].seconds = 0.02
        whole, streamed = pool.submit(server.chat, "a"), pool.submit(server.chat, "b", stream=True)
        until(lambda: loader.models[0].load().running == 2)
        loader.gate.clear()
        engines[0].failure = DeviceLostError("it stopped answering.", device="cuda:7")
        assert whole.result().status_code == 503
        assert "cuda:7: it stopped answering" in streamed.result().text
        assert server.client.get("/health").status_code == 503
        assert server.client.get("/health/live").status_code == 200
        assert server.client.get("/v1/models").json()["data"][0]["status"]["value"] == "failed"
        during = server.chat()
        assert (during.status_code, during.headers["retry-after"]) == (503, "5")
        loader.gate.set()
        until(lambda: bool(server.client.get("/health").status_code == 200))
        assert server.chat().text.count("model 1") == 60
        assert len(loader.models) == 2
        with pytest.raises(Exception, match="stopped"):
            loader.models[0].generate("x", max_tokens=1)


def test_a_failed_model_that_cannot_even_be_closed_says_so(
    file: Path, running: Any, scripted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    loader = Loader(file, lambda model: scripted(model, "fine"))
    with running(None, sources=[loader.source("m")]) as server:
        assert server.chat().status_code == 200

        def close() -> None:
            raise DeviceLostError("it cannot be closed.", device="cuda:7")

        server.service.close = close
        loader.models[0]._worker.engine.failure = DeviceLostError("it broke.", device="cuda:7")  # type: ignore[attr-defined]
        assert server.chat().status_code == 503
        until(lambda: "it cannot be closed" in server.chat().text)
        assert "m could not be reloaded: cuda:7: it cannot be closed" in caplog.text
        assert server.client.post("/reload").json() == {"models": {"m": "reloaded"}}
        assert server.chat().status_code == 200


@pytest.mark.nightly(unless_changed=HERE)
def test_a_model_that_fails_again_is_not_loaded_again(file: Path, running: Any, scripted: Any) -> None:
    healthy = [True, False, True]

    def prepare(model: Model) -> None:
        engine = scripted(model, "fine")
        if not healthy[len(loader.models)]:
            engine.failure = DeviceLostError("it is still broken.", device="cuda:7")

    loader = Loader(file, prepare)
    with running(None, sources=[loader.source("m")]) as server:
        assert server.chat().status_code == 200
        loader.models[0]._worker.engine.failure = DeviceLostError("it broke.", device="cuda:7")  # type: ignore[attr-defined]
        assert server.chat().status_code == 503
        until(lambda: bool(server.client.get("/health").status_code == 200))
        assert server.chat().status_code == 503
        time.sleep(0.5)
        assert len(loader.models) == 2
        assert server.client.get("/health").status_code == 503
        assert server.client.post("/reload").json() == {"models": {"m": "reloaded"}}
        assert server.client.get("/health").status_code == 200
        assert server.chat().json()["choices"][0]["message"]["content"] == "fine"


def test_reload_drops_no_request_and_a_corrupt_file_changes_nothing(file: Path, running: Any, scripted: Any) -> None:
    engines: list[Any] = []

    def prepare(model: Model) -> None:
        engines.append(scripted(model, f"model {len(engines)} " * 60))
        engines[-1].seconds = 0.01

    loader = Loader(file, prepare)
    good = file.read_bytes()
    with running(None, sources=[loader.source("m")]) as server, ThreadPoolExecutor(4) as pool:
        engines[0].seconds = 0.5  # on a busy machine, the first answers would else have ended before the last begins
        long = [pool.submit(server.chat, str(i), stream=i % 2 == 0) for i in range(4)]
        until(lambda: loader.models[0].load().running == 4)
        engines[0].seconds = 0.01
        anew = file.with_name("anew")
        anew.write_bytes(good[: len(good) // 2])
        anew.replace(file)
        refused = server.client.post("/reload")
        assert refused.status_code == 500
        assert "reloaded" not in refused.json()["models"]["m"]
        assert server.client.get("/health").status_code == 200
        assert server.chat(max_tokens=2).status_code == 200
        anew.write_bytes(good)
        anew.replace(file)
        assert server.client.post("/reload").json() == {"models": {"m": "reloaded"}}
        assert server.chat(max_tokens=6).text.count("model 1")
        texts = [done.result() for done in long]
        assert [(t.status_code, t.text.count("model 0") == 60 or "[DONE]" in t.text) for t in texts] == [
            (200, True)
        ] * 4
        assert not any("model 1" in t.text or "error" in t.text for t in texts)
        until(lambda: _is_closed(loader.models[0]))
        assert not _is_closed(loader.models[1])


@pytest.mark.parametrize("way", ["written", "touched", "cut"])
def test_a_file_that_changes_while_it_is_served(
    file: Path, running: Any, scripted: Any, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    """What was begun ends with an error that does not name the folder; the file is loaded when it is whole again."""
    engines: list[Any] = []

    def prepare(model: Model) -> None:
        engines.append(scripted(model, f"model {len(engines)} " * 60))

    loader = Loader(file, prepare)
    data = file.read_bytes()
    with running(None, sources=[loader.source("m")]) as server, ThreadPoolExecutor(2) as pool:
        assert server.chat().text.count("model 0") == 60
        engines[0].seconds = 0.05
        whole, streamed = pool.submit(server.chat, "a"), pool.submit(server.chat, "b", stream=True)
        until(lambda: loader.models[0].load().running == 2)
        loader.gate.clear()
        if way == "touched":
            os.utime(file)
        else:
            with file.open("r+b") as out:
                out.write(data[:1000])
                out.truncate(len(data) // 2 if way == "cut" else len(data))
        assert server.client.get("/health/ready").status_code == 503
        during = server.chat()
        assert (during.status_code, during.headers["retry-after"]) == (503, "5")
        assert whole.result().status_code == 503
        assert whole.result().json()["error"]["code"] == "model_file_error"
        assert "[DONE]" not in streamed.result().text or "model_file_error" in streamed.result().text
        what = "was cut short while" if way == "cut" else "was written to while"
        for answer in (during, whole.result(), streamed.result()):
            assert f"The model's file {what} it was in use" in answer.text
            assert str(file.parent) not in answer.text
        assert str(file) in caplog.text
        loader.gate.set()
        if way == "cut":
            file.write_bytes(data)
        until(lambda: bool(server.client.get("/health/ready").status_code == 200))
        assert server.chat().text.count("model 1") == 60
        assert len(loader.models) == 2


@pytest.mark.parametrize("stream", [True, False])
def test_a_file_is_looked_at_now_and_then_and_at_the_end_of_each_answer(
    file: Path, running: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """A look is a call to the system, and there is a chunk for every step of every answer."""
    looks: list[float] = []
    check = GGUFFile.check
    engines: list[Any] = []
    loader = Loader(file, lambda model: engines.append(scripted(model, "word " * 200)))
    with running(None, sources=[loader.source("m")]) as server, ThreadPoolExecutor(1) as pool:
        assert server.chat().status_code == 200

        def look(file: GGUFFile) -> None:
            looks.append(time.monotonic())
            check(file)

        monkeypatch.setattr(GGUFFile, "check", look)
        begun = time.monotonic()
        assert server.chat(stream=stream).text.count("wo") >= 150
        assert 1 <= len(looks) <= 4 + (time.monotonic() - begun) / job.FILE_SECONDS
        monkeypatch.setattr(job, "FILE_SECONDS", 1000.0)
        engines[0].seconds = 0.005
        answer = pool.submit(server.chat, "b", stream=stream)
        until(lambda: loader.models[0].load().running == 1)
        os.utime(file)
        assert "model_file_error" in answer.result().text
        assert "[DONE]" not in answer.result().text.partition("model_file_error")[0]


def test_no_answer_names_a_folder_of_this_machine(file: Path, running: Any) -> None:
    loader = Loader(file)
    with running(None, sources=[loader.source("m")]) as server:
        data = file.read_bytes()
        for bad in (b"", b"no model", data[: len(data) // 2], None):
            anew = file.with_name("anew")
            if bad is None:
                file.unlink()
            else:
                anew.write_bytes(bad)
                anew.replace(file)
            refused = server.client.post("/reload")
            assert refused.status_code == 500
            assert "The model's file " in refused.json()["models"]["m"]
            assert str(file.parent) not in refused.text
        assert server.chat(max_tokens=1).status_code == 200
        receipt = server.chat(max_tokens=1, x_bitnet_receipt=True)
        assert str(file.parent) not in receipt.text


def test_a_model_that_was_closed_is_freed_at_once(
    file: Path, running: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file stays mapped, and its tokenizer in memory, until nothing refers to it: no cycle may."""
    monkeypatch.setattr("bitnet.server.models.pool.set_aside", lambda: None)  # which would free cycles
    made: list[weakref.ref[Model]] = []

    def load() -> Model:
        model = load_model(file, device="cpu", threads=1, max_seqs=4)
        scripted(model, "fine")
        made.append(weakref.ref(model))
        return model

    def here() -> list[int]:
        return [i for i, model in enumerate(made) if model() is not None]

    gc.collect()
    gc.disable()
    try:
        with running(None, sources=[Source(("m",), file, load)]) as server:
            for stream in (False, True):
                assert server.chat(stream=stream).status_code == 200
                service = server.state.pool.models[0].service
                service.model._worker.engine.failure = DeviceLostError("it stopped.", device="cuda:7")
                del service
                assert "it stopped" in server.chat(stream=stream).text
                until(lambda: bool(server.client.get("/health").status_code == 200))
            assert server.client.post("/reload").json() == {"models": {"m": "reloaded"}}
            until(lambda: here() == [3])
    finally:
        gc.enable()


def test_a_search_for_cycles_skips_a_loaded_model(file: Path, running: Any, scripted: Any) -> None:
    loader = Loader(file, lambda model: scripted(model, "fine"))
    with running(None, sources=[loader.source("m")]) as server:
        for _ in range(2):
            assert server.chat().status_code == 200
            words = loader.models[-1].tokenizer.vocab_size
            assert gc.get_freeze_count() > words
            assert len(gc.get_objects()) < words
            assert server.client.post("/reload").json() == {"models": {"m": "reloaded"}}


def size_of(file: Path) -> int:
    """Bytes of a loaded model: its file and its KV cache."""
    with load_model(file, device="cpu", threads=1, max_seqs=4) as model:
        return file.stat().st_size + model.cache_bytes


def test_a_model_that_takes_too_much_memory_alone_is_not_loaded(file: Path, running: Any) -> None:
    loader, size = Loader(file), size_of(file)
    for most in (file.stat().st_size - 1, size - 1):
        with (
            pytest.raises(BitNetError, match=r"m takes .* more than --max-memory allows"),
            running(None, sources=[loader.source("m")], max_memory=most),
        ):
            pass
    assert all(_is_closed(model) for model in loader.models)
    large = file.with_name("large.gguf")
    large.write_bytes(file.read_bytes() + bytes(64))
    sources = [loader.source("m"), Loader(large).source("large")]
    with running(None, sources=sources, max_memory=size + 63) as server:
        refused = server.chat(model="large")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_load_failed")
        assert len(server.state.pool.services()) <= 1
        assert server.chat(max_tokens=1).status_code == 200


def test_all_parts_of_a_split_model_take_memory(file: Path, running: Any) -> None:
    first, size = Path(shutil.copy(file, file.with_name("m-00001-of-00002.gguf"))), size_of(file)
    first.with_name("m-00002-of-00002.gguf").write_bytes(bytes(1000))
    loader = Loader(first)
    for most in (file.stat().st_size + 999, size + 999):
        with (
            pytest.raises(BitNetError, match=r"m takes .* more than --max-memory allows"),
            running(None, sources=[loader.source("m")], max_memory=most),
        ):
            pass
    with running(None, sources=[loader.source("m")], max_memory=size + 1000) as server:
        assert server.client.get("/api/ps").json()["models"][0]["size"] == size + 1000
        assert server.client.get("/api/tags").json()["models"][0]["size"] == file.stat().st_size + 1000


def _is_closed(model: Model) -> bool:
    return not model._finalizer.alive


@pytest.mark.nightly(unless_changed=HERE)
def test_models_take_turns_within_the_memory(file: Path, running: Any, scripted: Any) -> None:
    files = [Path(shutil.copy(file, file.with_name(f"{name}.gguf"))) for name in "abc"]
    engines: dict[str, Any] = {}

    def loader(name: str, path: Path) -> Loader:
        return Loader(path, lambda model: engines.update({name: scripted(model, f"I am {name}. " * 30)}))

    loaders = {name: loader(name, path) for name, path in zip("abc", files, strict=True)}
    sources = [found.source(name) for name, found in loaders.items()]
    with running(None, sources=sources, max_memory=int(size_of(file) * 2.5)) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

        def loaded() -> str:
            return "".join(m.id for m in client.models.list() if m.status["value"] == "loaded")  # type: ignore[attr-defined]

        def ask(name: str) -> str:
            messages: Any = [{"role": "user", "content": "who?"}]
            return str(client.chat.completions.create(model=name, messages=messages).choices[0].message.content)

        assert [model.id for model in client.models.list()] == ["a", "b", "c"]
        assert loaded() == "a"
        for name, here in (("b", "ab"), ("a", "ab"), ("c", "ac"), ("b", "bc"), ("c", "bc")):
            assert ask(name).startswith(f"I am {name}.")
            assert loaded() == here
        assert [len(found.models) for found in loaders.values()] == [1, 2, 1]
        assert _is_closed(loaders["a"].models[0])
        assert server.client.get("/api/ps").json()["models"][0]["name"] == "b"
        with pytest.raises(openai.NotFoundError, match="a, b, c are"):
            ask("d")
        # A model with requests stays, and the other waits for its memory.
        opened = threading.Event()
        for name in "bc":
            engines[name].advance = partial(held, opened, engines[name].advance)
        with ThreadPoolExecutor(3) as pool:
            busy = [pool.submit(ask, name) for name in "bc"]
            until(lambda: sum(service.users for service in server.state.pool.services()) == 2)
            late = pool.submit(ask, "a")
            time.sleep(0.2)
            assert loaded() == "bc"
            assert not late.done()
            opened.set()
            assert [b.result().count("I am") for b in busy] == [30, 30]
            assert late.result().startswith("I am a.")


def test_models_that_are_asked_for_together_keep_within_the_memory(file: Path, running: Any, scripted: Any) -> None:
    """Each is loaded where no other is left, and answers all that waited for it."""
    loaders: dict[str, Loader] = {}

    def prepare(model: Model) -> None:
        scripted(model, "fine")
        crowded.append([name for name, found in loaders.items() for other in found.models if not _is_closed(other)])

    crowded: list[list[str]] = []
    for name in "abc":
        copied = Path(shutil.copy(file, file.with_name(f"{name}.gguf")))
        loaders[name] = Loader(copied, prepare)
    sources = [found.source(name) for name, found in loaders.items()]
    with running(None, sources=sources, max_memory=size_of(file) + file.stat().st_size // 2) as server:
        with ThreadPoolExecutor(12) as pool:
            loaders["b"].gate.clear()  # so that the requests meet
            asked = [pool.submit(server.chat, model=name) for name in "bcbcabcabcba"]
            until(lambda: server.state.admission.present == 12)
            loaders["b"].gate.set()
            assert [answer.result().text.count('"fine"') for answer in asked] == [1] * 12
        assert len(server.state.pool.services()) == 1
    assert crowded == [[]] * len(crowded)


def test_who_waits_for_a_model_may_leave_and_runs_out_of_time(file: Path, running: Any, scripted: Any) -> None:
    """The model is loaded all the same, once."""
    loader = Loader(file, lambda model: scripted(model, "fine"))
    with running(None, sources=[Loader(file).source("a"), loader.source("b")], timeout=3) as server:
        loader.gate.clear()
        begin = time.monotonic()
        assert server.chat(model="b", stream=True).status_code == 504
        assert time.monotonic() - begin < 10
        body = json.dumps({**ASK, "model": "b"}).encode()
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
            connection.sendall(head % len(body) + body)
            until(lambda: server.state.pool.models[1].waiting == 1)
        until(lambda: server.state.admission.present == 0, 2)
        loader.gate.set()
        until(lambda: server.state.pool.models[1].loaded)
        assert server.chat(model="b").status_code == 200
        assert len(loader.models) == 1


def test_requests_wait_for_room_together(
    file: Path, running: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_pool, "ROOM_SECONDS", 2.0)
    engines: list[Any] = []
    loader = Loader(file, lambda model: engines.append(scripted(model, "fine")))
    other = Path(shutil.copy(file, file.with_name("other.gguf")))
    sources = [loader.source("a"), Loader(other, lambda model: scripted(model, "fine")).source("b")]
    with running(None, sources=sources, max_memory=size_of(file)) as server, ThreadPoolExecutor(4) as pool:
        opened = threading.Event()
        engines[0].advance = partial(held, opened, engines[0].advance)
        busy = pool.submit(server.chat, model="a")
        until(lambda: server.service.users == 1)
        begin = time.monotonic()
        late = [pool.submit(server.chat, model="b") for _ in range(3)]
        assert [answer.result().status_code for answer in late] == [503] * 3
        assert time.monotonic() - begin < 3 * 2.0  # as long as they would wait one by one
        assert "there is not enough memory" in late[0].result().text
        monkeypatch.setattr(model_pool, "ROOM_SECONDS", 60.0)
        late = [pool.submit(server.chat, model="b") for _ in range(3)]
        until(lambda: server.state.pool.models[1].waiting == 3)
        opened.set()
        assert [answer.result().status_code for answer in (busy, *late)] == [200] * 4


@pytest.mark.nightly(unless_changed=HERE)
def test_a_model_that_cannot_be_loaded_does_not_hurt_the_others(file: Path, running: Any) -> None:
    broken = file.with_name("broken.gguf")
    broken.write_bytes(b"GGUF" + bytes(100))
    with running(None, sources=[Loader(file).source("good"), Loader(broken).source("bad")]) as server:
        assert server.chat(model="bad").status_code == 503
        assert server.chat(model="bad").json()["error"]["code"] == "model_load_failed"
        assert server.chat(model="good", max_tokens=2).status_code == 200
        assert server.client.get("/health").status_code == 200
