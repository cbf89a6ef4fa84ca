"""The child's side of :mod:`bitnet.core.devices.examine`: tests one backend, which may end this process."""

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
"""Seconds added to the parent's time limit. After that the parent is gone, and nobody else would end a hung driver."""


def main(request: dict[str, Any]) -> NoReturn:
    """Probe the backend named in the request, then run a kernel on each device named on standard input."""
    requests, answers = child.settle(request)
    if request["level"] > log.LEVELS["debug"]:  # the parent has logged the warnings already
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
    os._exit(0)  # skip drivers' exit handlers, whose failures nobody would see


def _limit(seconds: float) -> None:
    """End this process once nobody can be waiting for its answer, even if a thread never releases the GIL."""
    if sys.platform != "win32":
        signal.alarm(int(seconds) + _SPARE_SECONDS)


def _prove(backend: Plugin, info: DeviceInfo) -> Proof:
    try:
        return prove(backend, info)
    except BaseException as error:  # including what a plug-in raises to end the program
        return Proof(False, 0.0, type(error).__name__)


def _say(answers: BinaryIO, value: Any) -> None:
    foreign_output.flush_c()  # os._exit does not flush C's buffers
    try:
        answers.write(json.dumps(value).encode() + b"\n")
        answers.flush()
    except OSError:  # the parent has ended
        os._exit(0)
    if sys.platform != "win32":
        signal.alarm(0)  # no limit until the next request: other backends may come first
