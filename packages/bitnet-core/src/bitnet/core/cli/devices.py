"""``bitnet devices``: what is here, and whether it works, found out by running a kernel on each device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from bitnet.core.cli.console import print_json, say, seconds, size
from bitnet.core.cli.options import json_option, verbose_option
from bitnet.core.errors import DeviceError, DeviceUnavailableError

if TYPE_CHECKING:
    from bitnet.core.devices.plugin import BackendReport
    from bitnet.core.devices.proof import Proof
    from bitnet.core.hal import DeviceInfo


@click.command()
@verbose_option
@json_option
def devices(as_json: bool) -> None:
    """List every backend and device, and run a kernel on each.

    A backend that cannot be used says why, and what to do about it. Each device multiplies a random ternary matrix and
    must give exactly what numpy does. Ends with status 5 where one does not. Every backend is tried in a process of its
    own, so that one that crashes or hangs is told of like any other.
    """
    from bitnet.core.devices.examine import examine_all
    from bitnet.core.devices.registry import available, with_missing
    from bitnet.core.devices.select import select_device

    plugins = available()
    examined = examine_all(plugins)
    reports = with_missing([found.report for found in examined], plugins)
    proofs = {name: proof for found in examined for name, proof in found.proofs.items()}
    selection, unavailable = None, None
    try:
        selection = select_device()
    except DeviceUnavailableError as error:
        unavailable = error
    if as_json:
        print_json(
            {
                "selected": selection and selection.info.name,
                "summary": selection and selection.summary,
                "backends": [_backend_document(report, proofs) for report in reports],
            }
        )
    else:
        say(*(line for report in reports for line in _backend_lines(report, proofs)))
        if selection is not None:
            say("", selection.summary)
    if unavailable is not None:
        raise unavailable
    if not all(proof.passed for proof in proofs.values()):
        raise click.exceptions.Exit(DeviceError.exit_code)


def _backend_document(report: BackendReport, proofs: dict[str, Proof]) -> dict[str, Any]:
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
        "details": _details(info, proof),
        "proof": {"passed": proof.passed, "seconds": proof.time, "error": proof.error},
    }


def _backend_lines(report: BackendReport, proofs: dict[str, Proof]) -> list[str]:
    probe = report.probe
    origin = f"{report.distribution} {report.version}".strip() or "not installed"
    versions = ", ".join(f"{name} {version}" for name, version in probe.versions.items())
    lines = [f"{report.name:<12} {probe.status.value:<16} {origin}{f' ({versions})' if versions else ''}"]
    lines += [f"  {text}" for text in (probe.reason, probe.hint and f"Hint: {probe.hint}") if text]
    if not probe.devices:
        lines += [f"  tried {library}: {message or 'opened'}" for library, message in probe.tried.items()]
    for info in probe.devices:
        lines += _device_lines(info, proofs[info.name])
    return lines


def _device_lines(info: DeviceInfo, proof: Proof) -> list[str]:
    verdict = "pass" if proof.passed else "FAIL"
    facts = [info.description, info.type.value]
    if info.memory:
        facts.append(size(info.memory))
    if info.driver_version:
        facts.append(f"driver {info.driver_version}")
    if info.features:
        facts.append(" ".join(info.features))
    lines = [f"  {info.name:<14} {verdict} {seconds(proof.time):>8}   {', '.join(facts)}"]
    if proof.error:
        lines.append(f"  {'':<14} {proof.error}")
    details = _details(info, proof)
    lines += [f"  {'':<14} {details[name]}" for name in ("note", "verified") if details.get(name)]
    return lines


def _details(info: DeviceInfo, proof: Proof) -> dict[str, str]:
    """A device's details. One that has just computed a product rightly is verified, whatever its probe found."""
    return {name: text for name, text in info.details.items() if not (name == "verified" and proof.passed)}
