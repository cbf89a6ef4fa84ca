"""The abilities of a device that OpenCL C kernels depend on, filled in by a probe of any driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

Dot4: TypeAlias = Literal["none", "khr", "ptx", "sdot4", "sudot4"]
"""Sum of four products of 8-bit integers: by single bytes, ``cl_khr_integer_dot_product``, NVIDIA's ``dp4a``, AMD's
``v_dot4_i32_i8`` and ``v_dot4_i32_iu8``."""
Matrix: TypeAlias = Literal["none", "ptx", "mfma16", "mfma32", "mfma64", "wmma11", "wmma12", "intel", "xmx8", "xmx16"]
"""Matrix products: none, NVIDIA's ``mma`` of compute capability 8.0, AMD's MFMA of bytes by how many of K an
instruction takes, AMD's WMMA by the generation whose registers it has, Intel's sub-groups of 8 without a matrix unit,
and Intel's XMX for 8 or 16 columns."""
XMX: Mapping[int, Matrix] = {8: "xmx8", 16: "xmx16"}
"""Intel's, by the least size of a sub-group."""
INTEL: frozenset[Matrix] = frozenset({"intel", "xmx8", "xmx16"})


@dataclass(frozen=True, slots=True)
class Abilities:
    """The properties of a device that kernels depend on.

    Attributes:
        compute_units: Parts of the device that run work-groups independently.
        group: Maximum work-items in a work-group.
        local_bytes: Maximum local memory of a work-group, in bytes.
        gpu: Whether it is a GPU. A CPU gains nothing by large work-groups and unrolled loops, and its compiler takes
            long for them.
        subgroups: Whether the language has sub-groups.
        f16: Whether the language has half-precision arithmetic.
        matrix: Kind of matrix products that the driver's compiler supports.
        resident: Number of work-groups guaranteed to run concurrently, whatever resources each needs; 0: unknown.
        wave: Work-items of a sub-group if the kernels implement sub-groups themselves; 0 if the language has them.
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
    wave: int = 0

    @property
    def defines(self) -> Mapping[str, int]:
        """Preprocessor constants for compiling kernels for the device."""
        having = {
            "FP16": self.f16,
            "INT_DOT": self.dot4 == "khr",
            "SUBGROUPS": self.subgroups,
            "SDOT4": self.dot4 == "sdot4",
            "SUDOT4": self.dot4 == "sudot4",
            "PTX": self.dot4 == "ptx",
            "GPU": self.gpu,
            "INTEL": self.matrix in INTEL,
            "WAVE": self.wave,
            "MFMA": int(self.matrix.removeprefix("mfma")) if self.matrix.startswith("mfma") else 0,
            "WMMA": int(self.matrix.removeprefix("wmma")) if self.matrix.startswith("wmma") else 0,
        }
        return {name: int(value) for name, value in having.items() if value}

    def options(self, standard: str) -> tuple[str, ...]:
        """Compiler options for compiling kernels for the device.

        Args:
            standard: The version of OpenCL C to request from the compiler: ``1.2`` or newer.
        """
        return (f"-cl-std=CL{standard}", *(f"-D{name}={value}" for name, value in self.defines.items()))
