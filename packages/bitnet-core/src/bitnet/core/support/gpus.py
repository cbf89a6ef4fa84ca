"""GPUs of this machine, seen without a driver: no library is loaded, no process started and no device file opened."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path("/")
_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
_NOT_COMPUTING = {("0x1002", "0x515e"), ("0x1002", "0x5969")}  # ATI's ES1000, the console of older servers
_DEVICE_FILES = {
    "NVIDIA": ("dev/nvidiactl", "dev/nvidia0"),
    "AMD": ("dev/kfd", "dev/dri"),
    "Intel": ("dev/dri",),
}
_CONTAINER_FILES = (".dockerenv", "run/.containerenv")
_CONTAINER_VARIABLES = ("KUBERNETES_SERVICE_HOST", "container")  # the second: Podman, LXC, systemd-nspawn
_WSL_DRIVERS = {"nv": "NVIDIA", "iigd": "Intel", "u0": "AMD"}
"""How the names of Windows' driver packages begin."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of this machine.

    Attributes:
        vendor: ``NVIDIA``, ``AMD``, ``Intel`` or ``Apple``.
        name: The product's name; empty if it is unknown.
        withheld: Whether this process runs in a container that was not given the GPU's device files.
    """

    vendor: str
    name: str = ""
    withheld: bool = False

    def __str__(self) -> str:
        """``an NVIDIA GPU (H100 80GB HBM3)``."""
        return f"an {self.vendor} GPU ({self.name})" if self.name else f"an {self.vendor} GPU"


def seen() -> tuple[Gpu, ...]:
    """The GPUs that can be seen, of vendors whose GPUs compute. Virtual displays and servers' consoles do not."""
    if sys.platform == "win32":
        found = _windows()
    elif sys.platform == "darwin":
        found = [Gpu("Apple")] if platform.machine() == "arm64" else []
    else:
        found = _on_pci() or _through_wsl()
        if (ROOT / "dev/nvidiactl").exists() and not any(gpu.vendor == "NVIDIA" for gpu in found):
            found.append(Gpu("NVIDIA", _nvidia_name("*")))  # a container that hides PCI
    return tuple(dict.fromkeys(found))


def _on_pci() -> list[Gpu]:
    found = []
    for device in sorted((ROOT / "sys/bus/pci/devices").glob("*")):
        vendor_id, product = _read(device / "vendor").strip(), _read(device / "device").strip()
        vendor = _VENDORS.get(vendor_id)
        kinds = ("0x03", "0x12") if vendor == "AMD" else ("0x03",)  # 0x12: accelerators; Intel's are NPUs
        if vendor is None or not _read(device / "class").startswith(kinds) or (vendor_id, product) in _NOT_COMPUTING:
            continue
        if (device / "driver").resolve().name == "vfio-pci":  # it was given to a virtual machine
            continue
        name = _nvidia_name(device.name) if vendor == "NVIDIA" else _read(device / "product_name").strip()
        found.append(Gpu(vendor, name or _listed_name(vendor_id, product), _withheld(vendor)))
    return found


def _nvidia_name(address: str) -> str:
    """What NVIDIA's kernel module calls the GPU at a PCI address, a pattern."""
    for path in sorted((ROOT / "proc/driver/nvidia/gpus").glob(f"{address}/information")):
        if found := re.search(r"^Model:\s*(.+?)\s*$", _read(path), re.MULTILINE):
            return found[1].removeprefix("NVIDIA ")
    return ""


def _listed_name(vendor: str, product: str) -> str:
    """The product's name in the system's list of PCI devices: what is in brackets, if anything is."""
    for place in ("usr/share/misc/pci.ids", "usr/share/hwdata/pci.ids"):
        text = _read(ROOT / place)
        products = re.search(rf"^{vendor[2:]}  .*\n((?:[\t#].*\n)*)", text, re.MULTILINE)
        name = re.search(rf"^\t{product[2:]}  (.*)$", products[1], re.MULTILINE) if products and product else None
        if name is not None:
            bracket = re.search(r"\[(.+)\]$", name[1])
            return (bracket or name)[1]
    return ""


def _withheld(vendor: str) -> bool:
    contained = any((ROOT / name).exists() for name in _CONTAINER_FILES) or any(
        os.environ.get(name) for name in _CONTAINER_VARIABLES
    )
    return contained and not any((ROOT / name).exists() for name in _DEVICE_FILES[vendor])


def _through_wsl() -> list[Gpu]:
    """The GPUs that Windows shares with its subsystem for Linux, by the drivers that it brings along."""
    if not (ROOT / "dev/dxg").exists():
        return []
    names = [path.name for path in (ROOT / "usr/lib/wsl/drivers").glob("*")]
    vendors = {vendor for prefix, vendor in _WSL_DRIVERS.items() if any(name.startswith(prefix) for name in names)}
    if (ROOT / "usr/lib/wsl/lib/libcuda.so.1").exists():
        vendors.add("NVIDIA")
    return [Gpu(vendor) for vendor in sorted(vendors)]


class _DisplayDevice(ctypes.Structure):
    """``DISPLAY_DEVICEW`` of the Windows API."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("output", ctypes.c_wchar * 32),
        ("description", ctypes.c_wchar * 128),
        ("flags", ctypes.c_uint32),
        ("id", ctypes.c_wchar * 128),
        ("key", ctypes.c_wchar * 128),
    )


def _windows() -> list[Gpu]:
    """The display adapters that Windows lists, and an NVIDIA GPU without outputs by its driver's library."""
    user32: Any = getattr(ctypes, "windll").user32  # noqa: B009 - only Windows' ctypes has it
    found: list[Gpu] = []
    number = 0
    adapter = _DisplayDevice(size=ctypes.sizeof(_DisplayDevice))
    while user32.EnumDisplayDevicesW(None, number, ctypes.byref(adapter), 0):
        number += 1
        if (pci := re.match(r"PCI\\VEN_([0-9A-F]{4})&", adapter.id, re.IGNORECASE)) is None:
            continue
        if vendor := _VENDORS.get(f"0x{pci[1].lower()}"):
            found.append(Gpu(vendor, adapter.description.removeprefix("NVIDIA ")))
    library = Path(os.environ.get("SYSTEMROOT", "C:/Windows")) / "System32" / "nvcuda.dll"
    if library.exists() and not any(gpu.vendor == "NVIDIA" for gpu in found):
        found.append(Gpu("NVIDIA"))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
