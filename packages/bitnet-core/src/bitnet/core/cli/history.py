"""The lines typed in earlier conversations: a file in the cache folder, for its user alone.

Pasted text of several lines is one line of the file, with carriage returns in place of its line feeds.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

MAX_LINES = 1000


def history_path() -> Path:
    """Where ``bitnet chat`` keeps them.

    Raises:
        RuntimeError: The user has no home folder.
    """
    from bitnet.core.support.cache import cache_folder

    return cache_folder() / "chat_history"


def read_history() -> list[str]:
    """The lines, oldest first; none if there is no such file.

    Raises:
        OSError: It cannot be read, or is a link, a pipe or a folder.
    """
    try:
        handle = _open(os.O_RDONLY)
    except FileNotFoundError:
        return []
    with os.fdopen(handle, encoding="utf-8", errors="replace", newline="\n") as file:
        return [line.replace("\r", "\n") for line in file.read().split("\n")[:-1]]


def add_to_history(lines: list[str]) -> None:
    """Append lines; of more than 1000, the oldest are dropped.

    Raises:
        OSError: The file cannot be written, or is a link, a pipe or a folder.
    """
    if not lines:
        return
    kept = [*read_history(), *lines][-MAX_LINES:]
    history_path().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with os.fdopen(_open(os.O_WRONLY | os.O_CREAT), "w", encoding="utf-8", errors="replace", newline="\n") as file:
        file.write("".join(line.replace("\n", "\r") + "\n" for line in kept))


def clear_history() -> int:
    """Remove the file, or a link in its place; returns how many lines were in it.

    Raises:
        OSError: It cannot be removed.
    """
    try:
        count = len(read_history())
    except OSError:
        count = 0
    if os.path.lexists(history_path()):  # a read-only file system refuses to remove even what is not there
        history_path().unlink(missing_ok=True)
    return count


def _open(flags: int) -> int:
    """Open the file itself: links are not followed, and a pipe is not waited for."""
    path = history_path()
    handle = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o600)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"{path} is not a regular file")
        if hasattr(os, "fchmod"):
            os.fchmod(handle, 0o600)
        if flags & os.O_WRONLY:
            os.ftruncate(handle, 0)
    except BaseException:
        os.close(handle)
        raise
    return handle
