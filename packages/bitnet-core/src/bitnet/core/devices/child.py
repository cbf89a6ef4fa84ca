"""Child processes of the same Python, for drivers that may end them: how one starts, and what it does first."""

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
request = json.loads(open(0, "rb", buffering=0, closefd=False).readline())  # and not a byte more
sys.path[:] = request["path"]
importlib.import_module(request["module"]).main(request)
"""


def possible() -> bool:
    """Whether this Python can start another; a program that was frozen into one file would start itself."""
    return bool(sys.executable) and not getattr(sys, "frozen", False)


def start(module: str, request: Mapping[str, Any], errors: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    """Run ``main(request)`` of a module in a child, with our path and level of logging; its pipes stay open.

    The child is isolated (``-I``), so that nothing is imported from the current folder, and in a session of its own, so
    that a Ctrl-C meant for us does not look like a failure of its driver.

    Args:
        errors: A file for what it prints; None: where ours goes.

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
    with contextlib.suppress(OSError):  # it has ended, which the answer will tell
        process.stdin.write(json.dumps(first).encode() + b"\n")
        process.stdin.flush()
    return process


def settle(request: Mapping[str, Any]) -> tuple[BinaryIO, BinaryIO]:
    """What a child does first: its pipes for requests and answers, out of reach of what a driver prints."""
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
    """A crash is told by the parent: no memory image on the disk, and no window that waits for somebody."""
    if sys.platform == "win32":
        import ctypes

        ctypes.windll.kernel32.SetErrorMode(0x8003)
    else:
        import resource

        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def end(process: subprocess.Popen[bytes], patience: float) -> None:
    """Let a child end by closing its requests; one that has not after so many seconds is killed."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience)
        return
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # a driver can hang where not even that is heard
        process.wait(1)


def describe_status(status: int) -> str:
    """How a process ended: ``crashed (SIGSEGV: Segmentation fault)``."""
    if status < 0:
        import signal

        with contextlib.suppress(ValueError):
            found = signal.Signals(-status)
            return f"crashed ({found.name}: {signal.strsignal(found) or 'a signal'})"
        return f"crashed (signal {-status})"
    if status >= 0xC0000000:  # of Windows: an NTSTATUS
        return f"crashed (0x{status:08X})"
    return f"ended the process (exit status {status})"
