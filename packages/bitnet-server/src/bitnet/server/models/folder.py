"""The models of a folder: GGUF files, also in parts, and folders as Hugging Face has them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from bitnet.core.gguf.split import model_bytes, part_paths, whole_name
from bitnet.core.hub.choice import is_model
from bitnet.core.model.convert import convert_model
from bitnet.core.support.cache import cache_folder
from bitnet.core.support.files import length
from bitnet.core.support.log import logger

MAX_DEPTH = 4
"""Maximum levels of folders within a models folder."""
MAX_MODELS = 10_000
"""Maximum models of a folder."""
CONFIG, WEIGHTS = "config.json", "*.safetensors"
"""Files of a Hugging Face folder."""


def models_in(folder: Path) -> dict[str, Path]:
    """The models in a folder and in its subfolders, sorted by name. A name is a path in the folder without ``.gguf``
    and without the numbers of a part; a split model has the path of its first part.

    Raises:
        OSError: The folder cannot be read.
    """
    found: dict[str, Path] = {}
    for path in _models(folder, 0, set()):
        inside = path.relative_to(folder)
        name = inside.as_posix() if path.is_dir() else whole_name(inside.with_suffix("").as_posix())
        if path == folder:
            name = path.absolute().name
        if name in found:  # "a.gguf" beside "A-00001-of-00002.gguf", or beside the folder "a"
            name = inside.as_posix()
        if name and name.isprintable():  # a name goes into headers and terminals
            found[name] = path
        if len(found) == MAX_MODELS:
            logger.warning("%s has more than %d models; the others are left out.", folder, MAX_MODELS)
            break
    return dict(sorted(found.items()))


def _models(folder: Path, depth: int, seen: set[tuple[int, int]]) -> Iterator[Path]:
    """The models below a folder, unless it has been seen: links may lead in circles."""
    try:
        info = folder.stat()
        if (place := (info.st_dev, info.st_ino)) in seen:
            return
        seen.add(place)
        with os.scandir(folder) as entries:
            here = sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda e: e.name)
    except OSError:
        if depth == 0:
            raise
        return  # a subfolder that vanished or is closed to us
    if is_weights_folder(folder):
        yield folder
    for entry in here:
        path = Path(entry.path)
        if entry.is_dir():
            if depth < MAX_DEPTH:
                yield from _models(path, depth + 1, seen)
        elif entry.is_file() and is_model(entry.name) and part_paths(path):
            yield path


def is_weights_folder(path: Path) -> bool:
    """Whether a path is a folder that ``bitnet convert`` might read."""
    return (path / CONFIG).is_file() and bool(_weights(path))


def _weights(path: Path) -> list[Path]:
    """The files of weights in a folder; none if it was removed meanwhile."""
    try:
        return list(path.glob(WEIGHTS))
    except OSError:
        return []


def stored_files(path: Path) -> list[Path]:
    """The files of a model: all parts, or the weights and texts of a Hugging Face folder."""
    if not path.is_dir():
        return part_paths(path)
    return sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))


def state_of(path: Path) -> tuple[int, ...] | None:
    """What differs when a model's files differ: their sizes and times; None: one is missing."""
    try:
        found = [file.stat() for file in stored_files(path)]
    except OSError:
        return None
    return tuple(value for stat in found for value in (stat.st_size, stat.st_mtime_ns, stat.st_ino)) or None


def stored_bytes(path: Path) -> int:
    """Bytes of a model's weights on the disk; those that are missing have none."""
    if not path.is_dir():
        return model_bytes(path)
    return sum(map(length, _weights(path)))


def gguf_of(path: Path) -> Path:
    """The GGUF file of a model. A Hugging Face folder is converted into bitnet's cache, once for each state of it;
    this takes as long as ``bitnet convert``.

    Raises:
        BitNetError: It cannot be converted.
    """
    if not path.is_dir():
        return path
    target = _converted(path)
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        earlier = [file for file in target.parent.glob("*.gguf") if file != target]
        logger.warning("converting %s to %s, once", path, target)
        convert_model(path, target, name=path.name)
        for file in earlier:
            file.unlink(missing_ok=True)
    return target


def readable_file(path: Path) -> Path | None:
    """The GGUF file of a model, if there is one already."""
    if not path.is_dir():
        return path
    target = _converted(path)
    return target if target.exists() else None


def _converted(path: Path) -> Path:
    place = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:16]
    state = hashlib.sha256(repr(state_of(path)).encode()).hexdigest()[:16]
    return cache_folder() / "converted" / f"{path.name}-{place}" / f"{state}.gguf"
