"""Tests backends in child processes: a crash, exit or hang there is reported and affects nothing else.

All children are started at once and probe at the same time. Kernels then run in one child after another, because some
devices cannot be opened by two programs. The child's side is :mod:`bitnet.core.devices.examinee`.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bitnet.core.devices import child, crashes, plugin
from bitnet.core.devices.plugin import BackendReport, Plugin
from bitnet.core.devices.proof import Proof, prove
from bitnet.core.hal import DeviceInfo, DeviceType, ProbeResult, ProbeStatus
from bitnet.core.support import log

PROOF_SECONDS = 60.0
"""Time limit in seconds to open a device and run a kernel; some drivers take many seconds to compile the first
kernel."""
_LOOK_SECONDS = 0.5
"""Seconds between checks whether a silent child is alive."""


@dataclass(frozen=True, slots=True)
class Examination:
    """A child's findings about a backend.

    Attributes:
        report: The probe's findings; ``broken`` if the probe, or every device, ended the child.
        proofs: Proofs of the devices tested, by name.
        crashed: By name of backend or device, how it ended a child.
    """

    report: BackendReport
    proofs: Mapping[str, Proof]
    crashed: Mapping[str, str]


class Ended(Exception):
    """A child ended, or was killed, without an answer. The text says how and continues a sentence after its subject."""


def again(suspect: Plugin, marks: Mapping[Path, str]) -> Mapping[str, str]:
    """The marked backends and devices that also crash a child, and how. Markers of the others are removed."""
    log.logger.info("An earlier process ended in %s; a child tries it first.", ", ".join(sorted({*marks.values()})))
    crashed: Mapping[str, str] = {}
    if child.possible():
        with _children([suspect]) as children:
            crashed = children[0].examine(set(marks.values())).crashed
    crashes.forget(marks)  # a child that crashes leaves a new marker
    return crashed


def examine_all(plugins: Mapping[str, Plugin]) -> list[Examination]:
    """Examine every backend and all of its devices. From then on the plugins report these findings."""
    if not child.possible():
        return [_examine_here(plugin) for plugin in plugins.values()]
    marks = {path: what for name in plugins for path, what in crashes.left_by(name).items()}
    with _children(list(plugins.values())) as children:
        for examiner in children:
            with contextlib.suppress(Ended):  # it will be reported when the child is asked
                examiner.begin()
        found = [examiner.examine() for examiner in children]
    crashes.forget(marks)
    for backend, result in zip(plugins.values(), found, strict=True):
        backend.adopt(result.report, result.crashed)
    return found


def _examine_here(backend: Plugin) -> Examination:
    report = backend.report()
    return Examination(report, {info.name: prove(backend, info) for info in report.probe.devices}, {})


class _Examiner:
    """Examines one backend, with as many children as needed."""

    def __init__(self, backend: Plugin) -> None:
        self._backend = backend
        self._child: _Child | None = None

    def begin(self) -> None:
        """Start a child that probes; does not wait."""
        if self._child is None:
            self._child = _Child(self._backend.name)

    def examine(self, wanted: Collection[str] | None = None) -> Examination:
        """The probe's findings, and proofs of the devices ``wanted``; None: of all."""
        found = self._probe()
        if isinstance(found, str):
            report = self._backend.broken(found)
            return Examination(report, {}, {self._backend.name: found})
        proofs: dict[str, Proof] = {}
        crashed: dict[str, str] = {}
        for info in found.devices:
            if wanted is None or info.name in wanted:
                proofs[info.name] = self._prove(info, crashed)
        self.close()  # before the next child, which may use the same device
        report = BackendReport(self._backend.name, self._backend.distribution, self._backend.version, found)
        if crashed and len(crashed) == len(found.devices):
            broken = replace(found, status=ProbeStatus.BROKEN, reason=" ".join(f"{n}: {w}" for n, w in crashed.items()))
            report = replace(report, probe=broken)
        return Examination(report, proofs, crashed)

    def close(self, patience: float = 1.0) -> None:
        if self._child is not None:
            self._child.close(patience)
            self._child = None

    def _probe(self) -> ProbeResult | str:
        """The probe's findings, or how it ended the child."""
        try:
            self.begin()
            assert self._child is not None
            return load_result(self._child.answer(plugin.PROBE_SECONDS))
        except Ended as ended:
            self.close()
            return f"It {ended} while it was probed."

    def _prove(self, info: DeviceInfo, crashed: dict[str, str]) -> Proof:
        began = time.perf_counter()
        if self._child is None and isinstance(found := self._probe(), str):  # the previous device ended the child
            return Proof(False, time.perf_counter() - began, found)
        assert self._child is not None
        try:
            return Proof(**self._child.ask({"prove": info.index}, PROOF_SECONDS))
        except Ended as ended:
            self.close()
            crashed[info.name] = f"It {ended} while a kernel was run on it."
            return Proof(False, time.perf_counter() - began, crashed[info.name])


@contextlib.contextmanager
def _children(backends: Sequence[Plugin]) -> Iterator[list[_Examiner]]:
    examiners = [_Examiner(backend) for backend in backends]
    try:
        yield examiners
    finally:
        for examiner in examiners:
            examiner.close(patience=0)


class _Child:
    """A process that probes a backend and then runs kernels on its devices on request.

    Raises:
        Ended: It cannot be started.
    """

    def __init__(self, backend: str) -> None:
        self._began = time.monotonic()
        self._answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        try:
            self._process = child.start(
                "bitnet.core.devices.examinee", {"backend": backend, "seconds": plugin.PROBE_SECONDS}
            )
        except OSError as error:
            raise Ended(f"could not be tried ({error.strerror or error})") from error
        threading.Thread(target=self._listen, name="bitnet-examine", daemon=True).start()

    def ask(self, request: Any, seconds: float) -> Any:
        """The answer to a request; errors as for :meth:`answer`."""
        self._began = time.monotonic()
        self._say({**request, "seconds": seconds})
        return self.answer(seconds)

    def answer(self, seconds: float) -> Any:
        """The answer to the last request; before any request, the result of the probe.

        Raises:
            Ended: The child has ended, or has not answered in time.
        """
        deadline = self._began + seconds
        while True:
            try:
                line = self._answers.get(timeout=max(0.0, min(_LOOK_SECONDS, deadline - time.monotonic())))
            except queue.Empty:
                # A process forked by the driver may hold our pipe open, so that it does not close when the child ends.
                if self._process.poll() is None and time.monotonic() < deadline:
                    continue
                line = None
            if line is None:
                raise Ended(self._ending(seconds, deadline))
            try:
                return json.loads(line)
            except ValueError:
                raise Ended("answered with something other than a result") from None

    def close(self, patience: float) -> None:
        """Ask it to end; kill it if it has not ended after ``patience`` seconds."""
        child.end(self._process, patience)

    def _say(self, value: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, which the answer will tell
            self._process.stdin.write(json.dumps(value).encode() + b"\n")
            self._process.stdin.flush()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(OSError), self._process.stdout as lines:
            for line in lines:
                self._answers.put(line)
        self._answers.put(None)

    def _ending(self, seconds: float, deadline: float) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(max(0.0, min(1.0, deadline - time.monotonic())))
            return child.describe_status(status)
        return f"did not answer within {seconds:g} s"


def dump_result(result: ProbeResult) -> dict[str, Any]:
    """A probe's result as a JSON value."""
    devices = [
        {
            "backend": info.backend,
            "index": info.index,
            "id": info.id,
            "description": info.description,
            "vendor": info.vendor,
            "type": info.type.value,
            "memory": int(info.memory),
            "driver_version": info.driver_version,
            "features": list(info.features),
            "details": dict(info.details),
            "step_tokens": int(info.step_tokens),
        }
        for info in result.devices
    ]
    return {
        "status": result.status.value,
        "devices": devices,
        "reason": result.reason,
        "hint": result.hint,
        "tried": dict(result.tried),
        "versions": dict(result.versions),
    }


def load_result(document: dict[str, Any]) -> ProbeResult:
    """The reverse of :func:`dump_result`."""
    devices = [
        DeviceInfo(**{**info, "type": DeviceType(info["type"]), "features": tuple(info["features"])})
        for info in document["devices"]
    ]
    return ProbeResult(**{**document, "status": ProbeStatus(document["status"]), "devices": devices})
