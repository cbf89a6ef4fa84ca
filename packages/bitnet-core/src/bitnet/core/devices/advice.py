"""What to tell a user whose model runs on the CPU because no GPU could be chosen."""

from __future__ import annotations

from collections.abc import Mapping

from bitnet.core.devices.plugin import BackendReport
from bitnet.core.devices.registry import SERVING
from bitnet.core.hal import ProbeStatus
from bitnet.core.support import env, gpus
from bitnet.core.support.gpus import Gpu

_GIVE = {
    "NVIDIA": "start it with --gpus all",
    "AMD": "start it with --device /dev/kfd --device /dev/dri",
    "Intel": "start it with --device /dev/dri",
}
"""How Docker and Podman give a GPU to a container."""


def why_the_cpu(level: str, reports: Mapping[str, BackendReport]) -> str:
    """For each GPU that is seen, why it is not used; ``level`` is the CPU's that is used instead."""
    seen = () if env.names("BITNET_GPU_FAKE") else gpus.seen()
    if not seen:
        return f"No GPU detected; falling back to CPU ({level}). Set BITNET_LOG=debug for details."
    sentences = [f"This machine has {gpu}, but {_why_not(gpu, reports)}" for gpu in seen]
    return " ".join([*sentences, f"Falling back to CPU ({level})."])


def _why_not(gpu: Gpu, reports: Mapping[str, BackendReport]) -> str:
    if gpu.withheld:
        return f"this container has no access to it: {_GIVE[gpu.vendor]}."
    serving = SERVING[gpu.vendor]
    installed = [reports[name] for name in serving if name in reports]
    if not installed:
        packages = [f"bitnet-{name}" for name in serving]
        none = f"none of {', '.join(packages[:-1])} and {packages[-1]}" if len(packages) > 1 else packages[0]
        return f"{none} is {'' if len(packages) > 1 else 'not '}installed: pip install {packages[0]}."
    return " ".join(_failure(report) for report in installed)


def _failure(report: BackendReport) -> str:
    probe = report.probe
    if probe.status is ProbeStatus.BROKEN:
        return f"{report.name} is broken."  # why, an earlier warning says
    if probe.status is ProbeStatus.OK:
        offered = ", ".join(f"{info.name} ({info.description})" for info in probe.devices)
        return " ".join(filter(None, (f"{report.name} offers only {offered}.", probe.reason, probe.hint)))
    return " ".join(filter(None, (f"{report.name} cannot use it:", probe.reason, probe.hint)))
