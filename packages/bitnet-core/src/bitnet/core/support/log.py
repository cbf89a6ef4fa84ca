"""Logging: the logger ``bitnet``, and a handler on stderr where ``BITNET_LOG`` or the command line asks for one.

A program that uses bitnet as a library and configures ``logging`` gets its records like any other library's. One that
does not sees warnings on stderr, which is Python's own doing, and more with ``BITNET_LOG``.
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
    """Writes to the current ``sys.stderr``: information as it is, other levels with their name in front."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr

    def format(self, record: logging.LogRecord) -> str:
        said = indented(super().format(record))  # messages quote files, drivers and plug-ins
        return said if record.levelno == logging.INFO else f"bitnet: {record.levelname.lower()}: {said}"


def setup(level: str | None = None) -> None:
    """Write bitnet's records of this level and above to stderr; calling it again changes the level.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``; None: what ``BITNET_LOG`` says, else ``warning``.

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
    """Heed ``BITNET_LOG`` in a program that has called no :func:`setup`; does nothing where it is not set.

    Where the program has configured ``logging``, only the level is taken: its own handlers write.

    Raises:
        InvalidInputError: ``BITNET_LOG`` names no level.
    """
    wanted = env.text("BITNET_LOG").lower()
    if not wanted or any(isinstance(handler, _Stderr) for handler in logger.handlers):
        return
    if not logger.hasHandlers() or wanted not in LEVELS:
        setup()
    else:
        logger.setLevel(LEVELS[wanted])


def once(level: int, message: str) -> None:
    """Log a message unless this process has logged the very same before."""
    with _lock:
        if message in _said:
            return
        _said.add(message)
    logger.log(level, "%s", message)
