"""Chooses the device: matches the request with the available devices, and falls back if they do not match."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bitnet.core.devices import registry
from bitnet.core.devices.advice import unused_gpus, why_the_cpu, withheld
from bitnet.core.devices.isolated import open_isolated
from bitnet.core.devices.options import open_options
from bitnet.core.devices.plugin import BackendReport, Plugin
from bitnet.core.devices.registry import GPU_ORDER
from bitnet.core.errors import DeviceError, DeviceUnavailableError, InvalidInputError
from bitnet.core.hal import Device, DeviceInfo, DeviceType, OpenOptions, ProbeStatus
from bitnet.core.support import env, helper, log

CPU_LEVELS = ("amx", "avx512", "avx2", "neon", "simd128", "scalar", "numpy")
"""Best first; ``numpy`` is the last resort if no native library fits."""

_DEFAULTS = OpenOptions()
_TYPE_ORDER = {DeviceType.DISCRETE: 0, DeviceType.INTEGRATED: 1, DeviceType.CPU: 2, DeviceType.VIRTUAL: 3}
_AUTOMATIC = (DeviceType.DISCRETE, DeviceType.INTEGRATED)
_ID = re.compile(
    r"((gpu|mig)-)?[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|([0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
)
"""Pattern of a device's UUID or PCI address."""


class Selection:
    """The chosen device, and how it was chosen.

    Attributes:
        requested: The request; ``auto`` if there was none.
        detected: The probed backends that have devices, best first.
        info: The chosen device; after :meth:`open`, the opened one.
        options: Options for opening the device.
        fake: Whether ``BITNET_GPU_FAKE`` affected the choice.
    """

    def __init__(
        self,
        requested: str,
        detected: Sequence[str],
        candidates: Sequence[DeviceInfo],
        options: OpenOptions = _DEFAULTS,
        *,
        fake: bool = False,
        warnings: Sequence[str] = (),
    ) -> None:
        self.requested, self.detected, self.options, self.fake = requested, tuple(detected), options, fake
        self._candidates = list(candidates)
        self._warnings = tuple(warnings)
        self.info = self._candidates[0]

    @property
    def summary(self) -> str:
        """The start-up line: ``requested=auto detected=[cuda, opencl, cpu] selected=cuda:0``."""
        return f"requested={self.requested} detected=[{', '.join(self.detected)}] selected={self.info.name}"

    def open(self, *, isolated: bool = False) -> Device:
        """Open the device. Once per process, the start-up line is logged (at INFO), and why it is no GPU (a warning).

        If it fails to open, a warning is logged and the next best device is opened; in strict mode only if no device
        was requested.

        Args:
            isolated: Open it in a process of its own, unless it is a CPU or this Python cannot start one.

        Raises:
            DeviceUnavailableError: No device opens.
        """
        for warning in self._warnings:
            log.once(logging.WARNING, warning)
        while True:
            try:
                if isolated and self.info.backend != "cpu" and not self.fake and helper.possible():
                    device = open_isolated(self.info, self.options)
                else:
                    device = registry.open_device(self.info, self.options)
            except (DeviceError, DeviceUnavailableError) as error:
                rest = self._candidates[self._candidates.index(self.info) + 1 :]
                if not rest:
                    said = f"{self.info.name} cannot be opened: {error.message}"
                    raise DeviceUnavailableError(said, hint=error.hint) from error
                log.logger.warning("%s cannot be opened; falling back to %s: %s", self.info.name, rest[0].name, error)
                self.info = rest[0]
            else:
                log.once(logging.INFO, self.summary)
                return device

    def __repr__(self) -> str:
        return f"<Selection {self.summary}>"


def select_device(request: str | None = None, *, threads: int | None = None, strict: bool | None = None) -> Selection:
    """Choose a device.

    Without a request, the best device: a discrete GPU, else an integrated one, else the CPU. Ties are resolved in the
    order CUDA, OpenCL, Vulkan, ROCm, Level Zero, Metal, WebGPU, other backends by name. ``BITNET_BACKEND_PRIORITY``
    overrides all of this. Only backends relevant to the request are probed: ``cpu`` opens no GPU driver.

    Args:
        request: ``auto``, ``cpu``, ``gpu``, a backend (``cuda``), a device (``cuda:1``), its UUID or other id, or a CPU
            level (``cpu:avx2``); None or empty: what ``BITNET_DEVICE`` says, else ``auto``.
        threads: CPU threads that the device computes with; None: ``BITNET_THREADS``, else one for each physical core.
        strict: If true, a missing requested device is an error and ``BITNET_GPU_FAKE`` is refused. If false, the CPU
            takes the device's place. None: ``BITNET_STRICT_MODE``, else false.

    Raises:
        InvalidInputError: There is no such name, or ``threads`` or a variable is out of its range.
        DeviceUnavailableError: The requested device is missing in strict mode, or no device works, not even the CPU.
    """
    log.from_environment()
    return _select(_requested(request), open_options(threads=threads, strict=strict))


def select_devices(
    request: str | None = None, *, threads: int | None = None, strict: bool | None = None
) -> list[Selection]:
    """Choose a device, or several for replicas of a model: ``cuda:0,cuda:1``, or ``cuda:*`` for all of a backend.

    Of several, missing ones are left out with a warning; if none is left, the CPU takes their place.

    Args:
        request: Requests as for :func:`select_device`, separated by commas; None or empty: ``BITNET_DEVICE``.
        threads, strict: As for :func:`select_device`.

    Raises:
        InvalidInputError: As for :func:`select_device`; or a device is named twice.
        DeviceUnavailableError: As for :func:`select_device`.
    """
    log.from_environment()
    requested, options = _requested(request), open_options(threads=threads, strict=strict)
    parts = [part.strip() for part in requested.split(",")]
    if not all(parts):
        raise InvalidInputError(f"{requested!r} is not a list of devices.", hint="Separate names with one comma each.")
    names = [name for part in parts for name in _expanded(part, options)]
    if len(names) == 1:
        return [_select(names[0], options)]
    found: dict[str, Selection] = {}
    for name in names:
        try:
            selection = _select(name, options, alone=False)
        except DeviceUnavailableError as error:
            if options.strict:
                raise
            log.logger.warning("%s", error)
            continue
        if selection.info.name in found:
            raise InvalidInputError(f"{requested} names {selection.info.name} twice; a device takes one replica.")
        found[selection.info.name] = selection
    return list(found.values()) or [_select(names[0], options)]


def _requested(request: str | None) -> str:
    """The request in lower case. An empty one counts as none, as an empty variable does."""
    return ((request or "").strip() or env.text("BITNET_DEVICE")).lower() or "auto"


def _expanded(part: str, options: OpenOptions) -> list[str]:
    """Expand ``cuda:*`` to the names of all its devices, or to ``cuda`` if there are none; keep other names."""
    backend, _, index = part.partition(":")
    if index != "*":
        return [part]
    if backend == "cpu":
        raise InvalidInputError(
            "cpu:* would use the same processor several times.", hint="Name levels (cpu:avx2,cpu:scalar), or use cpu."
        )
    plugin = registry.available(strict=options.strict).get(backend)
    devices = plugin.report().probe.devices if plugin is not None else ()
    return [info.name for info in devices] or [backend]


def _select(requested: str, options: OpenOptions, *, alone: bool = True) -> Selection:
    """Choose a device; with ``alone``, another device may take its place if it is missing."""
    plugins = registry.available(strict=options.strict)
    priority = _priority()
    reports = {name: plugins[name].report() for name in _concerned(requested, plugins)}
    found = [
        info for report in reports.values() if report.probe.status is ProbeStatus.OK for info in report.probe.devices
    ]
    found.sort(key=lambda info: _order(info, priority))  # stable: keeps each backend's own order
    cpus = [info for info in found if info.backend == "cpu"]
    detected = sorted({info.backend for info in found}, key=lambda name: _backend_order(name, priority))
    fake = bool(env.names("BITNET_GPU_FAKE"))

    candidates = [info for info in found if _matches(requested, info)]
    warnings: list[str] = []
    if requested == "auto":
        warnings = _warnings(candidates, reports, priority)
    else:
        if not candidates:
            missing = _missing(requested, found, plugins, reports)
            if options.strict or not alone or not cpus:
                raise DeviceUnavailableError(f"{requested} was asked for, but {missing.why}", hint=missing.hint or None)
            fallback = f"Falling back to CPU ({cpus[0].index})."
            said = f"{requested} was asked for, but {missing.why} {fallback} {missing.hint}"
            log.logger.warning("%s", said.rstrip())
        if not alone:
            del candidates[1:]
        elif not options.strict:
            candidates += [info for info in cpus if info not in candidates]
    if not candidates:
        cpu = reports["cpu"].probe
        raise DeviceUnavailableError(f"no device works, not even the CPU: {cpu.reason}", hint=cpu.hint or None)
    return Selection(requested, detected, candidates, options, fake=fake, warnings=warnings)


def _priority() -> tuple[str, ...]:
    priority = env.names("BITNET_BACKEND_PRIORITY")
    known = (*GPU_ORDER, *registry.installed())
    if unknown := [name for name in priority if name not in known]:
        raise InvalidInputError(
            f"BITNET_BACKEND_PRIORITY names {unknown[0]!r}; the backends are {', '.join(dict.fromkeys(known))}."
        )
    return priority


def _backend_order(name: str, priority: Sequence[str]) -> tuple[int, tuple[int, str]]:
    return priority.index(name) if name in priority else len(priority), registry.rank(name)


def _order(info: DeviceInfo, priority: Sequence[str]) -> tuple[object, ...]:
    """Sort key: backends with priority first; then discrete GPUs before integrated ones; the CPU last."""
    given, usual = _backend_order(info.backend, priority)
    of_type = _TYPE_ORDER[info.type]
    if info.backend in priority:
        return given, usual, of_type
    return given, info.backend == "cpu", of_type, usual


def _concerned(requested: str, plugins: Mapping[str, Plugin]) -> list[str]:
    """The backends to probe, always including the CPU.

    Raises:
        InvalidInputError: No device can have that name.
    """
    if requested in ("auto", "gpu") or _ID.fullmatch(requested):
        return list(plugins)
    backend, colon, index = requested.partition(":")
    if backend == "cpu":
        good = not colon or index in CPU_LEVELS
    elif backend in GPU_ORDER:
        good = not colon or (index.isascii() and index.isdecimal())
    else:
        good = backend in registry.installed() and (not colon or bool(index))
    if good:
        return list(dict.fromkeys([name for name in (backend, "cpu") if name in plugins]))
    devices = [info for plugin in plugins.values() for info in plugin.report().probe.devices]
    if requested in {info.id.lower() for info in devices}:
        return list(plugins)
    names = ", ".join(dict.fromkeys(["auto", "cpu", "gpu", *plugins, *(info.name for info in devices)]))
    raise InvalidInputError(f"there is no device {requested!r}.", hint=f"There are {names}; see bitnet devices.")


def _matches(requested: str, info: DeviceInfo) -> bool:
    """Whether a device matches the request. Emulated GPUs match only if named."""
    if requested == "auto":
        return info.backend == "cpu" or info.type in _AUTOMATIC
    if requested == "gpu":
        return info.backend != "cpu" and info.type in _AUTOMATIC
    return requested in (info.backend, info.name, info.id.lower())


def _warnings(
    candidates: Sequence[DeviceInfo], reports: Mapping[str, BackendReport], priority: Sequence[str]
) -> list[str]:
    """What to say about broken backends, and about an automatic choice of the CPU that nobody preferred."""
    on_cpu = candidates and all(info.backend == "cpu" for info in candidates) and "cpu" not in priority
    why = why_the_cpu(candidates[0].index, reports) if on_cpu else ""
    broken = [one for one in reports.values() if one.probe.status is ProbeStatus.BROKEN and one.probe.reason not in why]
    said = [f"The backend {one.name} is broken: {one.probe.reason} {one.probe.hint}".strip() for one in broken]
    return [*said, why] if why else said


class _Missing(NamedTuple):
    """Why a device is missing, as the end of a sentence, and what to do about it."""

    why: str
    hint: str


def _missing(
    requested: str, found: Sequence[DeviceInfo], plugins: Mapping[str, Plugin], reports: Mapping[str, BackendReport]
) -> _Missing:
    backend = requested.partition(":")[0]
    if requested == "gpu" and (unused := unused_gpus(reports)):
        return _Missing(f"no backend can use one. {unused}", "")
    if requested == "gpu":
        states = [f"{name}: {report.probe.status.value}" for name, report in reports.items() if name != "cpu"]
        probed = [*reports.values(), *registry.missing(plugins)]
        # no-permission goes first, as it means that a GPU exists; a missing driver may be for hardware that does not.
        probed.sort(key=lambda r: r.probe.status not in (ProbeStatus.OK, ProbeStatus.NO_PERMISSION))
        hints = [r.probe.hint for r in probed if r.name != "cpu"]
        why = f"there is no GPU that a backend can use ({', '.join(states) or 'no GPU backend is installed'})."
        return _Missing(why, next(filter(None, hints), "See bitnet devices."))
    if backend in (*GPU_ORDER, *registry.installed()) and backend not in plugins:
        if env.names("BITNET_GPU_FAKE"):
            return _Missing("BITNET_GPU_FAKE hides it.", "")
        return _Missing(f"bitnet-{backend} is not installed.", f"pip install bitnet-{backend}")
    report = reports.get(backend)
    if report is not None and report.probe.status is not ProbeStatus.OK:
        hint = withheld(backend) or report.probe.hint
        return _Missing(f"{backend} is {report.probe.status.value}: {report.probe.reason}", hint)
    there = ", ".join(info.name for info in found if report is None or info.backend == backend)
    return _Missing(f"there are only {there or 'no devices'}.", "See bitnet devices.")
