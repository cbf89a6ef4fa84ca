"""The document about all tested backends and devices, for ``bitnet devices --json`` and the server's ``/devices``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bitnet.core.devices.examine import examine_all
from bitnet.core.devices.plugin import BackendReport
from bitnet.core.devices.proof import Proof
from bitnet.core.devices.registry import available, with_missing
from bitnet.core.hal import DeviceInfo


def look() -> tuple[Sequence[BackendReport], Mapping[str, Proof]]:
    """Reports of all backends, each tested in a process of its own, and the proofs by device name. Takes seconds."""
    plugins = available()
    examined = examine_all(plugins)
    reports = with_missing([found.report for found in examined], plugins)
    return reports, {name: proof for found in examined for name, proof in found.proofs.items()}


def backend_document(report: BackendReport, proofs: Mapping[str, Proof]) -> dict[str, Any]:
    """The entry of a backend and its devices; ``proofs`` are by device name."""
    probe = report.probe
    return {
        "name": report.name,
        "distribution": report.distribution,
        "version": report.version,
        "status": probe.status.value,
        "reason": probe.reason,
        "hint": probe.hint,
        "versions": dict(probe.versions),
        "tried": dict(probe.tried),
        "devices": [_device_document(info, proofs[info.name]) for info in probe.devices],
    }


def _device_document(info: DeviceInfo, proof: Proof) -> dict[str, Any]:
    return {
        "name": info.name,
        "id": info.id,
        "description": info.description,
        "vendor": info.vendor,
        "type": info.type.value,
        "memory": info.memory,
        "driver_version": info.driver_version,
        "features": list(info.features),
        "details": details_of(info, proof),
        "proof": {"passed": proof.passed, "seconds": proof.time, "error": proof.error},
    }


def details_of(info: DeviceInfo, proof: Proof) -> dict[str, str]:
    """A device's details. A device that has just computed a correct product counts as verified."""
    return {name: text for name, text in info.details.items() if not (name == "verified" and proof.passed)}
