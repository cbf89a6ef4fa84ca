"""Opening a driver's library at run time, and telling what was tried when it does not open."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

Names: TypeAlias = str | Sequence[str] | Mapping[str, Sequence[str]]
Failure: TypeAlias = Literal["", "missing", "no-permission", "broken"]

_MISSING = ("no such file", "cannot find", "could not find", "not found")
_WINDOWS = {2: "missing", 3: "missing", 5: "no-permission", 126: "missing"}


@dataclass(frozen=True)
class Library:
    """Result of opening a library; true where it is open.

    Attributes:
        handle: The library, where one opened.
        name: The name it opened under.
        tried: Every name tried, in order, with the loader's message (``""`` for the one that opened), as
            :class:`~bitnet.core.hal.ProbeResult` wants them.
        failure: Why none opened: ``missing``, ``no-permission``, or ``broken`` (it is there, but its dependencies are
            not, or it is for another processor); of several, the one that came nearest to opening.
    """

    handle: ctypes.CDLL | None
    name: str
    tried: Mapping[str, str]
    failure: Failure

    def __bool__(self) -> bool:
        return self.handle is not None


def open_library(names: Names) -> Library:
    """Open the first library that can be, with the platform's loader and its search path. Never raises.

    Args:
        names: File names or paths; a mapping has them by ``sys.platform`` (``linux``, ``darwin``, ``win32``).
    """
    if isinstance(names, str):
        names = [names]
    elif isinstance(names, Mapping):
        names = names.get(sys.platform, ())
    tried: dict[str, str] = {}
    failures: set[Failure] = set()
    for name in names:
        try:
            if not name:
                raise ValueError("the name is empty")  # which loaders take for the program itself
            handle = ctypes.CDLL(name)
        except (OSError, ValueError) as error:
            tried[name] = " ".join(str(error).split()) or type(error).__name__
            failures.add(_failure(name, error))
        else:
            tried[name] = ""
            return Library(handle, name, tried, "")
    nearest: tuple[Failure, ...] = ("broken", "no-permission", "missing")
    return Library(None, "", tried, next((f for f in nearest if f in failures), "missing"))


def file_of(library: ctypes.CDLL, symbol: str) -> str:
    """The file that an open library comes from, found by a function of it; empty where the system does not tell."""
    if sys.platform == "win32":
        text = ctypes.create_unicode_buffer(32768)
        ctypes.windll.kernel32.GetModuleFileNameW(ctypes.c_void_p(library._handle), text, len(text))
        return text.value
    known = (ctypes.c_void_p * 4)()  # Dl_info: the file's name comes first
    address = ctypes.cast(getattr(library, symbol), ctypes.c_void_p)
    dladdr = getattr(ctypes.CDLL(None), "dladdr", None)  # musl has it as well
    found = dladdr is not None and dladdr(address, known)
    return ctypes.string_at(known[0]).decode(errors="replace") if found and known[0] else ""


def stamp(path: str) -> str:
    """What tells a file from itself after an update: its path, size and time of change; the path where it is gone."""
    try:
        found = Path(path).stat()
    except OSError:
        return path
    return f"{path} {found.st_size} {found.st_mtime_ns}"


def _failure(name: str, error: OSError | ValueError) -> Failure:
    """Loaders tell only in words: ``dlopen`` sets no error number, and names the file that is missing."""
    if isinstance(error, ValueError):
        return "broken"
    if (code := getattr(error, "winerror", None)) is not None:
        return _WINDOWS.get(code, "broken")  # type: ignore[return-value]
    message = str(error)
    if os.strerror(errno.EACCES) in message or "permission denied" in message.lower():
        return "no-permission"
    if len(Path(name).parts) > 1 and os.path.exists(name):  # noqa: PTH110 - a Path raises for names it dislikes
        return "broken"  # glibc says "No such file" of a library that is for another processor, too
    own = name in message.split(":", 1)[0] or message.startswith("dlopen(")  # not a library that it depends on
    absent = os.strerror(errno.ENOENT) in message or any(text in message.lower() for text in _MISSING)
    return "missing" if own and absent else "broken"


_environment = threading.Lock()


@contextmanager
def without_display() -> Iterator[None]:
    """Vulkan instances made inside do without Mesa's layer that asks the display which device is the default.

    Which one is used we choose ourselves; and on a server, which has no display, the question ends in lines on standard
    error that no user can read anything from.
    """
    name = "NODEVICE_SELECT"  # the layer's own switch
    with _environment:
        before = os.environ.get(name)
        os.environ[name] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before
