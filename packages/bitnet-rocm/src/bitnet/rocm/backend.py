"""Finds and opens ROCm devices. Importing this module opens no driver; only the probe does."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bitnet.core.errors import DeviceError, DeviceUnavailableError
from bitnet.core.gpu.probing import denied_nodes, no_permission
from bitnet.core.hal import (
    FAMILY_FEATURES,
    KERNEL_FEATURES,
    LOOK_AHEAD,
    PREPARES,
    Device,
    DeviceInfo,
    DeviceType,
    OpenOptions,
    ProbeResult,
    ProbeStatus,
)
from bitnet.core.hal.probe import TEST_DRIVER
from bitnet.core.support.dynlib import Library
from bitnet.core.support.log import logger

if TYPE_CHECKING:
    from bitnet.core.gpu.clc import Abilities
    from bitnet.core.gpu.clc.amd import Architecture
    from bitnet.rocm.comgr_process import ComgrProcess
    from bitnet.rocm.hip import Hip, Properties

NODES = ("kfd", "dri/renderD*")
"""Device nodes that the runtime opens, under /dev."""
KFD = Path("/dev/kfd")
CONTAINERS = (Path("/.dockerenv"), Path("/run/.containerenv"))
"""Files that Docker and Podman put into a container."""
INSTALL = {
    "linux": "Install ROCm 6 or newer (https://rocm.docs.amd.com), and set ROCM_PATH where it is in an unusual place.",
    "win32": "Install AMD's Adrenalin driver, which brings amdhip64_6.dll or amdhip64_7.dll.",
}
ELSEWHERE = "AMD has no HIP runtime for this system."
UPDATE = "Update ROCm to 6.0 or newer: https://rocm.docs.amd.com."
OTHERS = "Use bitnet-opencl or bitnet-vulkan for this GPU."
GIVE_NODES = "Start the container with --device /dev/kfd --device /dev/dri --group-add video --group-add render."
LOOK = {
    "linux": "See that lspci lists the GPU and lsmod its driver, amdgpu.",
    "win32": "See that the device manager lists the GPU, and update its driver.",
}
HIDDEN = "Check ROCR_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES and rocminfo."


@dataclass(frozen=True, slots=True)
class Runtime:
    """The libraries that a probe opened."""

    hip: Hip
    comgr: ComgrProcess


@dataclass(frozen=True, slots=True)
class Found:
    """A supported device."""

    info: DeviceInfo
    architecture: Architecture
    abilities: Abilities


class RocmBackend:
    """AMD GPUs with ROCm 6 or newer, of architecture gfx9 or newer."""

    name = "rocm"
    hal_api = 3

    def probe(self) -> ProbeResult:
        result, _, _ = _look()
        return result

    def open(self, info: DeviceInfo, options: OpenOptions) -> Device:
        from bitnet.core.gpu.checks.replay import wrong_replay
        from bitnet.core.gpu.clc import open_device, tried
        from bitnet.rocm.compiler import programs
        from bitnet.rocm.device import RocmDriver

        _, runtime, devices = _look()
        found = next((found for found in devices if found.info.name == info.name), None)
        if runtime is None or found is None:
            raise DeviceUnavailableError(f"{info.name} is gone since it was probed.", hint="See bitnet devices.")
        kernels = programs(info.name, runtime.comgr, found.architecture.name, found.abilities, info.driver_version)
        abilities = tried(found.abilities, kernels.builds)
        driver = RocmDriver(runtime.hip, int(info.index), info.name, kernels)
        device = open_device(info, driver, abilities, self_check=True)
        if options.graphs:
            try:
                wrong = wrong_replay(device, driver)
            except BaseException:
                device.close()
                raise
            if wrong:
                logger.warning("%s HIP graphs are not used; updating ROCm may help.", wrong)
            driver.graphs = not wrong
        return device

    def kernels(self) -> Collection[str]:
        from bitnet.rocm.compiler import SOURCES

        return SOURCES.names()


def _look() -> tuple[ProbeResult, Runtime | None, list[Found]]:
    """Probe this machine: the result, the opened libraries, and the usable devices."""
    from bitnet.rocm.hip import MIN_HIP, Hip
    from bitnet.rocm.libraries import open_hip

    library = open_hip()
    if library.handle is None:
        return _not_open(library), None, []
    tried, versions = dict(library.tried), {"hip-needed": _text(MIN_HIP)}

    def failed(status: ProbeStatus, reason: str, hint: str) -> tuple[ProbeResult, None, list[Found]]:
        return ProbeResult(status, reason=reason, hint=hint, tried=tried, versions=versions), None, []

    try:
        hip = Hip(library.handle)
    except AttributeError as error:
        reason = f"{library.name} is older than HIP {_text(MIN_HIP)}: it lacks a call ({error})."
        return failed(ProbeStatus.DRIVER_TOO_OLD, reason, UPDATE)
    problem = hip.status("hipInit", 0)
    try:
        version = hip.version()
    except DeviceError as error:
        return _no_device(problem or error.message, tried, versions), None, []
    versions["hip"] = _text(version)
    if version[:2] < MIN_HIP:
        reason = f"HIP {_text(version)} is installed; the kernels need {_text(MIN_HIP)} or newer."
        return failed(ProbeStatus.DRIVER_TOO_OLD, reason, UPDATE)
    try:
        count = 0 if problem else hip.count()
    except DeviceError as error:
        problem, count = error.message, 0
    if not count:
        return _no_device(problem, tried, versions), None, []
    return _devices(hip, count, library.name, _text(version), tried, versions)


def _devices(
    hip: Hip, count: int, name: str, version: str, tried: dict[str, str], versions: dict[str, str]
) -> tuple[ProbeResult, Runtime | None, list[Found]]:
    """The devices of an open runtime, if its compiler also opens."""
    from bitnet.core.gpu.clc.amd import architecture
    from bitnet.rocm.comgr import ComgrError
    from bitnet.rocm.comgr_process import ComgrProcess

    try:
        comgr = ComgrProcess(name)
    except ComgrError as error:
        reason = f"ROCm's compiler, libamd_comgr, cannot be used: {error}"
        hint = "Install it (Debian and Ubuntu: comgr or libamd-comgr2), or reinstall ROCm."
        result = ProbeResult(ProbeStatus.LIBRARY_MISSING, reason=reason, hint=hint, tried=tried, versions=versions)
        return result, None, []
    tried |= comgr.tried
    versions["comgr"] = comgr.version
    found, others = [], []
    for index in range(count):
        properties = hip.properties(index)
        kind = architecture(reported := properties.architecture.decode())
        if kind is None or kind.name not in comgr.architectures:
            others.append(f"{properties.name.decode()} ({reported})")
            continue
        found.append(_found(hip, index, properties, kind, version, versions["comgr"]))
    runtime, infos = Runtime(hip, comgr), [device.info for device in found]
    if infos:
        return ProbeResult(ProbeStatus.OK, infos, tried=tried, versions=versions), runtime, found
    reason = f"{', '.join(others)}: the kernels, or ROCm's compiler ({versions['comgr']}), are not for it."
    result = ProbeResult(ProbeStatus.UNSUPPORTED, reason=reason, hint=OTHERS, tried=tried, versions=versions)
    return result, None, []


def _found(hip: Hip, index: int, properties: Properties, kind: Architecture, version: str, compiler: str) -> Found:
    from bitnet.core.gpu.checks.verified import marked

    pci = f"{properties.pci_domain:04x}:{properties.pci_bus:02x}:{properties.pci_device:02x}.0"
    abilities = kind.abilities(
        compute_units=properties.compute_units, group=properties.group, local_bytes=properties.local_bytes
    )
    details = {
        "architecture": properties.architecture.decode(),
        "compute_units": str(properties.compute_units),
        "pci": pci,
        "note": f"kernels: compiled here by libamd_comgr {compiler}",
    }
    name = properties.name.decode(errors="replace").strip() or "AMD GPU"
    kind_of = DeviceType.INTEGRATED if properties.integrated else DeviceType.DISCRETE
    info = DeviceInfo(
        backend="rocm",
        index=str(index),
        id=_uuid(bytes(properties.uuid)) or pci,
        description=f"{name} ({kind.name})",
        vendor=TEST_DRIVER if hip.is_test_driver else "AMD",
        type=DeviceType.VIRTUAL if hip.is_test_driver else kind_of,
        memory=properties.total_memory,
        driver_version=version,
        features=(
            *kind.features,
            "f16",
            f"wave{kind.wave}",
            *KERNEL_FEATURES,
            *FAMILY_FEATURES,
            PREPARES,
            LOOK_AHEAD,
        ),
        details=details,
    )
    return Found(marked(info), kind, abilities)


def _uuid(raw: bytes) -> str:
    """As ROCm's tools print it: the bytes are its characters. Empty where the device has none (``XX``, zeros)."""
    text = raw.rstrip(b"\0").decode("ascii", errors="replace")
    return f"GPU-{text}" if len(text) == len(raw) and text.isalnum() else ""


def _not_open(library: Library) -> ProbeResult:
    """The result if the runtime's library is missing or does not open."""
    if sys.platform not in INSTALL:
        return ProbeResult(ProbeStatus.DRIVER_MISSING, reason=ELSEWHERE, tried=library.tried)
    if library.failure == "missing":
        reason = f"The HIP runtime is not installed: {', '.join(library.tried)}."
        return ProbeResult(ProbeStatus.DRIVER_MISSING, reason=reason, hint=INSTALL[sys.platform], tried=library.tried)
    why = "; ".join(f"{name} ({message})" for name, message in library.tried.items() if message)
    status = ProbeStatus.NO_PERMISSION if library.failure == "no-permission" else ProbeStatus.BROKEN
    hint = (
        "Let this user read ROCm's libraries."
        if status is ProbeStatus.NO_PERMISSION
        else "Reinstall ROCm: its files do not match each other or this processor."
    )
    return ProbeResult(status, reason=f"The HIP runtime cannot be opened: {why}.", hint=hint, tried=library.tried)


def _no_device(error: str, tried: Mapping[str, str], versions: Mapping[str, str]) -> ProbeResult:
    """The result if the runtime sees no device: permissions, a container without the device node, or no kernel
    driver."""

    def result(reason: str, hint: str) -> ProbeResult:
        return ProbeResult(ProbeStatus.NO_DEVICE, reason=reason, hint=hint, tried=tried, versions=versions)

    if denied := denied_nodes(NODES):
        hint = f"sudo usermod -aG {','.join(_groups(denied))} $USER, then log in again."
        return no_permission(denied, tried=tried, versions=versions, hint=hint)
    if sys.platform == "linux" and not KFD.exists():
        if any(path.exists() for path in CONTAINERS):
            return result(f"This container has no {KFD}, by which AMD's GPUs are reached.", GIVE_NODES)
        return result(f"There is no {KFD}: no AMD GPU, or its kernel driver is not loaded.", LOOK["linux"])
    why = f" ({error})" if error else ""
    return result(f"The HIP runtime sees no GPU{why}.", HIDDEN if sys.platform == "linux" else LOOK["win32"])


def _groups(nodes: Collection[str]) -> list[str]:
    """The groups whose members may open the device nodes; AMD's usual ones where they have no name."""
    import grp

    found = set()
    for node in nodes:
        try:
            found.add(grp.getgrgid(Path(node).stat().st_gid).gr_name)
        except (KeyError, OSError):
            found |= {"render", "video"}
    return sorted(found - {"root"} or {"render", "video"})


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


BACKEND = RocmBackend()
