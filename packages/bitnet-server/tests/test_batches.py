"""``/v1/files`` and ``/v1/batches`` with the official client: what is answered, kept, bounded, and taken up again."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from bitnet.core import Model
from bitnet.core.errors import BitNetError
from bitnet.server.batch import batch as record
from bitnet.server.batch import batches, rows, store

PATH: Any = "/v1/chat/completions"


def row(id: str, question: str = "What is 17 + 25?", **body: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 12, **body}
    return {"custom_id": id, "method": "POST", "url": PATH, "body": asked}


def lines(values: list[Any]) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def client_of(server: Any, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def upload(client: openai.OpenAI, values: list[Any] | bytes) -> str:
    content = values if isinstance(values, bytes) else lines(values)
    return client.files.create(file=("rows.jsonl", content), purpose="batch").id


def begin(client: openai.OpenAI, values: list[Any] | bytes, **more: Any) -> Any:
    fields: Any = {"endpoint": PATH, "completion_window": "24h", **more}
    return client.batches.create(input_file_id=upload(client, values), **fields)


def ended(client: openai.OpenAI, id: str, seconds: float = 60) -> Any:
    ends = time.monotonic() + seconds
    while (found := client.batches.retrieve(id)).status in record.RUNNING:
        assert time.monotonic() < ends, found
        time.sleep(0.02)
    return found


def completed(client: openai.OpenAI, id: str) -> int:
    counts = client.batches.retrieve(id).request_counts
    return 0 if counts is None else counts.completed


def answers(client: openai.OpenAI, id: str | None) -> dict[str, Any]:
    if id is None:
        return {}
    found = [json.loads(line) for line in client.files.content(id).text.splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found), "each row once"
    return {one["custom_id"]: one for one in found}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "files")


@pytest.fixture(scope="module")
def server(demo_model: Model, running: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with running(demo_model, names=("demo",), file_storage=str(tmp_path_factory.mktemp("files"))) as found:
        yield found


def test_each_row_gets_what_a_request_would(server: Any, demo_model: Model) -> None:
    client = client_of(server)
    sums = {str(n): (random.randrange(50), random.randrange(50)) for n in range(8)}
    asked = [row(id, f"What is {a} + {b}?") for id, (a, b) in sums.items()]
    asked += [row("wrong", top_p=7), row("other", model="gpt-anything"), row("named", model="demo")]
    made = begin(client, asked, metadata={"for": "a test"})
    assert made.status == "validating"
    done = ended(client, made.id)
    assert (done.status, done.errors, done.metadata) == ("completed", None, {"for": "a test"})
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (11, 9, 2)
    found, failed = answers(client, done.output_file_id), answers(client, done.error_file_id)
    assert {*found} == {*sums, "named"}
    for id, (a, b) in sums.items():
        want = demo_model.chat([{"role": "user", "content": f"What is {a} + {b}?"}], temperature=0, max_tokens=12)
        body = found[id]["response"]["body"]
        assert body["choices"][0]["message"]["content"] == want.text
        assert (found[id]["response"]["status_code"], found[id]["error"]) == (200, None)
    usage = [one["response"]["body"]["usage"] for one in found.values()]
    assert done.usage.input_tokens == sum(one["prompt_tokens"] for one in usage)
    assert done.usage.output_tokens == sum(one["completion_tokens"] for one in usage)
    codes = {id: one["response"]["status_code"] for id, one in failed.items()}
    assert codes == {"wrong": 400, "other": 404}
    assert client.files.retrieve(done.output_file_id).purpose == "batch_output"
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at < done.expires_at


def test_files_are_listed_read_and_deleted(demo_model: Model, running: Any, folder: str) -> None:
    with running(demo_model, file_storage=folder) as server:
        _check_files(server, folder)


def _check_files(server: Any, folder: str) -> None:
    client = client_of(server)
    contents = [lines([row(str(n)), row("é")]) for n in range(5)]
    ids = [upload(client, content) for content in contents]
    assert [one.id for one in client.files.list(limit=2)] == ids[::-1]  # the client asks for all pages
    assert [one.id for one in client.files.list(order="asc", purpose="batch")] == ids
    assert not list(client.files.list(purpose="batch_output"))
    assert client.files.content(ids[3]).content == contents[3]
    kept = client.files.create(
        file=("a.jsonl", b"{}"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 7200}
    )
    assert (kept.filename, kept.bytes, kept.expires_at) == ("a.jsonl", 2, kept.created_at + 7200)
    assert client.files.delete(ids[0]).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(ids[0])
    assert ids[0] not in {path.name for path in Path(folder).glob("*/*")}
    asked = server.client.get("/v1/files", params={"limit": "0"})
    assert (asked.status_code, asked.json()["error"]["param"]) == (400, "limit")
    assert server.client.get("/v1/files", params={"after": ids[0]}).status_code == 400


def test_to_other_keys_it_does_not_exist(demo_model: Model, running: Any, folder: str) -> None:
    with running(demo_model, api_keys=("one", "two"), file_storage=folder) as server:
        one, two = client_of(server, "one"), client_of(server, "two")
        made = begin(one, [row("1")])
        done = ended(one, made.id)
        assert [*two.files.list()] == [*two.batches.list()] == []
        for ask in (
            lambda: two.files.retrieve(made.input_file_id),
            lambda: two.files.delete(made.input_file_id),
            lambda: two.files.content(done.output_file_id),
            lambda: two.batches.retrieve(made.id),
            lambda: two.batches.cancel(made.id),
            lambda: two.batches.create(input_file_id=made.input_file_id, endpoint=PATH, completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError):
                ask()
        with pytest.raises(openai.AuthenticationError):
            client_of(server, "three").files.list()
        assert [b.id for b in one.batches.list()] == [made.id]


@pytest.mark.parametrize(
    ("content", "line", "why"),
    [
        (b"", None, "has no rows"),
        (lines([row("1"), row("1")]), 2, "the custom_id '1' of an earlier line"),
        (lines([row("1")]) + b"{\n", 2, "is not JSON"),
        (lines([row("1")]) + b"[" * 100_000, 2, "is not JSON"),
        (lines([row("1")]) + b"\xff\n", 2, "is not UTF-8"),
        (lines([row("1"), {**row("2"), "url": "/v1/completions"}]), 2, "the batch is for /v1/chat/completions"),
        (lines([row("1", stream=True)]), 1, "asks for a stream"),
        (lines([row("1", x=[{}] * 200_000)]), 1, "objects, lists and members that are allowed"),
    ],
)
def test_a_file_that_is_no_batch_fails_whole(server: Any, content: bytes, line: int | None, why: str) -> None:
    client = client_of(server)
    done = ended(client, begin(client, content).id)
    assert (done.status, done.output_file_id, done.error_file_id) == ("failed", None, None)
    (error,) = done.errors.data
    assert why in error.message
    assert error.line == line


def test_requests_that_are_none(server: Any) -> None:
    client = client_of(server)
    file = upload(client, [row("1")])
    for fields, field in (
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"x": "y" * 600}}, "metadata.'x'"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after[seconds]"),
    ):
        given: Any = {"input_file_id": file, "endpoint": PATH, "completion_window": "24h", **fields}
        with pytest.raises(openai.BadRequestError) as refused:
            client.batches.create(**given)
        assert refused.value.param == field
    purpose: Any = "fine-tune"
    with pytest.raises(openai.BadRequestError) as refused:
        client.files.create(file=("x", b"{}"), purpose=purpose)
    assert refused.value.param == "purpose"
    assert server.client.post("/v1/files", json={}).status_code == 415
    assert (
        server.client.post("/v1/files", data={"purpose": "batch"}, files={"x": b""}).json()["error"]["param"] == "file"
    )


def test_without_a_folder_there_are_neither(demo: Any) -> None:
    client = client_of(demo)
    with pytest.raises(openai.NotFoundError, match="--file-storage"):
        client.files.list()
    with pytest.raises(openai.NotFoundError, match="--file-storage"):
        client.batches.list()
    with pytest.raises(openai.NotFoundError, match="--file-storage"):
        upload(client, [row("1")])


def test_files_are_bounded(demo_model: Model, running: Any, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_FILE_BYTES", 30_000)
    with running(demo_model, file_storage=folder, max_file_storage=50_000) as server:
        client = client_of(server)
        for _ in range(3):  # what is refused is not counted
            with pytest.raises(openai.APIStatusError) as large:
                upload(client, b"x" * 30_001)
            assert large.value.status_code == 413
        first = upload(client, b"x" * 30_000)
        with pytest.raises(openai.InternalServerError) as full:
            upload(client, b"x" * 20_001)
        assert (full.value.status_code, full.value.code) == (507, "file_storage_full")
        client.files.delete(first)
        done = ended(client, begin(client, [row(str(n), max_tokens=1) for n in range(100)]).id)
        assert (done.status, done.errors.data[0].code) == ("failed", "file_storage_full")
        assert 0 < len(answers(client, done.output_file_id)) < 100
    assert sum(path.stat().st_size for path in contents(folder)) <= 50_000


class Held:
    """A model that answers only as often as it is let."""

    def __init__(self, model: Model, scripted: Any) -> None:
        self.asked, self.places = 0, threading.Semaphore(0)

        def script(prompt: str) -> str:
            self.asked += 1
            self.places.acquire(timeout=30)
            return "yes"

        self.engine: Any = scripted(model, script)


def contents(folder: str) -> list[Path]:
    """The contents of all files, without their descriptions."""
    return [path for path in Path(folder).glob("*/file-*") if path.suffix != ".json"]


def until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_a_batch_that_is_cancelled_keeps_its_answers(
    script_model: Model, running: Any, scripted: Any, folder: str
) -> None:
    held = Held(script_model, scripted)
    with running(script_model, file_storage=folder) as server:
        client = client_of(server)
        made, second = begin(client, [row(str(n)) for n in range(50)]), begin(client, [row("1")])
        held.places.release(10)
        until(lambda: completed(client, made.id) >= 6)
        with pytest.raises(openai.ConflictError):
            client.files.delete(made.input_file_id)
        assert client.batches.cancel(made.id).status == "cancelling"
        held.places.release(200)
        done = ended(client, made.id)
        assert done.status == "cancelled"
        assert done.cancelling_at <= done.cancelled_at
        assert 6 <= len(answers(client, done.output_file_id)) == done.request_counts.completed < 50
        with pytest.raises(openai.ConflictError):
            client.batches.cancel(made.id)
        assert ended(client, second.id).status == "completed"
        client.files.delete(made.input_file_id)


def test_a_batch_that_takes_too_long_expires(
    script_model: Model, running: Any, scripted: Any, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(script_model, scripted)
    with running(script_model, file_storage=folder) as server:
        client = client_of(server)
        monkeypatch.setattr(record, "WINDOW_SECONDS", 1)
        made = begin(client, [row(str(n)) for n in range(20)])
        held.places.release(5)
        threading.Timer(1.2, lambda: held.places.release(100)).start()
        done = ended(client, made.id)
        assert (done.status, done.request_counts.total) == ("expired", 20)
        found, left = answers(client, done.output_file_id), answers(client, done.error_file_id)
        assert len(found) + len(left) == 20
        assert {one["error"]["code"] for one in left.values()} == {"batch_expired"}
        assert all(one["response"] is None for one in left.values())


def test_a_server_goes_on_with_what_another_has_begun(
    script_model: Model, running: Any, scripted: Any, folder: str
) -> None:
    """Each row once, with one answer cut short; content that did not arrive whole is gone."""
    held = Held(script_model, scripted)
    with running(script_model, file_storage=folder) as server:
        client = client_of(server)
        made = begin(
            client, [row(str(n)) for n in range(30)], output_expires_after={"anchor": "created_at", "seconds": 3600}
        )
        held.places.release(12)
        until(lambda: completed(client, made.id) >= 8)
        with pytest.raises(BitNetError, match="another server keeps its files in"):
            store.Store(Path(folder), 10**9)
        threading.Timer(0.2, lambda: held.places.release(4)).start()  # the server ends meanwhile
    (output,) = (path for path in contents(folder) if b"batch_req_" in path.read_bytes())
    whole = output.read_bytes().splitlines(keepends=True)
    assert 8 <= len(whole) < 30
    output.write_bytes(b"".join(whole[:-1]) + whole[-1][:40])
    (output.parent / "file-0123").write_bytes(b"x" * 1000)
    before = held.asked
    with running(script_model, file_storage=folder) as server:
        held.places.release(100)
        client = client_of(server)
        done = ended(client, made.id)
        assert (done.status, done.request_counts.completed) == ("completed", 30)
        found = answers(client, done.output_file_id)
        assert {*found} == {str(n) for n in range(30)}
        kept = client.files.retrieve(done.output_file_id)
        assert kept.expires_at == kept.created_at + 3600
        assert (
            client.files.content(done.output_file_id).content.splitlines(keepends=True)[: len(whole) - 1] == whole[:-1]
        )
        assert held.asked - before < 30
        assert not (output.parent / "file-0123").exists()
        assert server.state.files.used == sum(path.stat().st_size for path in contents(folder))


def test_rows_take_only_places_that_no_client_has(
    script_model: Model, running: Any, scripted: Any, folder: str
) -> None:
    held = Held(script_model, scripted)
    with running(script_model, file_storage=folder) as server:
        client, answered = client_of(server), []
        asking = [
            threading.Thread(target=lambda: answered.append(server.chat(max_tokens=3).status_code)) for _ in range(4)
        ]
        for thread in asking:
            thread.start()
        until(lambda: server.state.admission.present == 4)
        made = begin(client, [row(str(n)) for n in range(3)])
        until(lambda: client.batches.retrieve(made.id).status == "in_progress")
        time.sleep(10 * batches.LOOK_SECONDS)
        assert server.state.admission.present == 4
        held.places.release(100)
        assert ended(client, made.id).request_counts.completed == 3
        for thread in asking:
            thread.join(20)
        assert answered == [200] * 4


def test_a_row_that_fails_in_the_server_is_asked_again(
    script_model: Model, running: Any, scripted: Any, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "PAUSE_SECONDS", 0.01)
    failures: list[int] = []
    engine: Any = scripted(script_model, "yes")
    with running(script_model, file_storage=folder) as server:
        ask = server.state.batches._ask

        async def failing(path: str, body: Any, owner: bytes) -> Any:
            if len(failures) < 2:
                failures.append(1)
                return 503, {"error": {"message": "lost", "code": "device_error"}}
            return await ask(path, body, owner)

        server.state.batches._ask = failing
        client = client_of(server)
        done = ended(client, begin(client, [row("1")]).id)
        assert (done.request_counts.completed, len(failures)) == (1, 2)
    assert engine.prompts


def test_more_rows_than_a_batch_may_have(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MAX_ROWS", 3)
    client = client_of(server)
    done = ended(client, begin(client, [row(str(n)) for n in range(4)]).id)
    assert "more than 3 rows" in done.errors.data[0].message
    assert rows.MAX_ROWS == 50_000
