"""``bitnet devices``: the devices of this machine, and whether a kernel gives the right result on each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from bitnet.core.cli.console import print_json, say, seconds
from bitnet.core.cli.options import json_option, verbose_option
from bitnet.core.errors import DeviceError, DeviceUnavailableError
from bitnet.core.support.units import size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bitnet.core.devices.plugin import BackendReport
    from bitnet.core.devices.proof import Proof
    from bitnet.core.devices.select import Selection
    from bitnet.core.hal import DeviceInfo


@click.command()
@verbose_option
@json_option
@click.option("--report", is_flag=True, help="Print what a report of a fault or a result needs, and nothing private.")
def devices(as_json: bool, report: bool) -> None:
    """List every backend and device, and run a kernel on each.

    For a backend that cannot be used, it says why and what to do about it. Each device multiplies a random ternary
    matrix, and the result must equal numpy's exactly; otherwise the exit status is 5. Every backend runs in a process
    of its own, so that a crash or a hang is reported like any other failure.
    """
    if as_json and report:
        raise click.UsageError("--report is text to be read, and --json is for programs: give one of them.")

    from bitnet.core.cli.device_report import machine_lines, private_left_out
    from bitnet.core.devices.document import backend_document, look
    from bitnet.core.devices.select import select_devices

    reports, proofs = look()
    selections: list[Selection] = []
    unavailable = None
    try:
        selections = select_devices()
    except DeviceUnavailableError as error:
        unavailable = error
    if as_json:
        print_json(
            {
                "selected": ",".join(selection.info.name for selection in selections) or None,
                "summary": "; ".join(selection.summary for selection in selections) or None,
                "backends": [backend_document(report, proofs) for report in reports],
            }
        )
    else:
        lines = [line for found in reports for line in _backend_lines(found, proofs)]
        if selections:
            lines += ["", *(selection.summary for selection in selections)]
        say(*(private_left_out([*machine_lines(), "", *lines]) if report else lines))
    if unavailable is not None:
        raise unavailable
    if not all(proof.passed for proof in proofs.values()):
        raise click.exceptions.Exit(DeviceError.exit_code)


def _backend_lines(report: BackendReport, proofs: Mapping[str, Proof]) -> list[str]:
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
    from bitnet.core.devices.document import details_of

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
    details = details_of(info, proof)
    lines += [f"  {'':<14} {details[name]}" for name in ("note", "verified") if details.get(name)]
    return lines
