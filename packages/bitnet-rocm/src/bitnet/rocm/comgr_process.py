"""Runs ``libamd_comgr`` in child processes, each for one source at a time.

The compiler may end its process: Debian's does if another library, such as PoCL, has loaded the same LLVM.
"""

from __future__ import annotations

import base64
import json
import os
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from bitnet.core.devices import child
from bitnet.core.errors import KernelCompileError
from bitnet.core.support.dynlib import file_of, stamp
from bitnet.rocm.comgr import Comgr, ComgrError
from bitnet.rocm.libraries import open_comgr

SECONDS = 300.0
"""Time limit in seconds for one source. The longest takes about ten; a compiler that exceeds the limit hangs."""


class _Child:
    """A process that answers requests in sequence and ends when its input is closed.

    Raises:
        ComgrError: It cannot be started.
    """

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - end() closes it
        try:
            self._process = child.start("bitnet.rocm.comgr_process", {}, self._errors)
        except OSError as error:
            self._errors.close()
            raise ComgrError(f"no process can be started for libamd_comgr ({error.strerror or error})") from error

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Its answer. Raises ComgrError where it ends instead, or hangs, and is then of no more use."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        hangs = threading.Timer(SECONDS, self._process.kill)
        hangs.daemon = True
        hangs.start()
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        finally:
            late = hangs.finished.is_set()
            hangs.cancel()
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        if late:
            raise ComgrError(f"libamd_comgr did not answer within {SECONDS:g} s")
        how = child.describe_status(self._process.wait())
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines() or ["It said nothing."]
        raise ComgrError(f"libamd_comgr {how}: {' '.join(said[-1].split())}")

    def end(self) -> None:
        child.end(self._process, 1.0)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()


def _end(children: list[_Child]) -> None:
    while children:
        children.pop().end()


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
        self._idle: list[_Child] = []
        weakref.finalize(self, _end, self._idle)
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
        return base64.b64decode(made["code"])

    def _ask(self, source: list[Any] | None) -> dict[str, Any]:
        request: dict[str, Any] = {"hip": self._hip, "source": source}
        if not child.possible():
            return answer(**request)
        try:
            idle = self._idle.pop()
        except IndexError:
            idle = _Child()
        try:
            found = idle.ask(request)
        except BaseException:  # an interrupt, too: its answer would be taken for the next one's
            idle.end()
            raise
        self._idle.append(idle)
        return found


def main(request: Mapping[str, Any]) -> NoReturn:
    """The child process's entry point: answers requests until there are no more."""
    requests, answers = child.settle(request)
    for line in requests:
        answers.write(json.dumps(answer(**json.loads(line))).encode() + b"\n")
        answers.flush()
    os._exit(0)  # without what the compiler does at the end of a process


def answer(hip: str, source: list[Any] | None) -> dict[str, Any]:
    """The process's side: what the compiler is, or what it makes of a source; an ``error`` where it fails."""
    opened = open_comgr(hip)
    tried = dict(opened.tried)
    if opened.handle is None:
        return {"error": "; ".join(tried.values())}
    try:
        comgr = Comgr(opened.handle)
        if source is not None:
            return {"code": base64.b64encode(comgr.compile(*source)).decode()}
        version = ".".join(map(str, comgr.version))
        file = stamp(file_of(opened.handle, "amd_comgr_get_version"))
        return {"tried": tried, "version": version, "stamp": file, "architectures": sorted(comgr.architectures())}
    except KernelCompileError as error:
        return {"error": error.log or error.message}
    except (AttributeError, ComgrError) as error:
        return {"error": str(error)}
