"""Backends tried in child processes: one that crashes, exits or hangs there is reported, and ends nothing else.

All children are started at once and probe at the same time. Kernels are then run one child after another, as two
programs may not be able to have the same device. The child's side is :mod:`bitnet.core.devices.examinee`.
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
"""For a device to be opened and a kernel to be run; compiling the first takes some drivers many seconds."""
_LOOK_SECONDS = 0.5
"""How often it is looked whether a child lives that says nothing."""


@dataclass(frozen=True, slots=True)
class Examination:
    """A child's findings about a backend.

    Attributes:
        report: What the probe found; ``broken`` where it ended the child, or every device did.
        proofs: Proofs of the devices that were to be proven, by name.
        crashed: How the backend, or its devices, ended a child, by name.
    """

    report: BackendReport
    proofs: Mapping[str, Proof]
    crashed: Mapping[str, str]


class Ended(Exception):
    """A child has ended, or was ended, without an answer; the text is a sentence that says how, after its subject."""


def again(suspect: Plugin, marks: Mapping[Path, str]) -> Mapping[str, str]:
    """The marked backends and devices that also crash a child, with how it ended. The others are forgiven."""
    log.logger.info("An earlier process ended in %s; a child tries it first.", ", ".join(sorted({*marks.values()})))
    crashed: Mapping[str, str] = {}
    if child.possible():
        with _children([suspect]) as children:
            crashed = children[0].examine(set(marks.values())).crashed
    crashes.forget(marks)  # a child that crashes leaves a new one
    return crashed


def examine_all(plugins: Mapping[str, Plugin]) -> list[Examination]:
    """Every backend and all of its devices. What is found is what the plugins report from then on."""
    if not child.possible():
        return [_examine_here(plugin) for plugin in plugins.values()]
    marks = {path: what for name in plugins for path, what in crashes.left_by(name).items()}
    with _children(list(plugins.values())) as children:
        for examiner in children:
            with contextlib.suppress(Ended):  # it will say so when it is asked
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
    """Asks of one backend, of as many children as it takes."""

    def __init__(self, backend: Plugin) -> None:
        self._backend = backend
        self._child: _Child | None = None

    def begin(self) -> None:
        """Have a child begin to probe; does not wait."""
        if self._child is None:
            self._child = _Child(self._backend.name)

    def examine(self, wanted: Collection[str] | None = None) -> Examination:
        """What the probe finds, and whether the devices compute that are ``wanted``; None: all."""
        found = self._probe()
        if isinstance(found, str):
            report = self._backend.broken(found)
            return Examination(report, {}, {self._backend.name: found})
        proofs: dict[str, Proof] = {}
        crashed: dict[str, str] = {}
        for info in found.devices:
            if wanted is None or info.name in wanted:
                proofs[info.name] = self._prove(info, crashed)
        self.close()  # before the next may use the same device
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
        """What the probe found, or how it ended the child."""
        try:
            self.begin()
            assert self._child is not None
            return load_result(self._child.answer(plugin.PROBE_SECONDS))
        except Ended as ended:
            self.close()
            return f"It {ended} while it was probed."

    def _prove(self, info: DeviceInfo, crashed: dict[str, str]) -> Proof:
        began = time.perf_counter()
        if self._child is None and isinstance(found := self._probe(), str):  # the device before this ended the child
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
    """A process that probes a backend and then runs kernels on its devices when it is asked.

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
        """The answer to the request before; to the probe where there was none.

        Raises:
            Ended: The child has ended, or has not answered in time.
        """
        deadline = self._began + seconds
        while True:
            try:
                line = self._answers.get(timeout=max(0.0, min(_LOOK_SECONDS, deadline - time.monotonic())))
            except queue.Empty:
                # What a driver forked may hold our pipe, which then has no end when the child has.
                if self._process.poll() is None and time.monotonic() < deadline:
                    continue
                line = None
            if line is None:
                raise Ended(self._ending(seconds, deadline))
            try:
                return json.loads(line)
            except ValueError:
                raise Ended("answered with something else than a result") from None

    def close(self, patience: float) -> None:
        """Let it end; one that has not after so many seconds is killed."""
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
    """A probe's result as JSON has it."""
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
