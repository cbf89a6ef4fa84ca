"""Downloads from the hub: whole and checked, resumed, refused; against a server that speaks its protocol."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bitnet.core.errors import InvalidInputError
from bitnet.core.hub import remote
from bitnet.core.hub.download import fetch
from bitnet.core.hub.errors import (
    ConversionNeededError,
    DiskFullError,
    DownloadInterruptedError,
    GatedModelError,
    HubUnreachableError,
    ModelNotFoundError,
    NotInCacheError,
    WrongHashError,
)
from bitnet.core.hub.names import parse
from bitnet.core.hub.pull import locate
from bitnet.core.hub.remote import listing

if TYPE_CHECKING:
    from .conftest import Hub, Repo

NAME = "some-org/some.Model_1"
FILE = "model-i2_s.gguf"


@pytest.fixture
def data(hub: Hub, make_repo: Callable[..., Repo]) -> bytes:
    """Random bytes, which the hub has as FILE."""
    data = os.urandom(300_000)
    hub.repos[NAME] = make_repo({FILE: data, "README.md": b"text", "empty.json": b""})
    return data


def no_files(cache: Path) -> bool:
    """Whether nothing in the cache passes for a model."""
    return not [path for path in cache.rglob("*") if path.is_file() and path.suffix not in (".lock", ".incomplete")]


def test_a_file_arrives_whole_where_the_library_finds_it(hub: Hub, data: bytes, cache: Path) -> None:
    from huggingface_hub import try_to_load_from_cache

    path = locate(parse(NAME))
    assert path.read_bytes() == data
    assert try_to_load_from_cache(NAME, FILE) == str(path)
    assert [p.name for p in (cache / "models--some-org--some.Model_1" / "blobs").iterdir()] == [
        hashlib.sha256(data).hexdigest()
    ]
    asked = len(hub.asked)
    assert locate(parse(NAME)) == path
    assert len(hub.asked) == asked, "what is in the cache needs no network"
    assert locate(parse(NAME), update=True) == path
    assert len(hub.transfers()) == 1


def test_two_that_fetch_one_file_fetch_it_once(hub: Hub, data: bytes) -> None:
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(locate, [parse(NAME), parse(f"{NAME}:i2_s")]))
    assert [path.read_bytes() for path in paths] == [data, data]
    assert len(hub.transfers()) == 1


def test_an_empty_file_is_one_too(hub: Hub, data: bytes) -> None:
    there = listing(NAME)
    assert hub.repos[NAME].files["empty.json"] == b""
    (path,) = fetch(there, [file for file in there.files if file.path == "empty.json"])
    assert path.read_bytes() == b""


def test_a_connection_that_is_cut_goes_on_by_range(hub: Hub, data: bytes) -> None:
    hub.cuts = [100_000, 50_000]
    assert locate(parse(NAME)).read_bytes() == data
    assert hub.transfers() == [None, "bytes=100000-", "bytes=150000-"]


def test_the_next_command_goes_on_where_the_last_broke_off(hub: Hub, data: bytes, cache: Path) -> None:
    hub.cuts = [100_000] + [0] * 20
    with pytest.raises(DownloadInterruptedError, match="100 kB of 300 kB") as raised:
        locate(parse(NAME))
    assert "to resume" in str(raised.value)
    assert no_files(cache)
    hub.cuts, hub.asked = [], []
    assert locate(parse(NAME)).read_bytes() == data
    assert hub.transfers() == ["bytes=100000-"]


def test_a_file_that_is_shorter_than_the_hub_says(hub: Hub, data: bytes, cache: Path) -> None:
    hub.repos[NAME].claimed[FILE] = len(data) + 10
    with pytest.raises(DownloadInterruptedError, match="sends no more data"):
        locate(parse(NAME))
    assert no_files(cache)


def test_a_file_that_is_longer_than_the_hub_says(hub: Hub, data: bytes, cache: Path) -> None:
    hub.repos[NAME].claimed[FILE] = 1000
    with pytest.raises(WrongHashError):
        locate(parse(NAME))
    assert no_files(cache)


def test_a_server_without_ranges_sends_all_again(hub: Hub, data: bytes) -> None:
    hub.cuts, hub.ranges = [100_000], False
    assert locate(parse(NAME)).read_bytes() == data


@pytest.mark.parametrize("resumed", [False, True])
def test_a_changed_byte_is_found(hub: Hub, data: bytes, cache: Path, resumed: bool) -> None:
    hub.flip, hub.cuts = int.from_bytes(os.urandom(4), "little") % len(data), [100_000] if resumed else []
    print(f"byte {hub.flip}")
    with pytest.raises(WrongHashError, match="does not match the hub's"):
        locate(parse(NAME))
    assert no_files(cache)
    assert not list(cache.rglob("*.incomplete"))
    hub.flip = None
    assert locate(parse(NAME)).read_bytes() == data


def test_a_partial_file_of_other_bytes_is_found(hub: Hub, data: bytes, cache: Path) -> None:
    blobs = cache / "models--some-org--some.Model_1" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(data).hexdigest()}.incomplete").write_bytes(os.urandom(1000))
    with pytest.raises(WrongHashError):
        locate(parse(NAME))
    assert locate(parse(NAME)).read_bytes() == data


def test_a_gated_model_needs_a_token(hub: Hub, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos[NAME].gated = True
    with pytest.raises(GatedModelError) as raised:
        locate(parse(NAME))
    assert f"{hub.url}/{NAME}" in str(raised.value)
    assert "HF_TOKEN" in str(raised.value)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(GatedModelError, match="may not read"):
        locate(parse(NAME))
    monkeypatch.setenv("HF_TOKEN", "hf_revoked")
    with pytest.raises(GatedModelError, match="rejects the token"):
        locate(parse(NAME))
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert locate(parse(NAME)).read_bytes() == data  # and the host of its bytes has refused no token


def test_what_is_not_there(hub: Hub, data: bytes) -> None:
    with pytest.raises(ModelNotFoundError, match="has no nobody/nothing"):
        locate(parse("nobody/nothing"))
    with pytest.raises(ModelNotFoundError, match=FILE):
        locate(parse(f"{NAME}:other.gguf"))


def test_a_hub_that_does_not_answer(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(HubUnreachableError, match="does not answer"):
        locate(parse(NAME))


def test_an_empty_endpoint_is_none_and_a_bad_one_is_named(
    hub: Hub, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    for bad in ("bogus", "ftp://a.example", "https://"):
        monkeypatch.setattr(constants, "ENDPOINT", bad)
        with pytest.raises(InvalidInputError, match=f"HF_ENDPOINT is '{bad}'; it must be an address such as https://"):
            locate(parse(NAME))
    monkeypatch.setattr(constants, "ENDPOINT", "")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "/{repo_id}/resolve/{revision}/{filename}")
    assert remote.DEFAULT_HOST == constants._HF_DEFAULT_ENDPOINT
    monkeypatch.setattr(remote, "DEFAULT_HOST", hub.url)
    assert locate(parse(NAME)).read_bytes() == data


def test_offline_only_the_cache_counts(hub: Hub, data: bytes, offline: Callable[[], None]) -> None:
    path = locate(parse(NAME))
    offline()
    hub.asked = []
    assert locate(parse(NAME), update=True) == path
    with pytest.raises(NotInCacheError, match="HF_HUB_OFFLINE"):
        locate(parse("some-org/other"))
    with pytest.raises(NotInCacheError):
        locate(parse(f"{NAME}:f16"))
    assert not hub.asked


def test_room_is_asked_for_first(hub: Hub, data: bytes, cache: Path) -> None:
    hub.repos[NAME].claimed[FILE] = 10**17
    with pytest.raises(DiskFullError, match="1e\\+05 TB"):
        locate(parse(NAME))
    assert not hub.transfers()
    assert no_files(cache)


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_a_disk_that_fills_up_meanwhile(hub: Hub, data: bytes, cache: Path) -> None:
    blobs = cache / "models--some-org--some.Model_1" / "blobs"
    blobs.mkdir(parents=True)
    partial = blobs / f"{hashlib.sha256(data).hexdigest()}.incomplete"
    partial.symlink_to("/dev/full")
    with pytest.raises(DiskFullError, match="disk is full"):
        locate(parse(NAME))
    assert not partial.is_symlink()
    assert locate(parse(NAME)).read_bytes() == data


def test_a_newer_commit_is_fetched_when_asked_for(hub: Hub, data: bytes, make_repo: Callable[..., Repo]) -> None:
    old, newer = locate(parse(NAME)), os.urandom(1000)
    hub.repos[NAME] = make_repo({FILE: newer}, commit="f" * 40)
    assert locate(parse(NAME)) == old
    assert locate(parse(NAME), update=True).read_bytes() == newer
    assert locate(parse(NAME)).read_bytes() == newer


def test_only_safetensors(hub: Hub, make_repo: Callable[..., Repo]) -> None:
    hub.repos[NAME] = make_repo({"model.safetensors": bytes(2000), "config.json": b"{}"})
    with pytest.raises(ConversionNeededError, match="2 kB") as raised:
        locate(parse(NAME))
    assert f"bitnet convert hf:{NAME} some.Model_1.gguf" in str(raised.value)
