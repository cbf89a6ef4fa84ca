"""Starts and ends child processes with the same Python, for drivers that may crash."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO

from bitnet.core.support import log

_START = """
import importlib, json, sys
line = open(0, "rb", buffering=0, closefd=False).readline()  # not a byte more
if not line.endswith(b"\\n"):
    sys.exit()  # the parent has ended
request = json.loads(line)
sys.path[:] = request["path"]
importlib.import_module(request["module"]).main(request)
"""


def possible() -> bool:
    """Whether this Python can start another one. A program frozen into one file would start itself instead."""
    return bool(sys.executable) and not getattr(sys, "frozen", False)


def start(module: str, request: Mapping[str, Any], errors: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    """Run ``main(request)`` of a module in a child, with our ``sys.path`` and log level; its pipes stay open.

    The child is isolated (``-I``), so that it imports nothing from the current folder. It has a session of its own, so
    that a Ctrl-C meant for us does not look like a failure of its driver.

    Args:
        errors: A file for its stderr; None: our stderr.

    Raises:
        OSError: No process can be started.
    """
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", _START],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        start_new_session=True,
    )
    path = [part for part in sys.path if isinstance(part, str)]
    first = {"module": module, "path": path, "level": log.logger.getEffectiveLevel(), **request}
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it has ended; reading the answer will report that
        process.stdin.write(json.dumps(first).encode() + b"\n")
        process.stdin.flush()
    return process


def settle(request: Mapping[str, Any]) -> tuple[BinaryIO, BinaryIO]:
    """The child's first call: take the pipes for requests and answers away from stdin and stdout, which drivers may
    use."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - open to the end
    os.dup2(sys.stderr.fileno(), 1)
    sys.stdin, sys.stdout = Path(os.devnull).open(encoding="utf-8"), sys.stderr  # noqa: SIM115
    _die_quietly()
    log.setup("debug")
    log.logger.setLevel(request["level"])
    return requests, answers


def _die_quietly() -> None:
    """Suppress core dumps and crash dialogs: the parent reports a crash."""
    if sys.platform == "win32":
        import ctypes

        ctypes.windll.kernel32.SetErrorMode(0x8003)
    else:
        import resource

        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def end(process: subprocess.Popen[bytes], patience: float) -> None:
    """Ask a child to end by closing its requests; kill it if it has not ended after ``patience`` seconds."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience)
        return
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # a driver can hang so that not even a kill works
        process.wait(1)


def describe_status(status: int) -> str:
    """How a process ended: ``crashed (SIGSEGV: Segmentation fault)``."""
    if status < 0:
        import signal

        with contextlib.suppress(ValueError):
            found = signal.Signals(-status)
            return f"crashed ({found.name}: {signal.strsignal(found) or 'a signal'})"
        return f"crashed (signal {-status})"
    if status >= 0xC0000000:  # an NTSTATUS on Windows
        return f"crashed (0x{status:08X})"
    return f"ended the process (exit status {status})"
