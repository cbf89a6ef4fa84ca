"""Finds and opens Level Zero devices. Importing this module opens no driver; only the probe does."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping

from bitnet.core.errors import DeviceError, DeviceUnavailableError
from bitnet.core.gpu.probing import denied_nodes, device_nodes, no_library, no_permission
from bitnet.core.hal import Device, DeviceInfo, OpenOptions, ProbeResult, ProbeStatus
from bitnet.core.support.dynlib import Library, open_library

NODES = ("dri/renderD*",)
"""Device nodes that Intel's driver opens, under /dev."""
INSTALL = "Install Intel's Level Zero driver and its loader (Debian: libze-intel-gpu1 or intel-opencl-icd, and libze1)."
UPDATE = "Update Intel's GPU driver."
LOOK = "Check that the system sees an Intel GPU: lspci"
OPEN = {
    ProbeStatus.DRIVER_MISSING: INSTALL,
    ProbeStatus.NO_PERMISSION: "Let this user read the loader's library and what it depends on.",
    ProbeStatus.BROKEN: "Reinstall the Level Zero loader (Debian: apt install --reinstall libze1).",
}
"""Hints for a loader that does not open."""


class LevelZeroBackend:
    """Intel GPUs by Intel's own driver."""

    name = "level-zero"
    hal_api = 3

    def probe(self) -> ProbeResult:
        from bitnet.level_zero.loader import loader

        found = loader()
        if found:
            return _probe(found)
        if not found.tried:
            reason = f"Level Zero exists only on Linux and Windows; this system is {sys.platform}."
            return ProbeResult(ProbeStatus.UNSUPPORTED, reason=reason, hint="See bitnet devices for others.")
        return no_library("The Level Zero loader", found, OPEN)

    def open(self, info: DeviceInfo, options: OpenOptions) -> Device:
        from bitnet.core.gpu.clc import open_device
        from bitnet.level_zero.device import LevelZeroDriver
        from bitnet.level_zero.hardware import devices
        from bitnet.level_zero.loader import LevelZero, loader

        level_zero = LevelZero(loader(), info.name)
        for index, hardware in enumerate(devices(level_zero)):
            if str(index) == info.index and hardware.info(index).id == info.id:
                driver = LevelZeroDriver(level_zero, hardware, info.name)
                return open_device(info, driver, driver.abilities, self_check=True)
        raise DeviceUnavailableError(f"{info.name} is gone since it was probed.", hint="See bitnet devices.")

    def kernels(self) -> Collection[str]:
        from bitnet.core.gpu.clc import sources

        return sources("bitnet.level_zero", self.name, vendors=("intel",)).names()


def _probe(found: Library) -> ProbeResult:
    from bitnet.core.gpu.checks.verified import marked
    from bitnet.level_zero.hardware import NEEDED, api_version, devices
    from bitnet.level_zero.loader import LevelZero

    needed = ".".join(map(str, NEEDED))
    versions = {"level-zero-needed": needed}

    def result(status: ProbeStatus, reason: str, hint: str) -> ProbeResult:
        return ProbeResult(status, reason=reason, hint=hint, tried=found.tried, versions=versions)

    try:
        level_zero = LevelZero(found)
    except DeviceError as error:  # a loader without one of the functions
        return result(ProbeStatus.DRIVER_TOO_OLD, error.message, error.hint or UPDATE)
    try:
        drivers = level_zero.drivers()
        has = [api_version(level_zero, driver) for driver in drivers]
        usable = [marked(hardware.info(i)) for i, hardware in enumerate(devices(level_zero))]
    except DeviceError as error:
        return _no_driver(error, found.tried, versions)
    versions["level-zero"] = ", ".join(".".join(map(str, version)) for version in has)
    if usable:
        return ProbeResult(ProbeStatus.OK, usable, tried=found.tried, versions=versions)
    if has and max(has) < NEEDED:
        reason = f"Level Zero {needed} is needed; the driver has {versions['level-zero']}."
        return result(ProbeStatus.DRIVER_TOO_OLD, reason, UPDATE)
    if not has:
        return _nobody("The Level Zero loader found no driver", found.tried, versions)
    if denied := denied_nodes(NODES):
        return no_permission(denied, tried=found.tried, versions=versions)
    return result(ProbeStatus.NO_DEVICE, "The Level Zero driver offers no GPU with half precision.", LOOK)


def _no_driver(error: DeviceError, tried: Mapping[str, str], versions: Mapping[str, str]) -> ProbeResult:
    """The result if no driver starts. Drivers without a device report that they are not initialised."""
    from bitnet.level_zero.loader import INSUFFICIENT_PERMISSIONS, UNINITIALIZED, LevelZeroError

    if isinstance(error, LevelZeroError) and error.result in (UNINITIALIZED, INSUFFICIENT_PERMISSIONS):
        return _nobody(error.message, tried, versions)
    hint = error.hint or "Reinstall Intel's GPU driver; the system's log may say more."
    return ProbeResult(ProbeStatus.BROKEN, reason=error.message, hint=hint, tried=tried, versions=versions)


def _nobody(message: str, tried: Mapping[str, str], versions: Mapping[str, str]) -> ProbeResult:
    """The result if no driver is ready: none is installed, this user may not open the device, or there is no device."""
    from bitnet.level_zero.loader import DRIVER

    if denied := denied_nodes(NODES):
        return no_permission(denied, tried=tried, versions=versions)
    driver = open_library(DRIVER if sys.platform == "linux" else ())
    tried = {**tried, **driver.tried}
    if sys.platform == "linux" and not driver:
        return ProbeResult(ProbeStatus.DRIVER_MISSING, reason=message, hint=INSTALL, tried=tried, versions=versions)
    nodes = ", ".join(map(str, device_nodes(NODES)))
    reason = f"{message} The driver opens, but it takes none of {nodes}." if nodes else f"{message} No GPU is there."
    return ProbeResult(ProbeStatus.NO_DEVICE, reason=reason, hint=LOOK, tried=tried, versions=versions)


BACKEND = LevelZeroBackend()
