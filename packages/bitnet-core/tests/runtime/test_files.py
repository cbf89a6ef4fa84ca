"""Files that are replaced: whole or not at all, whoever else writes them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bitnet.core.errors import BitNetError
from bitnet.core.support.files import (
    _remove_abandoned,
    files_below,
    free_space,
    length,
    lock,
    replacing,
    resolved,
)


def test_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")

    def give_up() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        give_up()
    assert path.read_text() == "old"
    link = tmp_path / "link"
    link.symlink_to(path)
    with replacing(link) as file:
        file.write(b"new")
    assert path.read_text() == "new"
    assert link.is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "x"]


@pytest.mark.parametrize("unnamed", [True, False])
def test_many_writers_of_one_name(tmp_path: Path, unnamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is one writer's, also where it comes while another is written; what is abandoned is removed."""
    if not unnamed:
        monkeypatch.setattr("bitnet.core.support.files._unnamed", lambda folder: None)
    path = tmp_path / "x"
    (tmp_path / ".x.0123abcd.tmp").write_text("of one that was killed")
    (tmp_path / ".x.name.tmp").write_text("somebody's")
    with replacing(path) as outer:
        outer.write(b"outer")
        with replacing(path) as inner:
            inner.write(b"inner")
        assert path.read_text() == "inner"
    assert path.read_text() == "outer"
    left = {p.name for p in tmp_path.iterdir()}
    assert left - {".x.0123abcd.tmp"} == {"x", ".x.name.tmp"}
    if not unnamed:
        assert ".x.0123abcd.tmp" not in left
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("name", ["absent/x", "file/x", "."])
def test_where_nothing_can_be_written(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BitNetError, match="cannot be written"), replacing(tmp_path / name) as file:
        file.write(b"x")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_the_length_of_a_file_that_comes_and_goes(tmp_path: Path) -> None:
    path, other = tmp_path / "x", tmp_path / "y"
    assert length(path) == 0
    path.write_bytes(b"12345")

    def rename() -> None:
        for _ in range(20_000):
            path.rename(other)
            other.rename(path)

    with ThreadPoolExecutor(1) as pool:
        renaming = pool.submit(rename)
        seen = {length(path)}
        while not renaming.done():
            seen.add(length(path))
    assert seen <= {0, 5}
    assert length(path) == 5


def test_a_new_file_is_not_taken_for_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where files have names from the beginning, another writer of the same one may come at each moment."""
    files = "bitnet.core.support.files"
    monkeypatch.setattr(f"{files}._unnamed", lambda folder: None)
    path, came = tmp_path / "x", 0

    def removing(call: Callable[..., Any]) -> Callable[..., Any]:
        def first(*args: Any) -> Any:
            nonlocal came
            if came < 20:
                came += 1
                _remove_abandoned(path)
            return call(*args)

        return first

    monkeypatch.setattr(f"{files}.lock", removing(lock))
    monkeypatch.setattr(Path, "replace", removing(Path.replace))
    for content in (b"one", b"two"):
        came = 19  # before it is locked, or before it takes its name
        with replacing(path) as file:
            file.write(content)
            came = 19
        assert path.read_bytes() == content
        assert came == 20
    assert [found.name for found in tmp_path.iterdir()] == ["x"]


def test_a_folder_that_is_read_while_it_is_removed(tmp_path: Path) -> None:
    made = [tmp_path / str(i) / "a" / "b.gguf" for i in range(40)]

    def change() -> None:
        for _ in range(6):
            for path in made:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
            for path in made:
                shutil.rmtree(path.parents[1])

    with ThreadPoolExecutor(1) as pool:
        changing = pool.submit(change)
        while not changing.done():
            assert set(files_below(tmp_path, ".gguf")) <= {*made}
        changing.result()
    assert files_below(tmp_path) == []
    assert files_below(tmp_path / "absent") == []
    made[3].parent.mkdir(parents=True)
    made[3].touch()
    (tmp_path / "z.gguf").symlink_to("nowhere")
    (tmp_path / "y").touch()
    assert files_below(tmp_path, ".gguf") == [made[3], tmp_path / "z.gguf"]
    assert files_below(tmp_path) == [made[3], tmp_path / "y", tmp_path / "z.gguf"]


def test_a_link_that_is_read_while_it_is_removed(tmp_path: Path) -> None:
    path, target = tmp_path / "link", tmp_path / "file"

    def change() -> None:
        for _ in range(400):
            path.symlink_to(target)
            path.unlink()

    with ThreadPoolExecutor(1) as pool:
        changing = pool.submit(change)
        while not changing.done():
            assert resolved(path) in (path, target)
        changing.result()


def test_free_space_beside_a_folder_that_goes(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    (tmp_path / "file").touch()

    def change() -> None:
        for _ in range(500):
            folder.mkdir(parents=True)
            folder.rmdir()
            folder.parent.rmdir()

    with ThreadPoolExecutor(1) as pool:
        changing = pool.submit(change)
        while not changing.done():
            assert free_space(folder) > 0
    assert free_space(tmp_path / "file" / "x") > 0
