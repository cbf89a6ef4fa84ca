"""The options for opening devices. Only here do environment variables set their defaults."""

from __future__ import annotations

from bitnet.core.errors import InvalidInputError
from bitnet.core.hal.backend import MAX_THREADS, OpenOptions
from bitnet.core.support import env


def open_options(*, threads: int | None = None, strict: bool | None = None) -> OpenOptions:
    """Options for opening a device: the arguments, else the environment.

    The variables are ``BITNET_THREADS``, ``BITNET_STRICT_MODE`` and ``BITNET_ROCM_GRAPHS``.

    Raises:
        InvalidInputError: ``threads``, or one of the variables, is out of range.
    """
    return OpenOptions(
        threads=_threads() if threads is None else threads,
        strict=env.flag("BITNET_STRICT_MODE") if strict is None else strict,
        graphs=not env.text("BITNET_ROCM_GRAPHS") or env.flag("BITNET_ROCM_GRAPHS"),
    )


def _threads() -> int | None:
    asked = env.text("BITNET_THREADS")
    if not asked:
        return None
    if not asked.isdecimal() or len(asked) > len(str(MAX_THREADS)) or not 1 <= int(asked) <= MAX_THREADS:
        raise InvalidInputError(f"BITNET_THREADS is {asked!r}; it must be a number from 1 to {MAX_THREADS}.")
    return int(asked)
