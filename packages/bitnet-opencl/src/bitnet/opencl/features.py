"""What a device has beyond OpenCL 1.2 that the kernels make use of, as ``bitnet devices`` and the compiler are told."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import pyopencl as cl

EXTENSIONS: Mapping[str, str] = {
    "cl_khr_fp16": "f16",
    "cl_khr_integer_dot_product": "int8-dot",
    "cl_khr_command_buffer": "command-buffer",
}
DEFINES: Mapping[str, str] = {
    "f16": "FP16",
    "int8-dot": "INT_DOT",
    "subgroups": "SUBGROUPS",
    "ptx-dp4a": "PTX",
    "ptx-mma": "MMA",
}
"""Features by which the kernels are compiled, and the constants that say so."""
NVIDIA = "cl_nv_device_attribute_query"
CAPABILITIES: Mapping[str, tuple[int, int]] = {"ptx-dp4a": (6, 1), "ptx-mma": (8, 0)}
"""Compute capability from which NVIDIA's devices have what the kernels use by inline PTX."""


def features(device: cl.Device) -> tuple[str, ...]:
    """Of a device: ``f16``, ``int8-dot``, ``command-buffer``, ``subgroups``, ``ptx-dp4a``, ``ptx-mma``."""
    extensions = set(device.extensions.split())
    found = [text for extension, text in EXTENSIONS.items() if extension in extensions]
    if "cl_khr_subgroups" in extensions or _subgroups(device):
        found.append("subgroups")
    if NVIDIA in extensions:
        capability = _compute_capability(device)
        found += [text for text, least in CAPABILITIES.items() if capability >= least]
    return tuple(found)


def flags(device: cl.Device) -> tuple[str, ...]:
    """Compiler options for them."""
    have = features(device)
    defines = [f"-D{define}=1" for feature, define in DEFINES.items() if feature in have]
    if device.type & cl.device_type.GPU:
        defines.append("-DGPU=1")
    return (f"-cl-std=CL{'3.0' if 'subgroups' in have and version(device) >= (3, 0) else '1.2'}", *defines)


PLAIN = ("-cl-std=CL1.2",)
"""The options with which every device compiles every kernel."""


def resident(device: cl.Device) -> int:
    """Work-groups that surely run at once, however much of a compute unit each takes; 0 where nobody can tell.

    OpenCL promises none. NVIDIA's devices start the groups of a kernel on all compute units that are free, and those of
    kernels before it on the same queue have ended; what other processes have there ends too, or takes turns as a whole.
    """
    return int(device.max_compute_units) if NVIDIA in device.extensions.split() else 0


def _subgroups(device: cl.Device) -> bool:
    """Whether an OpenCL 3.0 device has them as the optional part of the language."""
    if version(device) < (3, 0):
        return False
    with contextlib.suppress(cl.Error, AttributeError):
        return int(device.max_num_sub_groups) > 0
    return False


def _compute_capability(device: cl.Device) -> tuple[int, int]:
    """Of an NVIDIA device; (0, 0) where its driver does not tell."""
    with contextlib.suppress(cl.Error, AttributeError):
        return int(device.compute_capability_major_nv), int(device.compute_capability_minor_nv)
    return 0, 0


def version(device: cl.Device) -> tuple[int, int]:
    """Of the device, from ``OpenCL <major>.<minor> <vendor's text>`` (OpenCL 3.0, table 5)."""
    major, minor = device.version.split()[1].split(".")[:2]
    return int(major), int(minor)
