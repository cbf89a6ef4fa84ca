"""Which of the kernels for Intel's GPUs a device is given, by what it reports. No such device is at hand."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pyopencl as cl
import pytest

from bitnet.core.gpu import KernelSpec
from bitnet.core.gpu.clc import tried
from bitnet.opencl import features

SUB_GROUPS = "cl_khr_subgroups cl_intel_subgroups cl_intel_subgroups_short cl_intel_required_subgroup_size"
XMX = f"{SUB_GROUPS} cl_intel_subgroup_matrix_multiply_accumulate"


def device(extensions: str, kind: int) -> Any:
    """What the probe asks of a device."""
    sizes = {"max_compute_units": 160, "max_work_group_size": 1024, "local_mem_size": 65536}
    return SimpleNamespace(extensions=extensions, type=kind, version="OpenCL 3.0 NEO", int_ptr=77, **sizes)


def loader(sizes: list[int]) -> Any:
    """The loader's library, which tells of sub-groups of these sizes."""

    def device_info(device: ctypes.c_void_p, what: int, size: ctypes.c_size_t, out: Any, size_returned: None) -> int:
        assert (device.value, what, size.value) == (77, features.SUB_GROUP_SIZES, ctypes.sizeof(out))
        out[: len(sizes)] = sizes
        return 0

    return SimpleNamespace(clGetDeviceInfo=device_info)


@pytest.mark.parametrize(
    ("extensions", "kind", "sizes", "matrix"),
    [
        (XMX, cl.device_type.GPU, [8, 16, 32, 0], "xmx8"),
        (XMX, cl.device_type.GPU, [16, 32, 0], "xmx16"),
        (SUB_GROUPS, cl.device_type.GPU, [8, 16, 32], "intel"),
        (SUB_GROUPS, cl.device_type.GPU, [16, 32], "none"),
        (SUB_GROUPS, cl.device_type.GPU, [], "none"),
        (XMX, cl.device_type.CPU, [8, 16], "none"),
        ("cl_khr_subgroups", cl.device_type.GPU, [8], "none"),
    ],
)
def test_matrix_products(
    monkeypatch: pytest.MonkeyPatch, extensions: str, kind: int, sizes: list[int], matrix: str
) -> None:
    monkeypatch.setattr(features, "library", lambda: loader(sizes))
    assert features.abilities(device(extensions, kind)).matrix == matrix


@pytest.mark.parametrize(("refused", "left"), [((1,), "intel"), ((0, 1), "none"), ((), "xmx8")])
def test_a_compiler_that_takes_less(monkeypatch: pytest.MonkeyPatch, refused: tuple[int, ...], left: str) -> None:
    """Without XMX the same product is made of dot products; without sub-groups by the kernels of all devices."""
    monkeypatch.setattr(features, "library", lambda: loader([8, 16]))

    def builds(spec: KernelSpec) -> bool:
        return dict(spec.defines)["XMX"] not in refused

    assert tried(features.abilities(device(XMX, cl.device_type.GPU)), builds).matrix == left
