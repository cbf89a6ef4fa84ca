"""Features beyond OpenCL 1.2 that the kernels use, for ``bitnet devices`` and the compiler."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Mapping

import pyopencl as cl

from bitnet.core.gpu.clc import Abilities
from bitnet.core.gpu.clc.abilities import XMX, Matrix
from bitnet.core.gpu.clc.amd import Architecture, architecture
from bitnet.core.hal import FAMILY_FEATURES, KERNEL_FEATURES, LOOK_AHEAD, PREPARES
from bitnet.opencl.launches import library

EXTENSIONS: Mapping[str, str] = {
    "cl_khr_fp16": "f16",
    "cl_khr_integer_dot_product": "int8-dot",
    "cl_khr_command_buffer": "command-buffer",
    "cl_intel_subgroup_matrix_multiply_accumulate": "xmx",
}
INTEL = frozenset({"cl_intel_subgroups", "cl_intel_subgroups_short", "cl_intel_required_subgroup_size"})
"""Features that the kernels for Intel's GPUs need."""
SUB_GROUP_SIZES = 0x4108
"""CL_DEVICE_SUB_GROUP_SIZES_INTEL (cl_intel_required_subgroup_size)."""
NVIDIA, AMD = "cl_nv_device_attribute_query", "cl_amd_device_attribute_query"
CAPABILITIES: Mapping[str, tuple[int, int]] = {"ptx-dp4a": (6, 1), "ptx-mma": (8, 0)}
"""Minimum compute capability of NVIDIA's devices for the kernels' inline PTX."""


def features(device: cl.Device) -> tuple[str, ...]:
    """Features of a device: those of :data:`EXTENSIONS` and :data:`CAPABILITIES`, and a few besides."""
    extensions = set(device.extensions.split())
    found = [text for extension, text in EXTENSIONS.items() if extension in extensions]
    if "cl_khr_subgroups" in extensions or _subgroups(device):
        found.append("subgroups")
    if NVIDIA in extensions:
        found += [text for text, least in CAPABILITIES.items() if _compute_capability(device) >= least]
    if kind := _amd(device):
        found += [f"amd-{feature}" for feature in kind.features]
    return (*found, *KERNEL_FEATURES, *FAMILY_FEATURES, PREPARES, LOOK_AHEAD)


def abilities(device: cl.Device) -> Abilities:
    """The abilities of a device for the kernels."""
    have, kind = features(device), _amd(device)
    return Abilities(
        compute_units=int(device.max_compute_units),
        group=int(device.max_work_group_size),
        local_bytes=int(device.local_mem_size),
        gpu=bool(device.type & cl.device_type.GPU),
        subgroups="subgroups" in have,
        f16="f16" in have,
        dot4="khr" if "int8-dot" in have else "ptx" if "ptx-dp4a" in have else kind.dot4 if kind else "none",
        matrix="ptx" if "ptx-mma" in have else kind.matrix if kind else _intel(device),
        resident=resident(device) if "ptx-mma" in have else 0,
    )


def flags(device: cl.Device) -> tuple[str, ...]:
    """Compiler options for what a device has."""
    has = abilities(device)
    return has.options("3.0" if has.subgroups and version(device) >= (3, 0) else "1.2")


PLAIN = ("-cl-std=CL1.2",)
"""The options with which every device compiles every kernel."""


def resident(device: cl.Device) -> int:
    """Number of work-groups guaranteed to run concurrently. OpenCL guarantees none. NVIDIA's devices start a kernel's
    groups on all free compute units, earlier kernels on the queue have ended, and other work ends or is time-sliced."""
    return int(device.max_compute_units) if NVIDIA in device.extensions.split() else 0


def _subgroups(device: cl.Device) -> bool:
    """Whether an OpenCL 3.0 device has them as the optional part of the language."""
    with contextlib.suppress(cl.Error, AttributeError):
        return version(device) >= (3, 0) and int(device.max_num_sub_groups) > 0
    return False


def _intel(device: cl.Device) -> Matrix:
    """The matrix products of Intel's GPUs, by the least size of their sub-groups, which pyopencl does not ask for."""
    opencl, sizes = library(), (ctypes.c_size_t * 16)()
    if opencl is None or not device.type & cl.device_type.GPU or not set(device.extensions.split()) >= INTEL:
        return "none"
    handle = ctypes.c_void_p(device.int_ptr)
    opencl.clGetDeviceInfo(handle, SUB_GROUP_SIZES, ctypes.c_size_t(ctypes.sizeof(sizes)), sizes, None)
    least = min(filter(None, sizes), default=0)
    return XMX.get(least, "none") if "xmx" in features(device) else "intel" if least == 8 else "none"


def _compute_capability(device: cl.Device) -> tuple[int, int]:
    """Compute capability of an NVIDIA device; (0, 0) where its driver does not tell."""
    with contextlib.suppress(cl.Error, AttributeError):
        return int(device.compute_capability_major_nv), int(device.compute_capability_minor_nv)
    return 0, 0


def _amd(device: cl.Device) -> Architecture | None:
    """Architecture of an AMD device whose driver calls it by name and compiles for its waves; None for others."""
    if AMD not in device.extensions.split():
        return None
    kind = architecture(device.name)
    with contextlib.suppress(cl.Error, AttributeError):
        return kind if kind and int(device.wavefront_width_amd) == kind.wave else None
    return None


def version(device: cl.Device) -> tuple[int, int]:
    """Version of OpenCL that the device has, from ``OpenCL <major>.<minor> <vendor's text>`` (OpenCL 3.0, table 5)."""
    major, minor = device.version.split()[1].split(".")[:2]
    return int(major), int(minor)
