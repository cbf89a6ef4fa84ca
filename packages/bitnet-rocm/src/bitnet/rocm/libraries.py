"""Finds the libraries of AMD's stack: in ``ROCM_PATH``, the loader's path, the pip SDK's folder, ``/opt/rocm``."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from bitnet.core.support.dynlib import Library, open_library

HIP = {
    "linux": ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"),
    "win32": ("amdhip64_7.dll", "amdhip64_6.dll", "amdhip64.dll"),
}
"""The last is too old, which the probe then says."""
COMGR = {
    "linux": ("libamd_comgr.so.3", "libamd_comgr.so.2"),
    "win32": ("amd_comgr_3.dll", "amd_comgr_2.dll", "amd_comgr.dll"),
}
SDK = "_rocm_sdk_core"
"""Import name of the wheel by which AMD's stack is installed with pip."""
SYSTEM = Path("/opt")


def open_hip() -> Library:
    """The HIP runtime. Never raises."""
    return open_library(_candidates(HIP.get(sys.platform, ()), None))


def open_comgr(hip: str) -> Library:
    """The compiler of a HIP runtime: beside the runtime, else in the usual places. Never raises.

    Args:
        hip: The name under which the runtime opened.
    """
    return open_library(_candidates(COMGR.get(sys.platform, ()), Path(hip).parent if Path(hip).is_absolute() else None))


def _candidates(names: tuple[str, ...], beside: Path | None) -> list[str]:
    """Paths of files that are there, and bare names for the loader, in the order to be tried."""
    folder = "bin" if sys.platform == "win32" else "lib"
    given = [Path(os.environ[name]) / folder for name in ("ROCM_PATH", "HIP_PATH") if os.environ.get(name)]
    first = [*([beside] if beside else []), *given]
    spec = find_spec(SDK)
    later = [Path(place) / folder for place in (spec.submodule_search_locations or ()) if spec] if spec else []
    if sys.platform == "linux":
        later += [path / folder for path in (SYSTEM / "rocm", *sorted(SYSTEM.glob("rocm-*"), reverse=True))]
    return [*_files(first, names), *names, *_files(later, names)]


def _files(folders: list[Path], names: tuple[str, ...]) -> list[str]:
    return [str(path) for folder in folders for name in names if (path := folder / name).exists()]
