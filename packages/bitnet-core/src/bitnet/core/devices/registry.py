"""The backends that are installed, held unloaded until needed, each loaded and probed in isolation.

A backend is what an entry point in the group ``bitnet.backends`` names. The CPU is built in. One whose import or probe
raises, or does not answer, is reported as ``broken`` with its error; the others still work.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from pathlib import Path

from bitnet.core.devices.fake import HINT, FakeBackend
from bitnet.core.devices.options import open_options
from bitnet.core.devices.plugin import BackendReport, Plugin, shadowed
from bitnet.core.errors import DeviceUnavailableError, InvalidInputError
from bitnet.core.hal import Device, DeviceInfo, OpenOptions, ProbeResult, ProbeStatus
from bitnet.core.support import env, log, system

GROUP = "bitnet.backends"
GPU_ORDER = ("cuda", "opencl", "vulkan", "rocm", "level-zero", "metal", "webgpu")
"""Our own GPU backends, best first. Others' come after them by name, the CPU last."""
VENDOR_BACKENDS = {"NVIDIA": "cuda", "AMD": "opencl", "Intel": "opencl"}
"""The backend to install where a maker's GPU is seen; a wheel that does not exist yet is not recommended."""

_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_RESERVED = ("auto", "gpu", "none", "cpu")


def rank(name: str) -> tuple[int, str]:
    """Where a backend stands in the usual order."""
    if name in GPU_ORDER:
        return GPU_ORDER.index(name), ""
    return len(GPU_ORDER) + (name == "cpu"), name


def available(*, strict: bool = False) -> Mapping[str, Plugin]:
    """The backends to choose from, in the usual order: those installed, or those that ``BITNET_GPU_FAKE`` pretends.

    Raises:
        DeviceUnavailableError: ``strict``, and ``BITNET_GPU_FAKE`` is set.
        InvalidInputError: ``BITNET_GPU_FAKE`` names no backend.
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
    """Every backend and its devices, best first; backends that are missing although their GPU is seen are among them.

    Raises:
        DeviceUnavailableError, InvalidInputError: As :func:`available`.
    """
    log.from_environment()
    plugins = available(strict=open_options().strict)
    return with_missing([plugin.report() for plugin in plugins.values()], plugins)


def with_missing(reports: Sequence[BackendReport], plugins: Mapping[str, Plugin]) -> list[BackendReport]:
    """Reports, best first, and of backends that are missing although their GPU is seen."""
    more = [] if env.names("BITNET_GPU_FAKE") else missing(plugins)
    return sorted([*reports, *more], key=lambda report: rank(report.name))


def missing(plugins: Mapping[str, Plugin]) -> list[BackendReport]:
    """The backends that GPUs of this machine want and that are not installed. Opens no driver."""
    reports: dict[str, BackendReport] = {}
    for vendor in sorted(system.gpu_vendors()):
        name = VENDOR_BACKENDS[vendor]
        if name not in plugins and name not in reports:
            reason = f"A GPU of {vendor} is in this machine, but bitnet-{name} is not installed."
            result = ProbeResult(ProbeStatus.LIBRARY_MISSING, reason=reason, hint=f"pip install bitnet-{name}")
            reports[name] = BackendReport(name, "", "", result)
            log.logger.debug("%s %s", reason, result.hint)
    return list(reports.values())


def open_device(info: DeviceInfo, options: OpenOptions | None = None) -> Device:
    """Open exactly this device, with :func:`~bitnet.core.devices.options.open_options` where no others are given.

    Raises:
        DeviceUnavailableError: Its backend is gone.
        DeviceError: It cannot be opened.
    """
    plugin = available().get(info.backend)
    if plugin is None:
        raise DeviceUnavailableError(f"{info.name} is not there: {info.backend} is not installed.")
    return plugin.open(info, open_options() if options is None else options)


def computing(info: DeviceInfo) -> Callable[[], AbstractContextManager[None]]:
    """Contexts to compile a program in, or to run it first: a driver that ends the process then is known for it."""
    plugin = available().get(info.backend)
    return nullcontext if plugin is None else partial(plugin.guard, info.name)


@cache
def installed() -> Mapping[str, Plugin]:
    """The installed backends in the usual order, found once a process; none of them is imported."""
    if shadow := shadowed():
        log.once(logging.WARNING, shadow)
    found: dict[str, list[tuple[str, str, importlib.metadata.EntryPoint]]] = {}
    for distribution, version, entry in _entry_points():
        found.setdefault(entry.name, []).append((distribution, version, entry))
    plugins = {"cpu": Plugin("cpu", "bitnet-core", system.core_version(), _load_cpu)}
    for name, offers in found.items():
        if name in _RESERVED or not _NAME.fullmatch(name):
            who = ", ".join(sorted({distribution for distribution, _, _ in offers}))
            log.once(logging.WARNING, f"{who}: {name!r} cannot be the name of a backend; it is ignored.")
            continue
        # Deterministic whatever the order on disk: our own package of that name, else the first by name.
        offers.sort(key=lambda offer: (offer[0] != f"bitnet-{name}", offer[0], offer[2].value))
        distribution, version, entry = offers[0]
        if len(offers) > 1:
            who = " and ".join(f"{distribution} {version}" for distribution, version, _ in offers)
            log.once(logging.WARNING, f"{who} all offer the backend {name}; that of {distribution} is used.")
        plugins[name] = Plugin(name, distribution, version, entry.load, _retry)
    return dict(sorted(plugins.items(), key=lambda item: rank(item[0])))


def _entry_points() -> Iterator[tuple[str, str, importlib.metadata.EntryPoint]]:
    """Distribution, version and entry point. The first distribution of a name on the path counts, as for imports.

    ``importlib.metadata.entry_points()`` would let any distribution with a malformed file hide all the others.
    """
    seen: set[str] = set()
    for distribution in importlib.metadata.distributions():
        try:
            if GROUP not in (distribution.read_text("entry_points.txt") or ""):
                continue
            name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
            if name in seen:
                continue
            seen.add(name)
            entries = [entry for entry in distribution.entry_points if entry.group == GROUP]
            version = distribution.version
        except Exception as error:
            where = getattr(distribution, "_path", distribution)
            log.once(logging.WARNING, f"{where}: its entry points cannot be read ({error!r}); it is ignored.")
            continue
        for entry in entries:
            yield name, version, entry


def _retry(suspect: Plugin, marks: Mapping[Path, str]) -> Mapping[str, str]:
    from bitnet.core.devices import examine

    return examine.again(suspect, marks)


def _load_cpu() -> object:
    return importlib.import_module("bitnet.core.cpu.backend").BACKEND


def _fake(name: str, count: int) -> Plugin:
    return Plugin(name, "BITNET_GPU_FAKE", "", lambda: FakeBackend(name, count))
