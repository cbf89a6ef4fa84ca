"""Opens driver libraries at run time, and records what was tried if none opens."""

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
    """Result of opening a library; true if it is open.

    Attributes:
        handle: The library, or None if none opened.
        name: The name it opened under.
        tried: Every name tried, in order, with the loader's message (``""`` for the one that opened), as
            :class:`~bitnet.core.hal.ProbeResult` wants them.
        failure: Why none opened: ``missing``, ``no-permission``, or ``broken`` (it exists, but a dependency is missing,
            or it is for another processor). Of several failures, the one that came closest to opening.
    """

    handle: ctypes.CDLL | None
    name: str
    tried: Mapping[str, str]
    failure: Failure

    def __bool__(self) -> bool:
        return self.handle is not None


def open_library(names: Names) -> Library:
    """Open the first library that loads, with the platform's loader and search path. Never raises.

    Args:
        names: File names or paths, or a mapping to them from ``sys.platform`` (``linux``, ``darwin``, ``win32``).
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
                raise ValueError("the name is empty")  # loaders would return the program itself
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
    """The file of an open library, found by the address of one of its functions; empty if the system cannot tell."""
    if sys.platform == "win32":
        text = ctypes.create_unicode_buffer(32768)
        ctypes.windll.kernel32.GetModuleFileNameW(ctypes.c_void_p(library._handle), text, len(text))
        return text.value
    known = (ctypes.c_void_p * 4)()  # Dl_info: the file's name comes first
    address = ctypes.cast(getattr(library, symbol), ctypes.c_void_p)
    dladdr = getattr(ctypes.CDLL(None), "dladdr", None)  # musl also has it
    found = dladdr is not None and dladdr(address, known)
    return ctypes.string_at(known[0]).decode(errors="replace") if found and known[0] else ""


def stamp(path: str) -> str:
    """A string that changes when a file is updated: path, size and modification time; only the path if it is gone."""
    try:
        found = Path(path).stat()
    except OSError:
        return path
    return f"{path} {found.st_size} {found.st_mtime_ns}"


def _failure(name: str, error: OSError | ValueError) -> Failure:
    """Classify a loader's error by its text: ``dlopen`` sets no error number, but names the missing file."""
    if isinstance(error, ValueError):
        return "broken"
    if (code := getattr(error, "winerror", None)) is not None:
        return _WINDOWS.get(code, "broken")  # type: ignore[return-value]
    message = str(error)
    if os.strerror(errno.EACCES) in message or "permission denied" in message.lower():
        return "no-permission"
    if len(Path(name).parts) > 1 and os.path.exists(name):  # noqa: PTH110 - a Path raises for names it dislikes
        return "broken"  # glibc also says "No such file" for a library built for another processor
    own = name in message.split(":", 1)[0] or message.startswith(
        "dlopen("
    )  # about the library itself, not a dependency
    absent = os.strerror(errno.ENOENT) in message or any(text in message.lower() for text in _MISSING)
    return "missing" if own and absent else "broken"


_environment = threading.Lock()


@contextmanager
def without_display() -> Iterator[None]:
    """In this context, Vulkan instances skip Mesa's layer that asks the display which device is the default.

    We choose the device ourselves, and on a server without a display the layer prints useless lines to standard error.
    """
    name = "NODEVICE_SELECT"  # disables the layer
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
