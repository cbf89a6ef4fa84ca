"""The child's side of :mod:`bitnet.core.devices.examine`: tests one backend, which may end this process."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import asdict

from bitnet.core.devices import plugin, registry
from bitnet.core.devices.examine import dump_result
from bitnet.core.devices.plugin import Plugin
from bitnet.core.devices.proof import Proof, prove
from bitnet.core.hal import DeviceInfo
from bitnet.core.support import foreign_output, log

_SPARE_SECONDS = 10
"""Seconds added to the parent's time limit. After that the parent is gone, and nobody else would end a hung driver."""


_examined: dict[str, tuple[Plugin, dict[str, DeviceInfo]]] = {}


def prepare(setup: bytearray, ask: object) -> None:
    """Log as the parent does, but no warnings, as it has logged them already."""
    log.adopt(setup)
    if log.logger.level > log.LEVELS["debug"]:
        log.logger.setLevel(log.LEVELS["error"])


def answer(request: bytearray) -> bytes:
    """Probe the backend named in the request, or run a kernel on the device whose index it names."""
    named = json.loads(request)
    _limit(named["seconds"])
    name = named["backend"]
    if name not in _examined:
        plugin.PROBE_SECONDS = named["seconds"] + _SPARE_SECONDS  # the parent counts
        suspect = registry.available()[name]
        suspect.trust()
        probe = suspect.examine().probe
        _examined[name] = suspect, {info.index: info for info in probe.devices}
        found = dump_result(probe)
    else:
        suspect, devices = _examined[name]
        found = asdict(_prove(suspect, devices[named["prove"]]))
    foreign_output.flush_c()  # nobody flushes C's buffers at the end
    if sys.platform != "win32":
        signal.alarm(0)  # no limit until the next request: other backends may come first
    return json.dumps(found).encode()


def _limit(seconds: float) -> None:
    """End this process once nobody can be waiting for its answer, even if a thread never releases the GIL."""
    if sys.platform != "win32":
        signal.alarm(int(seconds) + _SPARE_SECONDS)


def _prove(backend: Plugin, info: DeviceInfo) -> Proof:
    try:
        return prove(backend, info)
    except BaseException as error:  # including what a plug-in raises to end the program
        return Proof(False, 0.0, type(error).__name__)
