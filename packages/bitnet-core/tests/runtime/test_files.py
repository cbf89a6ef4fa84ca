"""Files that are replaced: whole or not at all, whoever else writes them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bitnet.core.errors import BitNetError
from bitnet.core.support.files import length, replacing


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
