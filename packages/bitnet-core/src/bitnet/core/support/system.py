"""Facts about this machine: processor, CPUs that this process may use, memory. An unknown size is 0."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from functools import cache
from pathlib import Path

from bitnet.core.support.distributions import version_of

CGROUP = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")


THREADS = sys.platform not in ("emscripten", "wasi")
"""Whether this Python can start threads."""


@cache
def core_version() -> str:
    """Version of the installed bitnet-core; empty if it runs from a source tree that is not installed."""
    return version_of("bitnet-core")


@cache
def cpu_model() -> str:
    """The processor's model name, such as ``AMD EPYC 9B45``; if unknown, its architecture."""
    if sys.platform == "linux":
        text = _read(Path("/proc/cpuinfo"))
        fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        for field in ("model name", "Hardware", "Model", "cpu model"):
            for key, value in fields.items():
                if key.strip() == field and value.strip():
                    return value.strip()
    elif sys.platform == "darwin":
        if name := sysctl("machdep.cpu.brand_string"):
            return name
    elif sys.platform == "win32":
        import winreg

        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, r"HARDWARE\DESCRIPTION\System\CentralProcessor\0") as key:
            return str(winreg.QueryValueEx(key, "ProcessorNameString")[0]).strip()
    return platform.processor() or platform.machine()


def usable_cpus() -> int:
    """Logical processors that this process may keep busy, within its affinity and its container's quota."""
    count = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    quota = _cgroup_cpus()
    return max(1, min(count, round(quota))) if quota else count


@cache
def memory_total() -> int:
    """Bytes of this machine's memory."""
    if sys.platform == "win32":
        status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
        ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
        return int(status.total_physical)
    if sys.platform == "darwin":
        return int(sysctl("hw.memsize") or 0)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return 0


def memory_available() -> int:
    """Bytes available without swapping: includes page cache that can be dropped, and respects a container's limit."""
    if sys.platform == "win32":
        status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
        ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
        return int(status.available_physical)
    fields = dict(line.partition(":")[::2] for line in _read(MEMINFO).splitlines())
    kilobytes = fields.get("MemAvailable", "0").split()[0]
    available = int(kilobytes) * 1024 if kilobytes.isdigit() else 0
    return min([available, *_cgroup_memory()]) if available else 0


class _MemoryStatus(ctypes.Structure):
    """``MEMORYSTATUSEX`` of the Windows API."""

    _fields_ = (
        ("length", ctypes.c_uint32),
        ("memory_load", ctypes.c_uint32),
        ("total_physical", ctypes.c_uint64),
        ("available_physical", ctypes.c_uint64),
        ("page_file", ctypes.c_uint64 * 5),
    )


def _cgroups(controller: str = "") -> list[Path]:
    """The folders of this process's cgroup and of those around it, the innermost first.

    Args:
        controller: A controller of cgroup v1, such as ``memory``; empty: cgroup v2.
    """
    root = CGROUP / controller
    lines = [line.split(":", 2) for line in _read(OWN_CGROUPS).splitlines() if line.count(":") >= 2]
    own = next(
        (
            path.lstrip("/")
            for number, controllers, path in lines
            if (controller in controllers.split(",") if controller else number == "0")
        ),
        "",
    )
    # A container sees its own cgroup as the root, though its path is that on the host: then only the root is there.
    folder = root / own
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(root))]


def _cgroup_cpus() -> float:
    """Number of CPUs' time that a container allows (cgroup v2 ``cpu.max``, v1 ``cpu.cfs_quota_us``); 0: no limit."""
    limits = [_read(folder / "cpu.max").split() for folder in _cgroups()]
    limits += [
        [_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")] for folder in _cgroups("cpu")
    ]
    numbers = [(int(limit[0]), int(limit[1])) for limit in limits if len(limit) == 2 and all(map(str.isdigit, limit))]
    return min((quota / period for quota, period in numbers if period), default=0.0)


def _cgroup_memory() -> list[int]:
    """Bytes still available under each limit on this process (cgroup v2 ``memory.max``, v1
    ``memory.limit_in_bytes``)."""
    places = [(folder, "memory.max", "memory.current", "inactive_file") for folder in _cgroups()]
    places += [
        (folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        for folder in _cgroups("memory")
    ]
    left = []
    for folder, limit, usage, cached in places:
        most, used = (_read(folder / name).strip() for name in (limit, usage))
        stat = dict(line.partition(" ")[::2] for line in _read(folder / "memory.stat").splitlines())
        if most.isdigit() and used.isdigit():
            left.append(max(1, int(most) - int(used) + int(stat.get(cached, "0"))))
    return left


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def sysctl(name: str) -> str:
    import subprocess  # slow to import

    try:
        return subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
