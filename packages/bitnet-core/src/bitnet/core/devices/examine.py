"""Tests backends in child processes: a crash, exit or hang there is reported and affects nothing else.

All children are started at once and probe at the same time. Kernels then run in one child after another, because some
devices cannot be opened by two programs. The child's side is :mod:`bitnet.core.devices.examinee`.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bitnet.core.devices import crashes, plugin
from bitnet.core.devices.plugin import BackendReport, Plugin
from bitnet.core.devices.proof import Proof, prove
from bitnet.core.hal import DeviceInfo, DeviceType, ProbeResult, ProbeStatus
from bitnet.core.support import log
from bitnet.core.support.helper import HelperEnded, HelperProcess, HelperStartError, Program, possible

PROOF_SECONDS = 60.0
"""Time limit in seconds to open a device and run a kernel; some drivers take many seconds to compile the first
kernel."""
MODULE = "bitnet.core.devices.examinee"
"""What a child runs."""


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


def again(suspect: Plugin, marks: Mapping[Path, str]) -> Mapping[str, str]:
    """The marked backends and devices that also crash a child, and how. Markers of the others are removed."""
    log.logger.info("An earlier process ended in %s; a child tries it first.", ", ".join(sorted({*marks.values()})))
    crashed: Mapping[str, str] = {}
    if possible():
        with _children([suspect]) as children:
            crashed = children[0].examine(set(marks.values())).crashed
    crashes.forget(marks)  # a child that crashes leaves a new marker
    return crashed


def examine_all(plugins: Mapping[str, Plugin]) -> list[Examination]:
    """Examine every backend and all of its devices. From then on the plugins report these findings."""
    if not possible():
        return [_examine_here(plugin) for plugin in plugins.values()]
    marks = {path: what for name in plugins for path, what in crashes.left_by(name).items()}
    with _children(list(plugins.values())) as children:
        for examiner in children:
            with contextlib.suppress(HelperStartError):  # it will be reported when the child is asked
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
        self._child: HelperProcess | None = None

    def begin(self) -> None:
        """Start a child that probes; does not wait.

        Raises:
            HelperStartError: It cannot be started.
        """
        if self._child is None:
            what = f"the backend {self._backend.name} is tried"
            self._child = HelperProcess(Program(MODULE, what, setup=log.level(), patience=1.0, stderr="shown"))
            self._send(plugin.PROBE_SECONDS)

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

    def close(self) -> None:
        if self._child is not None:
            self._child.end(wait=True)
            self._child = None

    def _probe(self) -> ProbeResult | str:
        """The probe's findings, or how it ended the child."""
        found = self._answer(plugin.PROBE_SECONDS, "while it was probed")
        return found if isinstance(found, str) else load_result(found)

    def _prove(self, info: DeviceInfo, crashed: dict[str, str]) -> Proof:
        began = time.perf_counter()
        if self._child is None and isinstance(found := self._probe(), str):  # the previous device ended the child
            return Proof(False, time.perf_counter() - began, found)
        self._send(PROOF_SECONDS, prove=info.index)
        proof = self._answer(PROOF_SECONDS, "while a kernel was run on it")
        if isinstance(proof, str):
            crashed[info.name] = proof
            return Proof(False, time.perf_counter() - began, proof)
        return Proof(**proof)

    def _send(self, seconds: float, **more: str) -> None:
        assert self._child is not None
        request = {"backend": self._backend.name, "seconds": seconds, **more}
        self._child.send(json.dumps(request).encode())

    def _answer(self, seconds: float, meanwhile: str) -> dict[str, Any] | str:
        """The child's answer, or how it ended instead."""
        try:
            self.begin()
            assert self._child is not None
            answer = json.loads(self._child.answer(seconds))
            if isinstance(answer, dict):
                return answer
            how = "answered with something other than a JSON object"
        except ValueError:
            how = "answered with something other than JSON"
        except HelperStartError as error:
            how = f"could not be tried ({error.reason})"
        except HelperEnded as error:
            how = str(error)
        self.close()
        return f"It {how} {meanwhile}."


@contextlib.contextmanager
def _children(backends: Sequence[Plugin]) -> Iterator[list[_Examiner]]:
    examiners = [_Examiner(backend) for backend in backends]
    try:
        yield examiners
    finally:
        for examiner in examiners:
            examiner.close()


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
