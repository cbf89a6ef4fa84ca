"""Chooses a file of a repository by names and sizes.

Devices compute with I2_S, so files of other ternary encodings are transcoded when read. Float files are rounded when
read: they give the same model from many times the bytes. Of files with the same encoding, the smallest is chosen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bitnet.core.errors import InvalidInputError
from bitnet.core.gguf.split import PartName, part_name
from bitnet.core.hub.errors import ModelNotFoundError
from bitnet.core.hub.names import HubName
from bitnet.core.support import system

REASONS = {
    "i2_s": "I2_S is what devices compute with",
    "tq2_0": "TQ2_0 is ternary, and read into I2_S",
    "tq1_0": "TQ1_0 is ternary, and read into I2_S",
    "q2_0": "Q2_0 is ternary with a scale for each group",
    "q2_0_g128": "Q2_0 is ternary with a scale for each group",
    "pq2_0": "PQ2_0 is ternary with a scale for each group",
    "ptq1_0": "PTQ1_0 is ternary with a scale for each group",
    "stq1_0": "STQ1_0 is ternary with a scale for each group",
    "q1_0": "Q1_0 has weights of 1 and -1, with a scale for each group",
    "": "its name does not say the encoding",
    "bf16": "its floats are rounded to ternary weights when they are read",
    "f16": "its floats are rounded to ternary weights when they are read",
    "f32": "its floats are rounded to ternary weights when they are read",
}
"""Supported encodings, best first, as spelled in file names, with the reason for choosing each."""
_FLOATS = ("bf16", "f16", "f32")
_RANK = {encoding: rank for rank, encoding in enumerate(REASONS)}
_ENCODING = re.compile(r"(?<![a-z0-9])(i2_s|bf16|f16|f32|tl[12]|(?:p?tq|stq|iq|p?q)[1-8](?:_[a-z0-9]+)*)(?![a-z0-9])")
_DETAIL = re.compile(r"_[gv]\d+$")
"""A group size or a version after an encoding's name."""
_NO_MODEL = re.compile(r"(?<![a-z])(mmproj|imatrix)(?![a-z])")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository.

    Attributes:
        path: Its path in the repository.
        size: Size in bytes.
        sha256: Hash of its content, in hex; None if git itself stores the file.
        git_sha1: Name of its git blob, in hex; None if unknown.
        others: The other parts, if it is the first part of a split model.
    """

    path: str
    size: int
    sha256: str | None = None
    git_sha1: str | None = None
    others: tuple[RemoteFile, ...] = ()

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return self.size + sum(part.size for part in self.others)


@dataclass(frozen=True, slots=True)
class Choice:
    """A file, and why it was chosen, as the end of a sentence; empty if there was no choice."""

    file: RemoteFile
    why: str


def encoding(path: str) -> str:
    """The encoding in a file's name, in lower case: ``i2_s``, ``q4_k_m``; empty if it names none.

    Of several, the first ternary one: the others describe embeddings or the file's source.
    """
    found = [_plain(written) for written in _ENCODING.findall(_stem(path))]
    ternary = (one for one in found if one in _RANK and one not in _FLOATS)
    return next(ternary, found[-1] if found else "")


def _plain(written: str) -> str:
    """An encoding without suffixes: ``q2_0`` for ``q2_0_g64``, ``tq2_0`` for ``tq2_0_v2``."""
    while written not in _RANK and (shorter := _DETAIL.sub("", written)) != written:
        written = shorter
    return written


def is_model(path: str) -> bool:
    """Whether a file is a language model by its name, or a part of one: not a projector, say."""
    return path.lower().endswith(".gguf") and not _NO_MODEL.search(_stem(path))


def is_supported(path: str) -> bool:
    """Whether bitnet runs models of the encoding in a file's name, if it names any."""
    return is_model(path) and encoding(path) in _RANK


def choose(name: HubName, files: Sequence[RemoteFile]) -> Choice | None:
    """The file that a name refers to, with all its parts; None if no file was named and there is no GGUF file.

    Raises:
        ModelNotFoundError: No file has that name or encoding, parts of it are missing, or bitnet can run none of the
            files.
        InvalidInputError: The named file is not a GGUF file.
    """
    models = [file for file in files if is_model(file.path)]
    models, missing = _joined(models)
    if name.file is not None:
        models = _named(name, models, missing, files)
    elif not models and not missing:
        return None
    fit = [file for file in models if is_supported(file.path)]
    if name.file is not None and len(models) == 1:
        return Choice(models[0], "")
    if not fit:
        if missing:
            raise _incomplete(name, *next(iter(missing.items())))
        raise ModelNotFoundError(
            f"{name} has no GGUF file that bitnet runs: {_listed(models)}.",
            hint="It runs ternary encodings (I2_S, TQ2_0, Q2_0, …), F16, BF16 and F32; "
            "to force a file, name it after a colon.",
        )
    room = system.memory_total()
    best = min(fit, key=lambda file: (file.total > room, _RANK[encoding(file.path)], file.total, file.path))
    return Choice(best, _why(best, fit, room) if len(fit) > 1 else "")


def _joined(models: Sequence[RemoteFile]) -> tuple[list[RemoteFile], dict[str, str]]:
    """The models, each split one as its first part with the others; and the first missing part of each incomplete one,
    by the names of the parts that are there."""
    whole: list[RemoteFile] = []
    split: dict[tuple[str, int, str], dict[int, RemoteFile]] = {}
    for file in models:
        part = part_name(file.path)
        if part is None:
            whole.append(file)
        else:
            split.setdefault((part.begin, part.parts, part.end), {})[part.number] = file
    missing: dict[str, str] = {}
    for (begin, count, end), parts in split.items():
        absent = next((number for number in range(1, count + 1) if number not in parts), None)
        if absent is None:
            whole.append(replace(parts[1], others=tuple(parts[number] for number in range(2, count + 1))))
        else:
            path = PartName(begin, absent, count, end).at(absent)
            missing |= {part.path: path for part in parts.values()}
    return whole, missing


def _named(
    name: HubName, models: list[RemoteFile], missing: Mapping[str, str], files: Sequence[RemoteFile]
) -> list[RemoteFile]:
    assert name.file is not None
    if name.file in missing:
        raise _incomplete(name, name.file, missing[name.file])
    if found := [model for model in models if name.file in (model.path, *(part.path for part in model.others))]:
        return found
    if any(file.path == name.file for file in files):
        raise InvalidInputError(f"{name.file} of {name.repo} is not a GGUF file.")
    tag = name.file.lower()
    if alike := [file for file in models if encoding(file.path) == _plain(tag) and tag in _stem(file.path)]:
        return alike
    known = f"it has {_listed(models)}" if models else "it has no GGUF file"
    raise ModelNotFoundError(f"{name.repo} has no file and no encoding {name.file!r}; {known}.")


def _incomplete(name: HubName, path: str, missing: str) -> ModelNotFoundError:
    return ModelNotFoundError(f"{name.repo} has {path}, a part of a split model, but lacks {missing}.")


def _why(best: RemoteFile, fit: list[RemoteFile], room: int) -> str:
    chosen = encoding(best.path)
    alike = [file for file in fit if encoding(file.path) == chosen]
    why = REASONS[chosen] + (", and it is the smallest of these" if len(alike) > 1 else "")
    larger = [file for file in fit if file.total > room >= best.total]
    return f"{why}; {_listed(larger)} would not fit in memory" if larger else why


def _stem(path: str) -> str:
    return path.lower().rpartition("/")[2].removesuffix(".gguf")


def _listed(files: Sequence[RemoteFile], most: int = 8) -> str:
    names = [file.path for file in files[:most]]
    return ", ".join(names) + (f" and {len(files) - most} more" if len(files) > most else "")
