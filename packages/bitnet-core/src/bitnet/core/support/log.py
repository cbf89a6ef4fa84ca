"""Logging: the logger ``bitnet``, and a handler on stderr if ``BITNET_LOG`` or the command line asks for one.

A program that uses bitnet as a library and configures ``logging`` gets its records as from any other library. One that
does not sees warnings on stderr, which is Python's default, and more with ``BITNET_LOG``.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import TYPE_CHECKING, TextIO

from bitnet.core.errors import InvalidInputError
from bitnet.core.support import env
from bitnet.core.support.foreign import indented

logger = logging.getLogger("bitnet")

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

_said: set[str] = set()
_lock = threading.Lock()


if TYPE_CHECKING:
    _StreamHandler = logging.StreamHandler[TextIO]
else:
    _StreamHandler = logging.StreamHandler  # Python 3.10 cannot subscript it


class _Stderr(_StreamHandler):
    """Writes to the current ``sys.stderr``: INFO records unchanged, other levels after the level's name."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr

    def format(self, record: logging.LogRecord) -> str:
        said = indented(super().format(record))  # messages quote text from files, drivers and plug-ins
        return said if record.levelno == logging.INFO else f"bitnet: {record.levelname.lower()}: {said}"


def setup(level: str | None = None) -> None:
    """Write bitnet's records of this level and above to stderr; calling it again changes the level.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``; None: the value of ``BITNET_LOG``, else ``warning``.

    Raises:
        InvalidInputError: There is no such level.
    """
    chosen = (level or env.text("BITNET_LOG") or "warning").lower()
    if chosen not in LEVELS:
        where = "BITNET_LOG" if level is None else "the log level"
        raise InvalidInputError(f"{where} is {chosen!r}; it must be one of {', '.join(LEVELS)}.")
    with _lock:
        logger.setLevel(LEVELS[chosen])
        if not any(isinstance(handler, _Stderr) for handler in logger.handlers):
            logger.addHandler(_Stderr())


def from_environment() -> None:
    """Apply ``BITNET_LOG`` in a program that has not called :func:`setup`. Does nothing if it is not set.

    If the program has configured ``logging``, only the level is set, and the program's handlers write.

    Raises:
        InvalidInputError: ``BITNET_LOG`` is not a level.
    """
    wanted = env.text("BITNET_LOG").lower()
    if not wanted or any(isinstance(handler, _Stderr) for handler in logger.handlers):
        return
    if not logger.hasHandlers() or wanted not in LEVELS:
        setup()
    else:
        logger.setLevel(LEVELS[wanted])


def once(level: int, message: str) -> None:
    """Log a message unless this process has logged the same one before."""
    with _lock:
        if message in _said:
            return
        _said.add(message)
    logger.log(level, "%s", message)


def level() -> bytes:
    """The level in force, for :func:`adopt` in a child process."""
    return b"%d" % logger.getEffectiveLevel()


def adopt(level: bytes | bytearray) -> None:
    """In a child process: log to stderr at the parent's :func:`level`."""
    setup("debug")
    logger.setLevel(int(level))
