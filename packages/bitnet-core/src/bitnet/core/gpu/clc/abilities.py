"""What the OpenCL C kernels may use of a device, whichever driver reaches it: a probe fills it in, kernels go by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

Dot4: TypeAlias = Literal["none", "khr", "ptx"]
"""Sum of four products of 8-bit integers: by single bytes, ``cl_khr_integer_dot_product``, NVIDIA's ``dp4a``."""
Matrix: TypeAlias = Literal["none", "ptx"]
"""Matrix products: none, NVIDIA's ``mma`` of compute capability 8.0."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """A device, as the kernels see it.

    Attributes:
        compute_units: Parts of the device that run work-groups independently.
        group: Work-items of a work-group at most.
        local_bytes: Local memory of a work-group at most, in bytes.
        gpu: Whether it is a GPU. A CPU gains nothing by large work-groups and unrolled loops, and its compiler takes
            long for them.
        subgroups: Whether the language has sub-groups.
        f16: Whether the language has half-precision arithmetic.
        matrix: Matrix products that the driver's compiler takes.
        resident: Work-groups that surely run at once, however much of a compute unit each takes; 0 where nobody can
            tell.
    """

    compute_units: int
    group: int
    local_bytes: int
    gpu: bool = True
    subgroups: bool = False
    f16: bool = False
    dot4: Dot4 = "none"
    matrix: Matrix = "none"
    resident: int = 0

    @property
    def defines(self) -> Mapping[str, int]:
        """Preprocessor constants by which every kernel is compiled for the device."""
        having = {
            "FP16": self.f16,
            "INT_DOT": self.dot4 == "khr",
            "SUBGROUPS": self.subgroups,
            "PTX": self.dot4 == "ptx",
            "GPU": self.gpu,
        }
        return {name: 1 for name, has in having.items() if has}
