"""``libamd_comgr`` in processes of its own, each for one source at a time.

A compiler may end the process that asks it: Debian's does where another library has brought the same LLVM, as PoCL has.
"""

from __future__ import annotations

import base64
import contextlib
import json
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from bitnet.core.devices.child import possible
from bitnet.core.errors import KernelCompileError
from bitnet.rocm.comgr import Comgr, ComgrError
from bitnet.rocm.libraries import open_comgr

_START = """
import json, sys
sys.path[:] = json.loads(sys.stdin.readline())
from bitnet.rocm.comgr_process import answer
for line in sys.stdin:
    print(json.dumps(answer(**json.loads(line))), flush=True)
"""


class _Child:
    """A process that answers one request after another, and ends when its input does."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - end() closes it
        command = [sys.executable, "-c", _START]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        self._process = subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload]
        self._send(sys.path)

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Its answer. Raises ComgrError where it ends instead."""
        try:
            self._send(request)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        status = self._process.wait()
        self._errors.seek(0)
        said = " ".join((self._errors.read().strip().splitlines() or ["It said nothing."])[-1].split())
        self.end()
        raise ComgrError(f"libamd_comgr ended its process with status {status}: {said}")

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def _send(self, value: object) -> None:
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()


def _end(children: list[_Child]) -> None:
    while children:
        children.pop().end()


class ComgrProcess:
    """The compiler that comes with a HIP runtime, which several threads may use at once.

    Args:
        hip: The name under which the runtime opened.

    Raises:
        ComgrError: It cannot be opened, is of another version, or ends its process.

    Attributes:
        tried: Libraries tried, as :class:`~bitnet.core.hal.ProbeResult` wants them.
        version: Such as ``3.0``.
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
        if not possible():
            return answer(**request)
        try:
            child = self._idle.pop()
        except IndexError:
            child = _Child()
        found = child.ask(request)
        self._idle.append(child)
        return found


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
        return {"tried": tried, "version": version, "architectures": sorted(comgr.architectures())}
    except KernelCompileError as error:
        return {"error": error.log or error.message}
    except (AttributeError, ComgrError) as error:
        return {"error": str(error)}
