"""The hub's cache, read while other processes download into it and remove from it."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from bitnet.core.hub import cached, download
from bitnet.core.hub.choice import RemoteFile
from bitnet.core.hub.errors import NotInCacheError
from bitnet.core.hub.names import parse
from bitnet.core.hub.removal import plan
from bitnet.core.support.files import length

NAME, COMMIT = "some-org/model", "0123456789abcdef0123456789abcdef01234567"
TIMES = 60


def fill(folder: Path) -> None:
    """What downloads of two files leave."""
    for name in ("a-i2_s.gguf", "sub/b-i2_s.gguf"):
        blob, pointer = folder / "blobs" / Path(name).name, folder / "snapshots" / COMMIT / name
        for path in (blob, pointer):
            path.parent.mkdir(parents=True, exist_ok=True)
        blob.with_suffix(".incomplete").write_bytes(bytes(100))
        blob.with_suffix(".incomplete").rename(blob)
        pointer.symlink_to(blob)
    download._name_commit(folder, COMMIT)


def test_the_cache_is_read_while_it_is_removed(cache: Path) -> None:
    """Models come and go; what is found has its size, or none where it has just gone."""
    folder, other = cached.model_folder(NAME), cached.model_folder("other/model")
    fill(other)

    def change() -> None:
        for _ in range(TIMES):
            fill(folder)
            shutil.rmtree(folder)

    with ThreadPoolExecutor(1) as pool:
        changing = pool.submit(change)
        for turn in itertools.count():
            if turn > 3 and changing.done():
                break
            found = cached.models()
            assert [one.size for one in found if one.repo == "other/model"] == [100, 100]
            assert {one.size for one in found} <= {0, 100}
            cached.find(parse(NAME))
            with suppress(NotInCacheError):
                assert plan(parse(NAME)).size <= 440
        changing.result()
    assert plan(parse("other/model")).size == 240
    assert plan(parse("other/model")).files == ("a-i2_s.gguf", "sub/b-i2_s.gguf")


def test_a_model_is_in_the_cache_while_it_is_pulled_again(cache: Path) -> None:
    """Each pull names the commit, which others read at any time."""
    folder = cached.model_folder(NAME)
    fill(folder)

    def name() -> None:
        for _ in range(TIMES):
            download._name_commit(folder, COMMIT)

    with ThreadPoolExecutor(1) as pool:
        naming = pool.submit(name)
        while not naming.done():
            assert cached.snapshot(NAME) == folder / "snapshots" / COMMIT


def test_what_another_process_completes_needs_no_room(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one names the file between this one's two looks."""
    folder = cached.model_folder(NAME)
    file = RemoteFile("a.gguf", 10**15, "0" * 64)
    blob = folder / "blobs" / str(file.sha256)
    blob.parent.mkdir(parents=True)

    def completing(look: Callable[[Path], object]) -> Callable[[Path], object]:
        def looked(path: Path) -> object:
            found = look(path)
            blob.touch()
            return found

        return looked

    with monkeypatch.context() as patch:
        patch.setattr(download, "length", completing(length))
        patch.setattr(Path, "exists", completing(Path.exists))
        download._check_room(folder, [file])
    assert blob.exists()
