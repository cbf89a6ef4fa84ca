"""The installed backends, each loaded and probed only when needed.

Entry points in the group ``bitnet.backends`` name the backends. The CPU is built in. A backend whose import or probe
raises or hangs is reported as ``broken`` with its error; the others still work.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache, partial
from pathlib import Path

from bitnet.core.devices.fake import HINT, FakeBackend
from bitnet.core.devices.options import open_options
from bitnet.core.devices.plugin import BackendReport, Plugin, shadowed
from bitnet.core.errors import DeviceUnavailableError, InvalidInputError
from bitnet.core.hal import AskingBackend, Device, DeviceInfo, OpenOptions, ProbeResult, ProbeStatus
from bitnet.core.support import env, gpus, log, system
from bitnet.core.support.entry_points import EntryPoint, entry_points

GROUP = "bitnet.backends"
GPU_ORDER = ("cuda", "opencl", "vulkan", "rocm", "level-zero", "metal", "webgpu")
"""Our own GPU backends, best first. Other packages' come next, by name, and the CPU last."""
SERVING = {
    "NVIDIA": ("cuda",),
    "AMD": ("opencl", "vulkan", "rocm"),
    "Intel": ("opencl", "vulkan", "level-zero"),
    "Apple": ("metal",),
}
"""The backends that serve each vendor's GPUs; the first one is recommended."""

_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_RESERVED = ("auto", "gpu", "none", "cpu")


def rank(name: str) -> tuple[int, str]:
    """Sort key of a backend in the usual order."""
    if name in GPU_ORDER:
        return GPU_ORDER.index(name), ""
    return len(GPU_ORDER) + (name == "cpu"), name


def available(*, strict: bool = False) -> Mapping[str, Plugin]:
    """The backends to choose from, in the usual order: the installed ones, or the fake ones of ``BITNET_GPU_FAKE``.

    Raises:
        DeviceUnavailableError: ``BITNET_GPU_FAKE`` is set in strict mode.
        InvalidInputError: ``BITNET_GPU_FAKE`` names an unknown backend.
    """
    real = installed()
    fakes = env.names("BITNET_GPU_FAKE")
    if not fakes:
        return real
    if strict:
        raise DeviceUnavailableError(
            f"BITNET_GPU_FAKE={env.text('BITNET_GPU_FAKE')} is refused in strict mode.",
            hint=HINT,
        )
    known = {*GPU_ORDER, *real} - {"cpu"}
    if fakes != ("none",) and (unknown := [name for name in fakes if name not in known]):
        raise InvalidInputError(
            f"BITNET_GPU_FAKE names {unknown[0]!r}; it must be 'none' alone, or any of {', '.join(sorted(known))}."
        )
    pretended = sorted(set(fakes) - {"none"}, key=rank)
    return {name: _fake(name, fakes.count(name)) for name in pretended} | {"cpu": real["cpu"]}


def list_devices() -> list[BackendReport]:
    """Every backend and its devices, best first, including backends that are not installed although their GPU is seen.

    Raises:
        DeviceUnavailableError, InvalidInputError: As :func:`available`.
    """
    log.from_environment()
    plugins = available(strict=open_options().strict)
    return with_missing([plugin.report() for plugin in plugins.values()], plugins)


def with_missing(reports: Sequence[BackendReport], plugins: Mapping[str, Plugin]) -> list[BackendReport]:
    """Reports, best first, including backends that are not installed although their GPU is seen."""
    more = [] if env.names("BITNET_GPU_FAKE") else missing(plugins)
    return sorted([*reports, *more], key=lambda report: rank(report.name))


def missing(plugins: Mapping[str, Plugin]) -> list[BackendReport]:
    """Backends for this machine's GPUs that are not installed. Opens no driver."""
    reports: dict[str, BackendReport] = {}
    for gpu in gpus.seen():
        for name in SERVING[gpu.vendor]:
            if name not in plugins and name not in reports:
                reason = f"This machine has {gpu}, but bitnet-{name} is not installed."
                result = ProbeResult(ProbeStatus.LIBRARY_MISSING, reason=reason, hint=f"pip install bitnet-{name}")
                reports[name] = BackendReport(name, "", "", result)
                log.logger.debug("%s %s", reason, result.hint)
    return list(reports.values())


def open_device(info: DeviceInfo, options: OpenOptions | None = None) -> Device:
    """Open exactly this device; without ``options``, with :func:`~bitnet.core.devices.options.open_options`.

    Raises:
        DeviceUnavailableError: Its backend is not installed.
        DeviceError: It cannot be opened.
    """
    plugin = available().get(info.backend)
    if plugin is None:
        raise DeviceUnavailableError(f"{info.name} is not available: {info.backend} is not installed.")
    return plugin.open(info, open_options() if options is None else options)


async def request(device: object) -> None:
    """Have each backend that must ask for its devices in a task do so, unless ``device`` names a CPU or is open."""
    if not (device is None or isinstance(device, str)) or (device or "").startswith("cpu"):
        return
    for plugin in installed().values():
        with suppress(DeviceUnavailableError):
            backend = plugin.backend()
            if isinstance(backend, AskingBackend):
                await backend.request()
                plugin.forget()


def computing(info: DeviceInfo) -> Callable[[], AbstractContextManager[None]]:
    """A context manager for compiling a program and for its first run, so that a crash of the driver is recorded."""
    plugin = available().get(info.backend)
    return nullcontext if plugin is None else partial(plugin.guard, info.name)


@cache
def installed() -> Mapping[str, Plugin]:
    """The installed backends in the usual order, found once per process, without importing them."""
    if shadow := shadowed():
        log.once(logging.WARNING, shadow)
    found: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(GROUP):
        found.setdefault(entry.name, []).append(entry)
    plugins = {"cpu": Plugin("cpu", "bitnet-core", system.core_version(), _load_cpu)}
    for name, offers in found.items():
        if name in _RESERVED or not _NAME.fullmatch(name):
            who = ", ".join(sorted({entry.distribution for entry in offers}))
            log.once(logging.WARNING, f"{who}: {name!r} cannot be the name of a backend; it is ignored.")
            continue
        # Independent of the order on disk: our own package of that name, else the first by name.
        offers.sort(key=lambda entry: (entry.distribution != f"bitnet-{name}", entry.distribution, entry.value))
        used = offers[0]
        if len(offers) > 1:
            who = " and ".join(f"{entry.distribution} {entry.version}" for entry in offers)
            log.once(logging.WARNING, f"{who} all offer the backend {name}; that of {used.distribution} is used.")
        plugins[name] = Plugin(name, used.distribution, used.version, used.load, _retry, used.requires)
    return dict(sorted(plugins.items(), key=lambda item: rank(item[0])))


def _retry(suspect: Plugin, marks: Mapping[Path, str]) -> Mapping[str, str]:
    from bitnet.core.devices import examine

    return examine.again(suspect, marks)


def _load_cpu() -> object:
    return importlib.import_module("bitnet.core.cpu.backend").BACKEND


def _fake(name: str, count: int) -> Plugin:
    return Plugin(name, "BITNET_GPU_FAKE", "", lambda: FakeBackend(name, count))
