"""The backends that are installed, held unloaded until needed, each loaded and probed in isolation.

A backend is what an entry point in the group ``bitnet.backends`` names. The CPU is built in. One whose import or probe
raises, or does not answer, is reported as ``broken`` with its error; the others still work.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from bitnet.core import env, log, system
from bitnet.core.errors import BitNetError, DeviceError, DeviceUnavailableError, InvalidInputError
from bitnet.core.fake import FakeBackend
from bitnet.core.hal import HAL_API, Backend, Device, DeviceInfo, ProbeResult, ProbeStatus

GROUP = "bitnet.backends"
GPU_ORDER = ("cuda", "opencl", "vulkan", "rocm", "level-zero", "metal", "webgpu")
"""Our own GPU backends, best first. Others' come after them by name, the CPU last."""
VENDOR_BACKENDS = {"NVIDIA": "cuda", "AMD": "opencl", "Intel": "opencl"}
"""The backend to install where a maker's GPU is seen; a wheel that does not exist yet is not recommended."""
PROBE_SECONDS = 30.0
"""A driver that has not answered by then is taken for broken, so that it does not hang everything."""

_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_RESERVED = ("auto", "gpu", "none", "cpu")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class BackendReport:
    """What is known of a backend on this machine.

    Attributes:
        distribution: The installed distribution it comes from; empty where there is none (its GPU was seen).
        probe: What its probe found; ``broken`` or ``unsupported`` where it could not be asked.
        error: What its import or its probe raised.
    """

    name: str
    distribution: str
    version: str
    probe: ProbeResult
    error: BaseException | None = None

    @property
    def installed(self) -> bool:
        return bool(self.distribution)


class Plugin:
    """One backend: loaded, and probed, when that is first asked for, once."""

    def __init__(self, name: str, distribution: str, version: str, load: Callable[[], object]) -> None:
        self.name, self.distribution, self.version = name, distribution, version
        self._load = load
        self._loaded: Backend | BackendReport | None = None
        self._report: BackendReport | None = None
        self._lock = threading.RLock()

    def report(self) -> BackendReport:
        """What the backend's probe finds. Never raises for what the backend does."""
        with self._lock:
            if self._report is None:
                self._report = self._probe()
                _log_report(self._report)
            return self._report

    def backend(self) -> Backend:
        """The backend itself; this does not probe.

        Raises:
            DeviceUnavailableError: It cannot be loaded.
        """
        with self._lock:
            loaded = self._import()
        if isinstance(loaded, BackendReport):
            raise DeviceUnavailableError(f"{self.name}: {loaded.probe.reason}", hint=loaded.probe.hint or None)
        return loaded

    def _import(self) -> Backend | BackendReport:
        """The backend, or the report of why it cannot be used."""
        if self._loaded is None:
            try:
                backend = _in_time(self._load)
                refusal = self._refusal(backend)
                if refusal is not None:
                    self._loaded = BackendReport(self.name, self.distribution, self.version, refusal)
                else:
                    assert isinstance(backend, Backend)
                    self._loaded = backend
            except BaseException as error:
                hint = f"pip install --force-reinstall {self.distribution}"
                self._loaded = self._broken(error, (isinstance(error, ImportError) and shadowed()) or hint)
        return self._loaded

    def _probe(self) -> BackendReport:
        loaded = self._import()
        if isinstance(loaded, BackendReport):
            return loaded
        try:
            result = _checked(self.name, _in_time(loaded.probe))
        except BaseException as error:
            hint = f"Report it to the makers of {self.distribution}; BITNET_LOG=debug shows where it is."
            return self._broken(error, hint)
        return BackendReport(self.name, self.distribution, self.version, result)

    def _broken(self, error: BaseException, hint: str) -> BackendReport:
        if isinstance(error, KeyboardInterrupt):
            raise error
        reason = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(".") + "."
        result = ProbeResult(ProbeStatus.BROKEN, reason=reason, hint=hint)
        return BackendReport(self.name, self.distribution, self.version, result, error)

    def _refusal(self, backend: object) -> ProbeResult | None:
        """Why what the entry point named cannot be used, if it cannot."""
        made_for = getattr(backend, "hal_api", HAL_API)
        if made_for != HAL_API:
            reason = f"{self.distribution} {self.version} speaks version {made_for} of the hardware contract (HAL), "
            reason += f"this bitnet-core version {HAL_API}."
            newer = isinstance(made_for, int) and made_for > HAL_API
            hint = f"pip install --upgrade {'bitnet-core' if newer else self.distribution}"
            return ProbeResult(ProbeStatus.UNSUPPORTED, reason=reason, hint=hint)
        if not isinstance(backend, Backend):
            lacking = [n for n in ("name", "hal_api", "probe", "open", "kernels") if not hasattr(backend, n)]
            raise TypeError(f"{backend!r} is no backend: it lacks {', '.join(lacking)}")
        if backend.name != self.name:
            raise ValueError(f"its entry point is named {self.name!r}, it calls itself {backend.name!r}")
        return None


def rank(name: str) -> tuple[int, str]:
    """Where a backend stands in the usual order."""
    if name in GPU_ORDER:
        return GPU_ORDER.index(name), ""
    return len(GPU_ORDER) + (name == "cpu"), name


def available() -> Mapping[str, Plugin]:
    """The backends to choose from, in the usual order: those installed, or those that ``BITNET_GPU_FAKE`` pretends.

    Raises:
        DeviceUnavailableError: Strict mode refuses ``BITNET_GPU_FAKE``.
        InvalidInputError: ``BITNET_GPU_FAKE`` names no backend.
    """
    real = installed()
    fakes = env.names("BITNET_GPU_FAKE")
    if not fakes:
        return real
    if env.flag("BITNET_STRICT_MODE"):
        raise DeviceUnavailableError(
            f"BITNET_GPU_FAKE={env.text('BITNET_GPU_FAKE')} is refused in strict mode.",
            hint="Unset BITNET_GPU_FAKE or BITNET_STRICT_MODE.",
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
    plugins = available()
    reports = [plugin.report() for plugin in plugins.values()]
    if not env.names("BITNET_GPU_FAKE"):
        reports += missing(plugins)
    return sorted(reports, key=lambda report: rank(report.name))


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


def offered(name: str) -> bool:
    """Whether there is a wheel ``bitnet-<name>`` to install, by the extras of this bitnet-core."""
    try:
        extras = importlib.metadata.metadata("bitnet-core").get_all("Provides-Extra") or []
    except importlib.metadata.PackageNotFoundError:
        return False
    return {"level-zero": "oneapi"}.get(name, name) in extras


def open_device(info: DeviceInfo) -> Device:
    """Open exactly this device.

    Raises:
        DeviceUnavailableError: Its backend is gone.
        DeviceError: It cannot be opened.
    """
    plugin = available().get(info.backend)
    if plugin is None:
        raise DeviceUnavailableError(f"{info.name} is not there: {info.backend} is not installed.")
    try:
        return plugin.backend().open(info)
    except BitNetError:
        raise
    except Exception as error:
        log.logger.debug("%s cannot be opened", info.name, exc_info=True)
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise DeviceError(f"it cannot be opened: {what}", device=info.name) from error


def shadowed() -> str | None:
    """What to do where PyPI's unrelated package ``bitnet`` hides our namespace, which it can; None where it is not."""
    package = sys.modules.get("bitnet")
    if getattr(package, "__file__", None) is None:
        return None
    return "Another package named bitnet hides parts of this one: pip uninstall bitnet, then install bitnet-core again."


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
        plugins[name] = Plugin(name, distribution, version, entry.load)
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


def _load_cpu() -> object:
    return importlib.import_module("bitnet.core.cpu.backend").BACKEND


def _fake(name: str, count: int) -> Plugin:
    return Plugin(name, "BITNET_GPU_FAKE", "", lambda: FakeBackend(name, count))


def _in_time(function: Callable[[], _T]) -> _T:
    """What ``function`` returns or raises, or TimeoutError; its thread is left behind then, as nothing can end it."""
    outcome: list[tuple[_T | None, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((function(), None))
        except BaseException as error:  # SystemExit too: a plug-in does not end the program
            outcome.append((None, error))

    thread = threading.Thread(target=run, name="bitnet-probe", daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    if not outcome:
        raise TimeoutError(f"no answer within {PROBE_SECONDS:g} s")
    value, error = outcome[0]
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def _checked(name: str, result: object) -> ProbeResult:
    """A probe's result, if the rest of bitnet can rely on it; raises what makes the backend ``broken``."""
    if not isinstance(result, ProbeResult):
        raise TypeError(f"its probe returned {type(result).__name__}, not ProbeResult")
    ProbeStatus(result.status)  # raises where it is none
    seen: set[str] = set()
    for info in result.devices:
        if not isinstance(info, DeviceInfo) or info.backend != name:
            raise TypeError(f"its probe returned {info!r}, which is no device of {name}")
        if not re.fullmatch(r"[a-z0-9._-]+", info.index) or info.index in seen:
            raise ValueError(f"its probe returned the index {info.index!r}, which is malformed or not its only one")
        seen.add(info.index)
    if result.status is ProbeStatus.OK and not result.devices:
        return ProbeResult(ProbeStatus.NO_DEVICE, (), "It found no device.", result.hint, result.tried, result.versions)
    return result


def _log_report(report: BackendReport) -> None:
    probe = report.probe
    devices = ", ".join(f"{info.name} ({info.description}, {info.type.value})" for info in probe.devices)
    text = " ".join(part for part in (devices, probe.reason, probe.hint) if part)
    log.logger.debug(
        "backend %s (%s %s): %s. %s", report.name, report.distribution, report.version, probe.status.value, text,
        exc_info=report.error,
    )  # fmt: skip
    for library, message in probe.tried.items():
        log.logger.debug("backend %s: %s: %s", report.name, library, message or "opened")
