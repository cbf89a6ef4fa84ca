"""Names of models on the hub: ``ORG/NAME``, and ``ORG/NAME:FILE`` for one file of several."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bitnet.core.errors import InvalidInputError, brief

PREFIX = "hf:"
"""Prefix of a name where a file's path is also accepted."""

_PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?")
_LONGEST = 96
"""Maximum characters of ``ORG/NAME``; the hub's own limit."""
_LONGEST_PART, _LONGEST_PATH = 255, 1024
"""Maximum bytes of a file's name, and of its path; file systems have such limits."""


@dataclass(frozen=True, slots=True)
class HubName:
    """A model on the hub.

    Attributes:
        repo: ``ORG/NAME``.
        file: Path of a file in the repository (``model-i2_s.gguf``), or an encoding (``i2_s``); None: the file that
            runs best here.
    """

    repo: str
    file: str | None = None

    def __str__(self) -> str:
        return self.repo if self.file is None else f"{self.repo}:{self.file}"


def parse(text: str) -> HubName:
    """Parse ``ORG/NAME`` or ``ORG/NAME:FILE``, with or without the prefix ``hf:``.

    Raises:
        InvalidInputError: It is not such a name, but a URL or a path, or has characters that the hub does not allow.
    """
    repo, colon, file = text.removeprefix(PREFIX).partition(":")
    parts = repo.split("/")
    if len(parts) != 2 or not all(map(_PART.fullmatch, parts)) or len(repo) > _LONGEST:
        raise _wrong(text)
    if any(bad in repo for bad in ("--", "..")) or repo.endswith(".git"):
        raise _wrong(text)
    if not colon:
        return HubName(repo)
    if not is_file_name(file):
        raise InvalidInputError(
            f"{brief(file)} is not a valid file name on the hub.",
            hint="Name a path in its repository, such as model-i2_s.gguf, or an encoding, such as i2_s.",
        )
    return HubName(repo, file)


def is_file_name(path: str) -> bool:
    """Whether a path stays inside its repository on every system, and a terminal can show it."""
    if not path or not path.isprintable() or any(c in path for c in '\\:*?"<>|'):
        return False
    parts = path.split("/")
    if len(path.encode()) > _LONGEST_PATH or max(len(part.encode()) for part in parts) > _LONGEST_PART:
        return False
    return not any(part in ("", ".", "..") or part.endswith((".", " ")) for part in parts)


def _wrong(text: str) -> InvalidInputError:
    form = f"{PREFIX if text.startswith(PREFIX) else ''}ORG/NAME"
    return InvalidInputError(
        f"{brief(text)} is not a valid model name on the hub.",
        hint=f"Write {form} or {form}:FILE; set HF_ENDPOINT for a hub other than huggingface.co.",
    )
