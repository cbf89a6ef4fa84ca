"""The folders of a server's models, read while other processes write and remove what is in them."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bitnet.server.api.ollama_models import _modified
from bitnet.server.models.catalog import Catalog
from bitnet.server.models.folder import CONFIG, stored_bytes

TIMES = 30
CONTENT = bytes(40)


def test_models_come_and_go_while_they_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    folder, repo = tmp_path / "models", tmp_path / "hub" / "models--org--name"
    weights = [folder / f"w{i}" / name for i in range(9) for name in (CONFIG, "m.safetensors")]
    cached = [repo / "snapshots" / ("0" * 40) / str(i) / "m-i2_s.gguf" for i in range(9)]
    folder.mkdir()

    def write() -> None:
        for path in (folder / "a.gguf", *weights, *cached):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(CONTENT)
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text("0" * 40)

    def change() -> None:
        for _ in range(TIMES):
            write()
            (folder / "a.gguf").unlink()
            for path in (*folder.iterdir(), repo):
                shutil.rmtree(path)

    catalog = Catalog(folder, lambda *_: pytest.fail("nothing is loaded"))
    with ThreadPoolExecutor(1) as pool:
        changing = pool.submit(change)
        while not changing.done():
            for source in catalog.sources():
                assert stored_bytes(source.path) <= len(CONTENT)
                _modified(source.path)
        changing.result()
    assert catalog.sources() == []
    write()
    assert [stored_bytes(source.path) for source in catalog.sources()] == [len(CONTENT)] * 19


def test_a_path_that_goes_between_two_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, exists, is_file = tmp_path / "a.gguf", Path.exists, Path.is_file

    def gone(look: object) -> object:
        def looked(looked_at: Path) -> bool:
            found = bool(look(looked_at))  # type: ignore[operator]
            path.unlink(missing_ok=True)
            return found

        return looked

    monkeypatch.setattr(Path, "exists", gone(exists))
    monkeypatch.setattr(Path, "is_file", gone(is_file))
    path.write_bytes(CONTENT)
    assert _modified(path) >= "2"  # the year
    path.unlink(missing_ok=True)
    assert _modified(path) == "1970-01-01T00:00:00Z"
    path.write_bytes(CONTENT)
    assert stored_bytes(path) == len(CONTENT)
