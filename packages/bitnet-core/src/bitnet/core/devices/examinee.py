"""The child's side of :mod:`bitnet.core.devices.examine`: one backend, in a process that it may end."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from typing import Any, BinaryIO, NoReturn

from bitnet.core.devices import child, plugin, registry
from bitnet.core.devices.examine import dump_result
from bitnet.core.devices.plugin import Plugin
from bitnet.core.devices.proof import Proof, prove
from bitnet.core.hal import DeviceInfo
from bitnet.core.support import foreign_output, log

_SPARE_SECONDS = 10
"""Above what the parent waits for; by then it has gone, and nobody else would end us where a driver hangs."""


def main(request: dict[str, Any]) -> NoReturn:
    """Probe the backend that the request names; then run a kernel on each device that is named on standard input."""
    requests, answers = child.settle(request)
    if request["level"] > log.LEVELS["debug"]:  # what the parent has warned of already is not said again by each child
        log.logger.setLevel(log.LEVELS["error"])
    _limit(request["seconds"])
    plugin.PROBE_SECONDS = request["seconds"] + _SPARE_SECONDS  # the parent counts
    suspect = registry.available()[request["backend"]]
    suspect.trust()
    result = suspect.examine().probe
    _say(answers, dump_result(result))
    devices = {info.index: info for info in result.devices}
    for line in requests:
        request = json.loads(line)
        _limit(request["seconds"])
        _say(answers, asdict(_prove(suspect, devices[request["prove"]])))
    os._exit(0)  # without what drivers do at the end of a process, of which nobody would be told


def _limit(seconds: float) -> None:
    """End this process, whoever holds the interpreter's lock, when nobody can be waiting for its answer any more."""
    if sys.platform != "win32":
        signal.alarm(int(seconds) + _SPARE_SECONDS)


def _prove(backend: Plugin, info: DeviceInfo) -> Proof:
    try:
        return prove(backend, info)
    except BaseException as error:  # what a plug-in raises to end the program
        return Proof(False, 0.0, type(error).__name__)


def _say(answers: BinaryIO, value: Any) -> None:
    foreign_output.flush_c()  # nothing does at the end, which is none of C's
    answers.write(json.dumps(value).encode() + b"\n")
    answers.flush()
    if sys.platform != "win32":
        signal.alarm(0)  # until the next request, which other backends may have to go before
