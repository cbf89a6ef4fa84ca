"""Runs ``libamd_comgr`` in child processes, each for one source at a time.

The compiler may end its process: Debian's does if another library, such as PoCL, has loaded the same LLVM.
"""

from __future__ import annotations

import marshal
from collections.abc import Mapping, Sequence
from typing import Any

from bitnet.core.errors import KernelCompileError
from bitnet.core.support import log
from bitnet.core.support.dynlib import file_of, stamp
from bitnet.core.support.helper import Helper, HelperEnded, HelperStartError, Limits, Program, possible
from bitnet.rocm.comgr import Comgr, ComgrError
from bitnet.rocm.libraries import open_comgr

SECONDS = 300.0
"""Time limit in seconds for one source. The longest takes about ten; a compiler that exceeds the limit hangs."""
OUTPUT = 1 << 28
"""Maximum bytes of an answer, many times a code object's."""
MODULE = "bitnet.rocm.comgr_process"
"""What a child runs."""


class ComgrProcess:
    """The compiler of a HIP runtime; thread-safe.

    Args:
        hip: The name under which the runtime opened.

    Raises:
        ComgrError: It cannot be opened, is of another version, or ends its process.

    Attributes:
        tried: Libraries tried, as :class:`~bitnet.core.hal.ProbeResult` wants them.
        version: Such as ``3.0``.
        stamp: A string that changes when the library's file is updated.
        architectures: Those that it compiles for, such as ``gfx90a``.
    """

    def __init__(self, hip: str) -> None:
        self._hip = hip
        self._idle: list[Helper] = []
        found = self._ask(None)
        if "error" in found:
            raise ComgrError(found["error"])
        self.tried: Mapping[str, str] = found["tried"]
        self.version: str = found["version"]
        self.stamp: str = found["stamp"]
        self.architectures = frozenset(found["architectures"])

    def compile(self, source: str, name: str, architecture: str, options: Sequence[str], device: str) -> bytes:
        """A code object; as :meth:`bitnet.rocm.comgr.Comgr.compile`.

        Raises:
            KernelCompileError: The source does not compile, or the compiler ends its process.
        """
        try:
            made = self._ask([source, name, architecture, list(options), device])
        except ComgrError as error:
            raise KernelCompileError(f"{name} does not compile.", device=device, log=str(error)) from error
        if "error" in made:
            raise KernelCompileError(f"{name} does not compile.", device=device, log=made["error"])
        code: bytes = made["code"]
        return code

    def _ask(self, source: list[Any] | None) -> dict[str, Any]:
        if not possible():
            return compiled(self._hip, source)
        try:
            helper = self._idle.pop()
        except IndexError:
            helper = Helper(
                Program(MODULE, "HIP is compiled", setup=log.level(), patience=1.0, stderr="kept", output=OUTPUT)
            )
        try:
            found: dict[str, Any] = marshal.loads(helper.ask(marshal.dumps((self._hip, source)), Limits(SECONDS)))
        except HelperStartError as error:
            raise ComgrError(f"no process can be started for libamd_comgr ({error.reason})") from error
        except HelperEnded as ended:
            said = "" if ended.kind == "time" else f": {ended.last_line or 'It said nothing.'}"
            raise ComgrError(f"libamd_comgr {ended}{said}") from None
        self._idle.append(helper)
        return found


def prepare(setup: bytearray, ask: object) -> None:
    """The process's side: log as the parent does."""
    log.adopt(setup)


def answer(request: bytearray) -> bytes:
    """The process's side: what :func:`compiled` returns."""
    return marshal.dumps(compiled(*marshal.loads(request)))


def compiled(hip: str, source: list[Any] | None) -> dict[str, Any]:
    """What the compiler is, or what it makes of a source; an ``error`` where it fails."""
    opened = open_comgr(hip)
    tried = dict(opened.tried)
    if opened.handle is None:
        return {"error": "; ".join(tried.values())}
    try:
        comgr = Comgr(opened.handle)
        if source is not None:
            return {"code": comgr.compile(*source)}
        version = ".".join(map(str, comgr.version))
        file = stamp(file_of(opened.handle, "amd_comgr_get_version"))
        return {"tried": tried, "version": version, "stamp": file, "architectures": sorted(comgr.architectures())}
    except KernelCompileError as error:
        return {"error": error.log or error.message}
    except (AttributeError, ComgrError) as error:
        return {"error": str(error)}
