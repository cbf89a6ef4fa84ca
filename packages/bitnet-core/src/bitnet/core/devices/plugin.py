"""One backend: loaded and probed on demand. Its failures do not affect other backends.

Its code and its driver run in this process, where a crash cannot be caught. So a marker exists while they run
(:mod:`~bitnet.core.devices.crashes`). A backend that left a marker behind is first tested in a child
(:mod:`~bitnet.core.devices.examine`).
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import TypeAlias, TypeVar

from bitnet.core.devices import crashes
from bitnet.core.errors import BitNetError, DeviceError, DeviceUnavailableError, brief
from bitnet.core.hal import HAL_API, Backend, Device, DeviceInfo, DeviceType, OpenOptions, ProbeResult, ProbeStatus
from bitnet.core.support import foreign_output, log, requirement, system

PROBE_SECONDS = 30.0
"""Seconds after which a driver that has not answered counts as broken, so that it cannot block everything."""

_T = TypeVar("_T")

Retry: TypeAlias = Callable[["Plugin", Mapping[Path, str]], Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class BackendReport:
    """What is known about a backend on this machine.

    Attributes:
        distribution: The installed distribution it comes from; empty if it is not installed but its GPU was seen.
        probe: The probe's result; ``broken`` or ``unsupported`` if it could not be probed.
        error: The exception of its import or probe, if these ran in this process.
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
    """One backend, loaded and probed once, on demand.

    Args:
        load: Returns the backend.
        requires: The distribution's requirements, as in its metadata. One that excludes this bitnet-core refuses the
            backend before its code is imported.
        retry: Tests, in a child, backends and devices that crashed a process before; returns how each ended the child,
            by name. None for a backend in our own package, which neither crashes nor prints.
    """

    def __init__(
        self,
        name: str,
        distribution: str,
        version: str,
        load: Callable[[], object],
        retry: Retry | None = None,
        requires: Sequence[str] = (),
    ) -> None:
        self.name, self.distribution, self.version = name, distribution, version
        self._load, self._retry, self._requires = load, retry, requires
        self._loaded: Backend | BackendReport | None = None
        self._report: BackendReport | None = None
        self._crashes: Mapping[str, str] | None = None if retry else {}
        self._lock = threading.RLock()

    def report(self) -> BackendReport:
        """The result of the backend's probe. Errors of the backend are never raised."""
        with self._lock:
            if self._report is None:
                crashed = self._crashed_again()
                report = self.broken(crashed[self.name]) if self.name in crashed else self.examine()
                self._report = without(report, crashed)
                _log_report(self._report)
            return self._report

    def adopt(self, report: BackendReport, crashed: Mapping[str, str]) -> None:
        """Use a child's findings, including its crashes, as the result of :meth:`report`."""
        with self._lock:
            self._report, self._crashes = without(report, crashed), crashed

    def forget(self) -> None:
        """Forget the result of :meth:`report`, as the devices may be others now."""
        with self._lock:
            self._report = None

    def trust(self) -> None:
        """Ignore earlier crashes: for the child that tests the backend."""
        self._crashes = {}

    def examine(self) -> BackendReport:
        """Probe now, in this process."""
        with self._lock:
            loaded = self._import()
            if isinstance(loaded, BackendReport):
                return loaded
            try:
                with self.guard(self.name):
                    result = _in_time(lambda: _checked(self.name, loaded.probe()))
            except _Failed as failed:
                hint = f"Report it to the makers of {self.distribution}; BITNET_LOG=debug shows the traceback."
                return self._failed(failed.error, hint)
            return BackendReport(self.name, self.distribution, self.version, result)

    def backend(self) -> Backend:
        """The backend itself; this does not probe.

        Raises:
            DeviceUnavailableError: It cannot be loaded.
        """
        with self._lock:
            crashed = self._crashed_again()
            loaded = self.broken(crashed[self.name]) if self.name in crashed else self._import()
        if isinstance(loaded, BackendReport):
            raise DeviceUnavailableError(f"{self.name}: {loaded.probe.reason}", hint=loaded.probe.hint or None)
        return loaded

    def open(self, info: DeviceInfo, options: OpenOptions) -> Device:
        """Open exactly this device.

        Raises:
            DeviceUnavailableError: The backend cannot be loaded.
            DeviceError: The device cannot be opened.
        """
        backend = self.backend()
        try:
            with self.guard(info.name):
                device = backend.open(info, options)
            if not isinstance(device, Device):
                raise TypeError(f"what was opened is {brief(device)}, which is not a device")
        except BitNetError:
            raise
        except BaseException as error:
            signalled = not isinstance(
                error, Exception | SystemExit
            )  # Ctrl-C, or an exception raised for another signal
            if signalled and threading.current_thread() is threading.main_thread():
                raise
            log.logger.debug("%s cannot be opened", info.name, exc_info=True)
            raise DeviceError(f"it cannot be opened: {_described(error)}", device=info.name) from error
        return device

    @contextlib.contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Wrap calls of its code or driver: a crash leaves a marker, and its output stays out of our answers.

        Args:
            what: The backend, or one of its devices, by name.
        """
        if self._retry is None:
            yield
            return
        with foreign_output.to_stderr(), crashes.watching(what):
            yield

    def broken(self, reason: str) -> BackendReport:
        """The report of a backend that has crashed."""
        result = ProbeResult(ProbeStatus.BROKEN, reason=reason, hint=f"Fix its driver, or remove {self.distribution}.")
        return BackendReport(self.name, self.distribution, self.version, result)

    def _crashed_again(self) -> Mapping[str, str]:
        """The backends and devices that crashed an earlier process and also crash a child, and how the child ended."""
        if self._crashes is None:
            self._crashes = {}
            if self._retry is not None and (marks := crashes.left_by(self.name)):
                self._crashes = self._retry(self, marks)
        return self._crashes

    def _import(self) -> Backend | BackendReport:
        """The backend, or a report that says why it cannot be used."""
        if self._loaded is None and (versions := requirement.unmet(self._requires)):
            self._loaded = self._refused(
                f"needs bitnet-core {versions}, but {system.core_version()} is installed.", self._both()
            )
        if self._loaded is None:
            try:
                with self.guard(self.name):
                    self._loaded = _in_time(lambda: self._accepted(self._load()))
            except _Failed as failed:
                self._loaded = self._not_imported(failed.error)
        return self._loaded

    def _not_imported(self, error: BaseException) -> BackendReport:
        """The report of a backend whose import raised an error."""
        if isinstance(error, ImportError):
            if shadow := shadowed():
                return self._failed(error, shadow)
            if f"{error.name}.".startswith("bitnet.core."):
                return self._refused(f"was made for another bitnet-core: {_described(error)}.", self._both(), error)
        return self._failed(error, f"pip install --force-reinstall {self.distribution}")

    def _both(self) -> str:
        """The command that installs versions of the core and of the backend that fit."""
        return f"pip install --upgrade bitnet-core {self.distribution}"

    def _refused(self, why: str, hint: str, error: BaseException | None = None) -> BackendReport:
        """The report of a backend that does not fit this bitnet-core."""
        refusal = ProbeResult(ProbeStatus.UNSUPPORTED, reason=f"{self.distribution} {self.version} {why}", hint=hint)
        return BackendReport(self.name, self.distribution, self.version, refusal, error)

    def _failed(self, error: BaseException, hint: str) -> BackendReport:
        result = ProbeResult(ProbeStatus.BROKEN, reason=_described(error).removesuffix(".") + ".", hint=hint)
        return BackendReport(self.name, self.distribution, self.version, result, error)

    def _accepted(self, backend: object) -> Backend | BackendReport:
        """The entry point's object, if it can be used as a backend."""
        made_for = getattr(backend, "hal_api", HAL_API)
        if made_for != HAL_API:
            newer = isinstance(made_for, int) and made_for > HAL_API
            return self._refused(
                f"implements version {made_for} of the hardware contract (HAL), this bitnet-core version {HAL_API}.",
                f"pip install --upgrade {'bitnet-core' if newer else self.distribution}",
            )
        if not isinstance(backend, Backend):
            lacking = [n for n in ("name", "hal_api", "probe", "open", "kernels") if not hasattr(backend, n)]
            raise TypeError(f"{backend!r} is not a backend: it lacks {', '.join(lacking)}")
        if backend.name != self.name:
            raise ValueError(f"its entry point is named {self.name!r}, but it calls itself {backend.name!r}")
        return backend


def without(report: BackendReport, crashed: Mapping[str, str]) -> BackendReport:
    """The report without the devices that crash, with a warning for each; ``broken`` if none is left."""
    lost = [info.name for info in report.probe.devices if info.name in crashed]
    if not lost:
        return report
    left = [info for info in report.probe.devices if info.name not in crashed]
    if not left:
        reason = " ".join(f"{name}: {crashed[name]}" for name in lost)
        hint = f"Fix its driver, or remove {report.distribution}."
        return replace(
            report, probe=replace(report.probe, status=ProbeStatus.BROKEN, devices=(), reason=reason, hint=hint)
        )
    for name in lost:
        log.once(logging.WARNING, f"The device {name} is left out: {crashed[name]}")
    return replace(report, probe=replace(report.probe, devices=left))


def shadowed() -> str | None:
    """What to do if PyPI's unrelated package ``bitnet`` hides our namespace; None if it is not installed."""
    package = sys.modules.get("bitnet")
    if getattr(package, "__file__", None) is None:
        return None
    return "Another package named bitnet hides parts of this one: pip uninstall bitnet, then install bitnet-core again."


class _Failed(Exception):
    """A plug-in raised ``error``, or did not answer."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def _in_time(function: Callable[[], _T]) -> _T:
    """Call a plug-in's function with a time limit. If it hangs, its thread is abandoned, as nothing can end it.

    ``SystemExit`` and ``KeyboardInterrupt`` count as failures, too: a plug-in must not end the program, and a user's
    interrupt arrives in the caller's thread, which waits here.

    Raises:
        _Failed: It raised an exception, or did not return within :data:`PROBE_SECONDS`.
    """
    outcome: list[tuple[_T | None, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((function(), None))
        except BaseException as error:
            outcome.append((None, error))

    if system.THREADS:
        thread = threading.Thread(target=run, name="bitnet-probe", daemon=True)
        thread.start()
        thread.join(PROBE_SECONDS)
    else:
        run()
    if not outcome:
        raise _Failed(TimeoutError(f"no answer within {PROBE_SECONDS:g} s"))
    value, error = outcome[0]
    if error is not None:
        raise _Failed(error)
    return value  # type: ignore[return-value]


def _described(error: BaseException) -> str:
    """An exception of foreign code, in one line."""
    try:
        text = str(error)
    except Exception:
        text = ""
    return " ".join(f"{type(error).__name__}: {text}".split()).removesuffix(":")


def _checked(name: str, result: object) -> ProbeResult:
    """A probe's result after validation; raises an error, which makes the backend ``broken``, if it is invalid."""
    if not isinstance(result, ProbeResult):
        raise TypeError(f"its probe returned {type(result).__name__}, not ProbeResult")
    if not isinstance(result.status, ProbeStatus):
        raise TypeError(f"its probe returned the status {brief(result.status)}, not ProbeStatus")
    texts: list[object] = [result.reason, result.hint, *_texts(result.tried), *_texts(result.versions)]
    seen: set[str] = set()
    for info in result.devices:
        if not isinstance(info, DeviceInfo) or info.backend != name:
            raise TypeError(f"its probe returned {brief(info)}, which is not a device of {name}")
        texts += [info.index, info.id, info.description, info.vendor, info.driver_version, *info.features]
        texts += _texts(info.details)
        if not isinstance(info.type, DeviceType) or not isinstance(info.memory, Integral):
            raise TypeError(f"its probe returned a device of {brief(info.type)} with {brief(info.memory)} bytes")
        if not isinstance(info.step_tokens, Integral) or info.step_tokens < 0:
            raise TypeError(f"its probe returned a device with steps of {brief(info.step_tokens)} tokens")
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise TypeError(f"its probe returned {brief(wrong[0])} instead of a string")
    for info in result.devices:
        if not re.fullmatch(r"[a-z0-9._-]+", info.index) or info.index in seen:
            raise ValueError(f"its probe returned the index {info.index!r}, which is malformed or not its only one")
        seen.add(info.index)
    if result.status is ProbeStatus.OK and not result.devices:
        return ProbeResult(ProbeStatus.NO_DEVICE, (), "It found no device.", result.hint, result.tried, result.versions)
    return result


def _texts(facts: Mapping[str, str]) -> list[object]:
    return [text for pair in facts.items() for text in pair]


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
