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
    """The warning if nobody asked for a device and the CPU was chosen; ``level`` is the CPU's."""
    if unused := unused_gpus(reports):
        return f"{unused} Falling back to CPU ({level})."
    return f"No GPU detected; falling back to CPU ({level}). Set BITNET_LOG=debug for details."


def unused_gpus(reports: Mapping[str, BackendReport]) -> str:
    """For each GPU that is seen, a sentence that says why no backend uses it; empty if none is seen."""
    seen = () if env.names("BITNET_GPU_FAKE") else gpus.seen()
    return " ".join(f"This machine has {gpu}, but {_why_not(gpu, reports)}" for gpu in seen)


def withheld(backend: str) -> str:
    """What to do if this container was not given the GPU that a backend serves; empty if that is not the case."""
    lost = [gpu for gpu in gpus.seen() if gpu.withheld and backend in SERVING[gpu.vendor]]
    return f"This container has no access to {lost[0]}: {_GIVE[lost[0].vendor]}." if lost else ""


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
    if probe.status is ProbeStatus.OK:
        offered = ", ".join(f"{info.name} ({info.description})" for info in probe.devices)
        return " ".join(filter(None, (f"{report.name} offers only {offered}.", probe.reason, probe.hint)))
    return " ".join(filter(None, (f"{report.name} cannot use it:", probe.reason, probe.hint)))
