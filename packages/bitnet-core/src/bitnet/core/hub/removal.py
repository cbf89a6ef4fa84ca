"""Removes models from the hub's cache, except data shared with other models."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitnet.core.errors import BitNetError
from bitnet.core.gguf.split import part_name
from bitnet.core.hub.cached import model_folder
from bitnet.core.hub.choice import encoding
from bitnet.core.hub.errors import NotInCacheError
from bitnet.core.hub.names import HubName
from bitnet.core.hub.remote import library
from bitnet.core.support.files import files_below, length


@dataclass(frozen=True, slots=True)
class Removal:
    """A planned removal.

    Attributes:
        files: Paths in the model's repository, in order.
        size: Bytes that will be freed.
        execute: Removes the files; raises BitNetError if any remains.
    """

    files: tuple[str, ...]
    size: int
    execute: Callable[[], None]


def plan(name: HubName) -> Removal:
    """Plan the removal of a model, or of one of its files, with all its parts, in all versions. Nothing is removed yet.

    Raises:
        NotInCacheError: The cache has no such model or file.
    """
    folder = model_folder(name.repo)
    if not folder.is_dir():
        raise _missing(name)
    return _plan_model(folder) if name.file is None else _plan_file(name, folder)


def _plan_model(folder: Path) -> Removal:
    """Plan the removal of a model's folder. The library would remove by commit, which copies of a model share."""

    def remove() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(folder.parent / ".locks" / folder.name, ignore_errors=True)
        _check_gone(folder)

    snapshots = folder / "snapshots"
    files = {path.relative_to(snapshots).as_posix().partition("/")[2] for path in files_below(snapshots)}
    taken = sum(length(path) for path in files_below(folder) if not path.is_symlink())
    return Removal(tuple(sorted(files - {""})), taken, remove)


def _plan_file(name: HubName, folder: Path) -> Removal:
    scan = library().scan_cache_dir(folder.parent)
    revisions = [revision for repo in scan.repos if repo.repo_path == folder for revision in repo.revisions]
    files = [(_within(rev, file), file) for rev in revisions for file in rev.files]
    named = part_name(str(name.file))
    parts = [str(name.file)] if named is None else [named.at(i + 1) for i in range(named.parts)]
    chosen = [(path, file) for path, file in files if path in parts]
    chosen = chosen or [(path, file) for path, file in files if encoding(path) == str(name.file).lower()]
    if not chosen:
        raise _missing(name)
    strategy = scan.delete_files(*(file for _, file in chosen))

    def remove() -> None:
        strategy.execute()
        for _, file in chosen:
            _check_gone(file.file_path)

    return Removal(tuple(sorted({path for path, _ in chosen})), strategy.expected_freed_size, remove)


def _within(revision: Any, file: Any) -> str:
    return str(file.file_path.relative_to(revision.snapshot_path).as_posix())


def _check_gone(path: Path) -> None:
    if path.is_symlink() or path.exists():
        raise BitNetError(
            f"{path} cannot be removed.", hint="Check whether the model is in use, and who owns the folder."
        )


def _missing(name: HubName) -> NotInCacheError:
    return NotInCacheError(f"{name} is not in the cache.", hint="List the cached models: bitnet list.")
