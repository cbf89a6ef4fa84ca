"""What ``bitnet devices --report`` prints: what a maintainer needs to know of a machine, and nothing private."""

from __future__ import annotations

import getpass
import importlib.metadata
import platform
import re
from collections.abc import Iterable
from pathlib import Path

from bitnet.core.support import gpus
from bitnet.core.support.system import cpu_model, memory_total, usable_cpus
from bitnet.core.support.units import size

DRIVERS = ("numpy", "tokenizers", "cuda-bindings", "pyopencl", "vulkan", "wgpu")
"""Distributions, beside our own, whose versions decide what a device does."""
_UUID = r"(?:GPU-)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_PATH = re.compile(r"(?<![\w.:/])(?:[A-Za-z]:\\|/)(?:[^\s:;,'\"()\\/]+[\\/])+")


def machine_lines() -> list[str]:
    """The machine, Python and the versions of what is installed."""
    libc = " ".join(platform.libc_ver()).strip()
    system = f"{platform.system()} {platform.release()} {platform.machine()}{f', {libc}' if libc else ''}"
    return [
        f"system: {system}",
        f"processor: {cpu_model()}, {usable_cpus()} usable, {size(memory_total())}",
        f"GPUs seen without a driver: {', '.join(map(str, gpus.seen())) or 'none'}",
        f"Python: {platform.python_implementation()} {platform.python_version()}",
        f"packages: {', '.join(_versions())}",
    ]


def private_left_out(lines: Iterable[str]) -> list[str]:
    """The lines without names of user and host, folders of paths, and identifiers of single devices."""
    names = {platform.node(), platform.node().partition(".")[0], _user(), Path.home().name} - {""}
    words = [rf"\b{re.escape(name)}\b" for name in sorted(names, key=len, reverse=True)]
    private = re.compile("|".join([_UUID, *words]), re.IGNORECASE)
    return [private.sub("…", _PATH.sub("…/", line)) for line in lines]


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # no such user: in a container
        return ""


def _versions() -> list[str]:
    found = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"] or ""
        if name in DRIVERS or name.startswith("bitnet-"):
            found[name] = f"{name} {distribution.version}"
    return sorted(found.values())
