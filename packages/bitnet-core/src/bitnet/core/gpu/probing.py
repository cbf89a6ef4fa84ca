"""Helpers for probes of GPU backends: device nodes that drivers open, and hints for failures."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bitnet.core.hal import DeviceInfo, DeviceType, ProbeResult, ProbeStatus
from bitnet.core.support.dynlib import Library

SMALLER = "Use a shorter context, fewer sequences, or another device."
"""The hint of an OutOfMemoryError."""
JOIN_GROUPS = "sudo usermod -aG render,video $USER, then log in again."
"""The hint if a user lacks permission for a GPU on Linux."""
_NO_GPU = {DeviceType.CPU, DeviceType.VIRTUAL}


def device_nodes(patterns: Iterable[str]) -> list[Path]:
    """The device nodes that match, such as ``dri/renderD*``, under Linux's ``/dev``."""
    if sys.platform != "linux":
        return []
    return [node for pattern in patterns for node in sorted(Path("/dev").glob(pattern))]


def denied_nodes(patterns: Iterable[str]) -> list[str]:
    """The matching device nodes that this user may not open."""
    return [str(node) for node in device_nodes(patterns) if not os.access(node, os.R_OK | os.W_OK)]


def no_permission(
    nodes: Iterable[str], *, tried: Mapping[str, str] = {}, versions: Mapping[str, str] = {}, hint: str = JOIN_GROUPS
) -> ProbeResult:
    """The result of a probe that found device nodes that this user may not open."""
    reason = f"This user may not open {', '.join(nodes)}."
    return ProbeResult(ProbeStatus.NO_PERMISSION, reason=reason, hint=hint, tried=tried, versions=versions)


def devices_found(
    devices: Sequence[DeviceInfo],
    patterns: Iterable[str],
    *,
    tried: Mapping[str, str] = {},
    versions: Mapping[str, str],
) -> ProbeResult:
    """The result of a probe that found devices.

    If none of them is a GPU (Mesa and PoCL provide devices that run on the CPU), it mentions a GPU's device nodes that
    this user may not open.
    """
    result = ProbeResult(ProbeStatus.OK, devices, tried=tried, versions=versions)
    if all(info.type in _NO_GPU for info in devices) and (denied := denied_nodes(patterns)):
        why = no_permission(denied)
        return replace(result, reason=why.reason, hint=why.hint)
    return result


def pocl_fault(versions: Mapping[str, str]) -> ProbeResult | None:
    """The result of a probe in which PoCL offered no device, as it cannot write its cache; None for another cause.

    Args:
        versions: The platforms found, by name.
    """
    given, home = os.environ.get("POCL_CACHE_DIR"), os.environ.get("HOME")
    above = os.environ.get("XDG_CACHE_HOME") or (f"{home}/.cache" if home else "/tmp")
    folder = Path(given or f"{above}/pocl/kcache")  # PoCL makes it where it can
    if "Portable Computing Language" not in versions or (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        return None
    reason = f"PoCL cannot write to its cache, {folder}, and offers no device without it."
    hint = "Let this user write there, or set POCL_CACHE_DIR to another folder."
    return ProbeResult(ProbeStatus.NO_DEVICE, reason=reason, hint=hint, versions=versions)


def no_library(what: str, library: Library, hints: Mapping[ProbeStatus, str], *, names: str = "") -> ProbeResult:
    """The result of a probe whose driver's library does not open.

    Args:
        what: The library as the beginning of a sentence, such as ``The Vulkan loader``.
        hints: What to do if it is missing, unreadable or broken.
        names: Replaces the list of tried names in the message.
    """
    statuses = {"no-permission": ProbeStatus.NO_PERMISSION, "broken": ProbeStatus.BROKEN}
    status = statuses.get(library.failure, ProbeStatus.DRIVER_MISSING)
    why = "; ".join(filter(None, library.tried.values())) if status is not ProbeStatus.DRIVER_MISSING else ""
    reason = f"{what} cannot be opened: {names or ', '.join(library.tried)}{f' ({why})' if why else ''}."
    return ProbeResult(status, reason=reason, hint=hints[status], tried=library.tried)
