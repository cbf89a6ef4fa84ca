"""Finds and opens Metal devices. Importing this module opens no library; only the probe does."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bitnet.core.errors import DeviceError, DeviceLostError, DeviceUnavailableError, OutOfMemoryError
from bitnet.core.hal import (
    FAMILY_FEATURES,
    KERNEL_FEATURES,
    PREPARES,
    Device,
    DeviceInfo,
    DeviceType,
    OpenOptions,
    ProbeResult,
    ProbeStatus,
)
from bitnet.core.hal.probe import TEST_DRIVER
from bitnet.core.support.log import logger

if TYPE_CHECKING:
    from bitnet.core.gpu import GpuDevice
    from bitnet.core.gpu.clc.vendors import Vendor
    from bitnet.metal.device import MetalDriver
    from bitnet.metal.objc import Objc

MIN_MACOS = (12, 0)
"""Minimum macOS version whose Metal supports the kernels' language, MSL 2.4."""
APPLE_7 = 1007
"""MTLGPUFamilyApple7: M1 and newer."""
APPLE_9 = 1009
"""MTLGPUFamilyApple9: M3 and newer."""
PARAVIRTUAL = "paravirtual"
"""Part of the device's name in Apple's virtual machines."""
GPU_CORES = 16
"""Assumed number of cores for splitting work, as Metal does not report it."""
MAX_THREADS = 1024
"""Maximum threads of a threadgroup on every Apple GPU."""
USE_CPU = "Use the CPU: --device cpu."


@dataclass(frozen=True, slots=True)
class System:
    """Version and build of macOS, such as ``(14, 5)`` and ``23F79``."""

    version: tuple[int, ...]
    build: str


class MetalBackend:
    """GPUs of Apple silicon with macOS 12 or newer."""

    name = "metal"
    hal_api = 3

    def probe(self) -> ProbeResult:
        result, objc, devices = _look()
        if objc is not None:
            for device in devices:
                objc.release(device)
        return result

    def open(self, info: DeviceInfo, options: OpenOptions) -> Device:
        from bitnet.core.gpu.checks.replay import wrong_replay

        result, objc, devices = _look()
        own = 0
        for found, there in zip(result.devices, devices, strict=True):
            if found.name == info.name:
                own = there
            elif objc is not None:
                objc.release(there)
        if objc is None or not own:
            raise DeviceUnavailableError(f"{info.name} is gone since it was probed.", hint="See bitnet devices.")
        try:
            device, driver = _opened(info, objc, own)
            if not (options.graphs and objc.send(own, "supportsFamily:", APPLE_9)):
                return device
            try:
                wrong = wrong_replay(device, driver)
            except DeviceLostError as error:
                device.close()
                device, driver = _opened(info, objc, own)
                wrong = error.message
            except BaseException:
                device.close()
                raise
            if wrong:
                logger.warning("Indirect command buffers are not used: %s", wrong)
            driver.graphs = not wrong
            return device
        finally:
            objc.release(own)

    def kernels(self) -> Collection[str]:
        from bitnet.metal.compiler import SOURCES

        return SOURCES.names()


def _opened(info: DeviceInfo, objc: Objc, own: int) -> tuple[GpuDevice, MetalDriver]:
    """Open the device and run its self-check; use simdgroup matrices unless it is virtual or they fail."""
    from bitnet.metal.ops import MATRICES, PLAIN

    if _is_virtual(info.description):
        return _with(PLAIN, info, objc, own)
    try:
        return _with(MATRICES, info, objc, own)
    except OutOfMemoryError:
        raise
    except DeviceError as error:
        opened = _with(PLAIN, info, objc, own)
        logger.warning("Simdgroup matrices are not used: %s", error.message)
        return opened


def _with(vendor: Vendor, info: DeviceInfo, objc: Objc, own: int) -> tuple[GpuDevice, MetalDriver]:
    """The device with kernels that pass the self-check, and a driver that also owns its MTLDevice."""
    from bitnet.core.gpu.clc import Abilities, open_device
    from bitnet.metal.device import MetalDriver
    from bitnet.metal.ops import TILE_THREADS

    driver = MetalDriver(objc, objc.send(own, "retain"), info)
    local = int(objc.send(own, "maxThreadgroupMemoryLength"))
    abilities = Abilities(compute_units=GPU_CORES, group=MAX_THREADS, local_bytes=local, f16=True)
    device = open_device(info, driver, abilities, self_check=True, vendor=vendor)
    try:
        if vendor.trial:
            driver.prepare(vendor.trial, TILE_THREADS)
    except BaseException:
        device.close()
        raise
    return device, driver


def _look() -> tuple[ProbeResult, Objc | None, list[int]]:
    """What is there: the result of a probe, the runtime, and each result's device, which is the caller's."""
    from bitnet.metal import objc as runtime

    libraries = runtime.open_libraries()
    if not libraries:
        reason = f"Metal is a part of macOS; this system is {sys.platform}."
        return ProbeResult(ProbeStatus.UNSUPPORTED, reason=reason), None, []
    tried = {name: message for library in libraries.values() for name, message in library.tried.items()}
    if not all(libraries.values()):
        reason = f"Metal cannot be opened: {'; '.join(filter(None, tried.values()))}."
        return ProbeResult(ProbeStatus.BROKEN, reason=reason, hint=USE_CPU, tried=tried), None, []
    objc = runtime.Objc(libraries)
    with objc.pool():
        system = _system(objc)
        versions = {"macos": _text(system.version), "build": system.build, "macos-needed": _text(MIN_MACOS)}
        if system.version < MIN_MACOS:
            reason = f"This is macOS {_text(system.version)}; the kernels need {_text(MIN_MACOS)} or newer."
            hint = "Update macOS."
            result = ProbeResult(ProbeStatus.DRIVER_TOO_OLD, reason=reason, hint=hint, tried=tried, versions=versions)
            return result, None, []
        infos, devices, others = _devices(objc, system)
    if infos:
        return ProbeResult(ProbeStatus.OK, infos, tried=tried, versions=versions), objc, devices
    if others:
        reason = f"{', '.join(others)}: the kernels are for GPUs of Apple silicon (M1 and newer)."
        result = ProbeResult(ProbeStatus.UNSUPPORTED, reason=reason, hint=USE_CPU, tried=tried, versions=versions)
        return result, None, []
    reason = "Metal finds no GPU; a session without one, or a virtual machine, has none."
    return ProbeResult(ProbeStatus.NO_DEVICE, reason=reason, hint=USE_CPU, tried=tried, versions=versions), None, []


def _devices(objc: Objc, system: System) -> tuple[list[DeviceInfo], list[int], list[str]]:
    """The supported devices, their MTLDevices, and the names of unsupported ones."""
    infos: list[DeviceInfo] = []
    devices: list[int] = []
    others: list[str] = []
    found = objc.copy_all_devices()
    if not found:
        return infos, devices, others
    for i in range(objc.send(found, "count")):
        device = objc.send(found, "objectAtIndex:", i)
        name = objc.text(objc.send(device, "name"))
        if not (objc.send(device, "supportsFamily:", APPLE_7) or _is_virtual(name)):
            others.append(name)
            continue
        infos.append(_info(objc, device, name, str(len(infos)), system))
        devices.append(objc.send(device, "retain"))
    objc.release(found)
    return infos, devices, others


def _info(objc: Objc, device: int, name: str, index: str, system: System) -> DeviceInfo:
    from bitnet.core.gpu.checks.verified import marked

    virtual = objc.is_test_driver or _is_virtual(name)
    info = DeviceInfo(
        backend="metal",
        index=index,
        id=f"{name} {objc.send(device, 'registryID'):016x}",
        description=name,
        vendor=TEST_DRIVER if objc.is_test_driver else "Apple",
        type=DeviceType.VIRTUAL if virtual else DeviceType.INTEGRATED,
        memory=int(objc.send(device, "recommendedMaxWorkingSetSize")),
        driver_version=f"macOS {_text(system.version)} ({system.build})",
        features=("f16", *KERNEL_FEATURES, *FAMILY_FEATURES, PREPARES),
    )
    return marked(info)


def _is_virtual(name: str) -> bool:
    """Whether a device of this name is a virtual machine's."""
    return PARAVIRTUAL in name.lower()


def _system(objc: Objc) -> System:
    """From ``Version 14.5 (Build 23F79)``, whose first word may be in another language."""
    info = objc.send(objc.class_named("NSProcessInfo"), "processInfo")
    text = objc.text(objc.send(info, "operatingSystemVersionString"))
    version, build = re.search(r"\d+(?:\.\d+)*", text), re.search(r"\b\d\d[A-Z]\w+", text)
    numbers = tuple(map(int, version[0].split("."))) if version else ()
    return System(numbers, build[0] if build else "")


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


BACKEND = MetalBackend()
