"""The child's side of :mod:`bitnet.core.devices.examine`: one backend, in a process that it may end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from bitnet.core.devices import plugin, registry
from bitnet.core.devices.examine import dump_result
from bitnet.core.devices.plugin import Plugin
from bitnet.core.devices.proof import Proof, prove
from bitnet.core.hal import DeviceInfo
from bitnet.core.support import foreign_output, log

_SPARE_SECONDS = 10
"""Above what the parent waits for; by then it has gone, and nobody else would end us where a driver hangs."""


def main(request: dict[str, Any]) -> NoReturn:
    """Probe the backend that the request names; then run a kernel on each device that is named on standard input."""
    requests, answers = _own_pipes()
    _die_quietly()
    log.setup("debug")
    # What the parent has warned of already is not said again by each child.
    log.logger.setLevel(request["level"] if request["level"] <= log.LEVELS["debug"] else log.LEVELS["error"])
    _limit(request)
    plugin.PROBE_SECONDS = request["seconds"] + _SPARE_SECONDS  # the parent counts
    suspect = registry.available()[request["backend"]]
    suspect.trust()
    result = suspect.examine().probe
    _say(answers, dump_result(result))
    devices = {info.index: info for info in result.devices}
    for line in requests:
        request = json.loads(line)
        _limit(request)
        _say(answers, asdict(_prove(suspect, devices[request["prove"]])))
    os._exit(0)  # without what drivers do at the end of a process, of which nobody would be told


def _own_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Standard input and output under other numbers; what was theirs is nothing and standard error."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - open to the end
    os.dup2(sys.stderr.fileno(), 1)
    sys.stdin, sys.stdout = Path(os.devnull).open(encoding="utf-8"), sys.stderr  # noqa: SIM115
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


def _limit(request: dict[str, Any]) -> None:
    """End this process, whoever holds the interpreter's lock, when nobody can be waiting for it any more."""
    if sys.platform != "win32":
        signal.alarm(int(request["seconds"]) + _SPARE_SECONDS)


def _prove(backend: Plugin, info: DeviceInfo) -> Proof:
    try:
        return prove(backend, info)
    except BaseException as error:  # what a plug-in raises to end the program
        return Proof(False, 0.0, type(error).__name__)


def _say(answers: BinaryIO, value: Any) -> None:
    foreign_output.flush_c()  # nothing does at the end, which is none of C's
    answers.write(json.dumps(value).encode() + b"\n")
    answers.flush()
