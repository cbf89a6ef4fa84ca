"""Models in an object store: a store of this machine, moto's, holds them."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bitnet.core import load_model
from bitnet.core.cli.inspect import inspect
from bitnet.core.errors import InvalidInputError
from bitnet.core.hub import local_path, object_store
from bitnet.core.hub.object_store import ObjectStoreError, locate
from bitnet.core.model.default import default_model_path

pytest.importorskip("obstore", reason="obstore is not installed (the group `object-store`)")
boto3 = pytest.importorskip("boto3", reason="boto3 is not installed (the group `object-store`)")
moto_server = pytest.importorskip("moto.server", reason="moto is not installed (the group `object-store`)")

BUCKET = "models"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def store(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of the store, whose bucket is there; bitnet's cache is empty."""
    for name, value in (
        ("AWS_ENDPOINT_URL", endpoint),
        ("AWS_ACCESS_KEY_ID", "somebody"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
        ("BITNET_CACHE_DIR", str(tmp_path / "cache")),
    ):
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket=BUCKET)
    return client


def put(store: Any, key: str, content: bytes) -> str:
    store.put_object(Bucket=BUCKET, Key=key, Body=content)
    return f"s3://{BUCKET}/{key}"


def test_a_model_of_a_store_is_loaded(store: Any) -> None:
    address = put(store, "some where/demo.gguf", default_model_path().read_bytes())
    with load_model(address, device="cpu", threads=1, context=128) as model:
        assert model.path.name == "demo.gguf"
        assert model.path.read_bytes() == default_model_path().read_bytes()


def test_an_object_is_downloaded_once_for_each_of_its_states(store: Any) -> None:
    messages: list[str] = []
    address = put(store, "a.gguf", first := os.urandom(3_000_000))
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: locate(address, tell=messages.append), range(8)))
    assert len(messages) == 1
    assert address in messages[0]
    (path,) = paths
    assert path.read_bytes() == first
    put(store, "a.gguf", second := os.urandom(2_000_000))
    assert locate(address, tell=messages.append).read_bytes() == second
    assert len(messages) == 2
    assert path.read_bytes() == first  # a model that is in use stays as it is


def test_the_parts_of_a_split_model_come_together(store: Any) -> None:
    contents = [os.urandom(1000 + i) for i in range(3)]
    for number, content in enumerate(contents, 1):
        put(store, f"m-{number:05d}-of-00003.gguf", content)
    first = local_path(f"s3://{BUCKET}/m-00001-of-00003.gguf")
    found = [first.with_name(f"m-{number:05d}-of-00003.gguf").read_bytes() for number in (1, 2, 3)]
    assert found == contents
    store.delete_object(Bucket=BUCKET, Key="m-00002-of-00003.gguf")
    with pytest.raises(ObjectStoreError, match=r"There is no object at .*m-00002"):
        local_path(f"s3://{BUCKET}/m-00001-of-00003.gguf")


def test_a_download_that_broke_off_goes_on(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    content = rng.randbytes(2_000_000)
    address = put(store, "b.gguf", content)
    folder = locate(address, tell=lambda line: None).parent
    (folder / "b.gguf").unlink()
    have = rng.randrange(len(content) + 1)
    poisoned = bytes(255 - byte for byte in content[:have])  # what is there is not asked for again
    (folder / "b.gguf.incomplete").write_bytes(poisoned)
    assert locate(address, tell=lambda line: None).read_bytes() == poisoned + content[have:], seed


def test_an_unfinished_file_that_is_too_long_is_removed(store: Any) -> None:
    address = put(store, "c.gguf", os.urandom(1000))
    folder = locate(address, tell=lambda line: None).parent
    (folder / "c.gguf").rename(folder / "c.gguf.incomplete")
    with (folder / "c.gguf.incomplete").open("ab") as file:
        file.write(b"more")
    with pytest.raises(ObjectStoreError, match=r"has 1,000 bytes, but 1,004 came"):
        locate(address, tell=lambda line: None)
    assert (folder / "c.gguf").exists() is False
    assert locate(address, tell=lambda line: None).stat().st_size == 1000


@pytest.mark.parametrize(
    "wrong", ["s3://", "s3://bucket", "s3://bucket/", "s3:///key", "gs://bucket/folder/", "s3://b/a\n"]
)
def test_what_is_no_address(wrong: str) -> None:
    with pytest.raises(InvalidInputError, match="is no address of an object"):
        locate(wrong, tell=print)


def test_a_later_part_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="later part"):
        locate("s3://bucket/m-00002-of-00003.gguf", tell=print)


def test_errors_are_one_line(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ends with status 4 and one line, whatever the store says; nothing is left in the cache."""

    def said(address: str) -> str:
        done = CliRunner().invoke(inspect, [address])
        error = done.exception
        assert isinstance(error, ObjectStoreError), (done.output, error)
        assert error.exit_code == 4
        assert "\n" not in error.message
        return error.message

    assert "There is no object at 's3://models/missing.gguf'" in said("s3://models/missing.gguf")
    assert "There is no object at 's3://nowhere/a.gguf'" in said("s3://nowhere/a.gguf")
    address = put(store, "d.gguf", os.urandom(1000))
    monkeypatch.setattr(object_store, "free_space", lambda folder: 999)
    assert "needs 1 kB; 999 B are free" in said(address)
    monkeypatch.setattr(object_store, "RETRIES", 0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert "'s3://models/d.gguf' cannot be read: " in said(address)
    cache = Path(os.environ["BITNET_CACHE_DIR"])
    assert [file for file in cache.rglob("*") if file.is_file() and file.name != ".lock"] == []


def test_without_obstore_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore.store", None)
    with pytest.raises(ObjectStoreError) as caught:
        locate("s3://bucket/model.gguf", tell=print)
    assert 'pip install "bitnet-core[object-store]"' in str(caught.value)


def test_downloads_of_two_threads_do_not_mix(store: Any) -> None:
    contents = {put(store, f"{i}.gguf", data): data for i, data in enumerate(os.urandom(500_000) for _ in range(4))}
    found: dict[str, bytes] = {}

    def read(address: str) -> None:
        found[address] = locate(address, tell=lambda line: None).read_bytes()

    threads = [threading.Thread(target=read, args=(address,)) for address in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == contents
