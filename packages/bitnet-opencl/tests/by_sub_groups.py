"""A pytest plugin that gives Intel's device the kernels for matrix units, which are then made of sub-groups of 32."""

from __future__ import annotations

from typing import Any

from bitnet.opencl import features

found, options = features.features, features.flags


def with_matrix_units(device: Any) -> tuple[str, ...]:
    """What is found, and these where the device has the shuffles they are made of."""
    able = "cl_khr_subgroup_shuffle" in device.extensions and "cl_intel_required_subgroup_size" in device.extensions
    return (*found(device), "ptx-mma") if able else found(device)


features.features = with_matrix_units
features.flags = lambda device: (*options(device), "-cl-opt-disable")  # a tenth of the time to compile
features.resident = lambda device: 1
