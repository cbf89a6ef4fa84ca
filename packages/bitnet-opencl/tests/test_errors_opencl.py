"""Errors of drivers, by their numbers: what an operator reads, and what the engine does after them."""

from __future__ import annotations

import pytest

from bitnet.core.errors import DeviceError, DeviceLostError, OutOfMemoryError

cl = pytest.importorskip("pyopencl")

from bitnet.opencl import launches  # noqa: E402
from bitnet.opencl.device import OpenCLDriver  # noqa: E402


@pytest.mark.parametrize(
    ("code", "kind", "named"),
    [
        (-4, OutOfMemoryError, "MEM_OBJECT_ALLOCATION_FAILURE"),
        (-6, OutOfMemoryError, "OUT_OF_HOST_MEMORY"),
        (-2, DeviceLostError, "DEVICE_NOT_AVAILABLE"),
        (-9999, DeviceLostError, "error -9999"),  # NVIDIA's, after an access to where nothing is
        (-30, DeviceError, "INVALID_VALUE"),
        (-7777, DeviceError, "error -7777"),
    ],
)
def test_a_code_is_told_for_what_it_is(code: int, kind: type[DeviceError], named: str) -> None:
    driver = object.__new__(OpenCLDriver)
    driver._name = "opencl:7"
    with pytest.raises(DeviceError, match=f"opencl:7: clFinish failed with {named}") as raised:
        driver._call(launches.check, "clFinish", code)
    assert type(raised.value) is kind
