"""What the OpenCL C kernels may use of a device, whichever driver reaches it: a probe fills it in, kernels go by it."""

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
        wave: Work-items of a sub-group where the kernels bring sub-groups themselves; 0 where the language has them.
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
        """Preprocessor constants by which every kernel is compiled for the device."""
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
        """Compiler options by which every kernel is compiled for the device.

        Args:
            standard: The version of OpenCL C that the compiler is asked for: ``1.2`` or newer.
        """
        return (f"-cl-std=CL{standard}", *(f"-D{name}={value}" for name, value in self.defines.items()))
