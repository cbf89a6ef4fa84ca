"""The contents of the hub's cache on this disk."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from bitnet.core.errors import BitNetError
from bitnet.core.gguf import GGUFFile
from bitnet.core.gguf.split import model_bytes, part_paths
from bitnet.core.hub.choice import RemoteFile, choose
from bitnet.core.hub.errors import HubNotInstalledError, ModelNotFoundError
from bitnet.core.hub.names import HubName
from bitnet.core.hub.remote import BRANCH, library
from bitnet.core.support.files import files_below, length, resolved

_COMMIT = re.compile(r"[0-9a-f]{40}")


def cache_folder() -> Path:
    """The cache: ``HF_HUB_CACHE``, else ``HF_HOME/hub``, else ``~/.cache/huggingface/hub``."""
    library()
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def model_folder(repo: str) -> Path:
    """A model's folder in the cache, whether or not it exists."""
    return cache_folder() / f"models--{repo.replace('/', '--')}"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A GGUF file in the cache, or all parts of a split model.

    Attributes:
        file: The path of the file, or of the first part, in the repository.
    """

    repo: str
    file: str
    size: int
    path: Path

    @property
    def family(self) -> str | None:
        """The architecture named in the file, such as ``bitnet-b1.58``; None: it cannot be read."""
        try:
            family = GGUFFile(self.path).metadata.get("general.architecture")
        except BitNetError:
            return None
        return family if isinstance(family, str) else None


def models() -> list[CachedModel]:
    """Every GGUF file in the cache, sorted by name, in all cached versions."""
    found = []
    for repo in repos():
        snapshots, seen = model_folder(repo) / "snapshots", set()
        for path in files_below(snapshots, ".gguf"):
            file = path.relative_to(snapshots).as_posix().partition("/")[2]
            if file and part_paths(path) and path.is_file() and (blob := resolved(path)) not in seen:
                seen.add(blob)
                found.append(CachedModel(repo, file, model_bytes(path), path))
    return found


def repos() -> list[str]:
    """Names of the models that have a folder in the cache, sorted. Reads only folder names, so it is quick."""
    try:
        folders = [path.name.split("--") for path in cache_folder().glob("models--*--*") if path.is_dir()]
    except HubNotInstalledError:
        return []
    return sorted(f"{parts[1]}/{parts[2]}" for parts in folders if len(parts) == 3)


def find(name: HubName) -> Path | None:
    """The cached file that a name refers to, chosen among the cached ones; None if there is none."""
    folder = snapshot(name.repo)
    if folder is None:
        return None
    paths = {path.relative_to(folder).as_posix(): path for path in files_below(folder, ".gguf") if path.is_file()}
    try:
        choice = choose(name, [RemoteFile(path, length(paths[path])) for path in sorted(paths)])
    except ModelNotFoundError:
        return None
    return None if choice is None else paths[choice.file.path]


def snapshot(repo: str) -> Path | None:
    """The folder with the files of a model's newest cached version; None if there is none."""
    folder = model_folder(repo)
    try:
        commit = (folder / "refs" / BRANCH).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    found = folder / "snapshots" / commit
    return found if _COMMIT.fullmatch(commit) and found.is_dir() else None
