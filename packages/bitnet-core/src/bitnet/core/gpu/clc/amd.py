"""AMD's architectures by the driver's name for them: wave size, dot products and matrix products of bytes.

Sources: LLVM's "User Guide for AMDGPU Backend", and what its compiler accepts for each architecture.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from bitnet.core.gpu.clc.abilities import Abilities, Dot4, Matrix

NAME = re.compile(r"gfx(\d{1,2})([0-9a-f]{2})")
"""Name of an architecture: its generation, then minor version and stepping in hexadecimal digits."""
SIGNED_DOT4 = {"gfx906", "gfx908", "gfx90a", "gfx940", "gfx941", "gfx942", "gfx950", "gfx1011", "gfx1012"} | {
    f"gfx103{stepping}" for stepping in range(7)
}
"""Architectures with ``v_dot4_i32_i8``."""
EITHER_DOT4 = (11, 12)
"""Generations with ``v_dot4_i32_iu8``."""
MFMA: dict[str, Matrix] = {
    "gfx908": "mfma16",
    "gfx90a": "mfma16",
    "gfx940": "mfma32",
    "gfx941": "mfma32",
    "gfx942": "mfma32",
    "gfx950": "mfma64",
}
"""Matrix products of the architectures that have ``v_mfma_i32_16x16x…``."""
WMMA: dict[int, Matrix] = {11: "wmma11", 12: "wmma12"}
"""Matrix products of the generations that have ``v_wmma_i32_16x16x16_iu8``."""
WITHOUT_WMMA = {"gfx1250", "gfx1251"}
"""Architectures of those generations that lack these instructions or have different ones."""
MAX_GROUP = 1024
"""Maximum work-items in a work-group."""
MIN_GENERATION = 9
"""The oldest generation that ROCm 6 supports."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture.

    Attributes:
        name: Its name in compilers, such as ``gfx90a``.
        wave: Work-items of a wave, for which the kernels are compiled.
        dot4: Dot products of four bytes.
        matrix: Matrix products of bytes.
    """

    name: str
    wave: int
    dot4: Dot4
    matrix: Matrix

    @property
    def features(self) -> tuple[str, ...]:
        """The features shown by ``bitnet devices``."""
        has = {"int8-dot": self.dot4, "int8-matrix": self.matrix}
        return tuple(feature for feature, kind in has.items() if kind != "none")

    def abilities(self, *, compute_units: int, group: int, local_bytes: int) -> Abilities:
        """The abilities of a device of this architecture; arguments as in :class:`~bitnet.core.gpu.clc.Abilities`."""
        return Abilities(
            compute_units,
            min(group, MAX_GROUP),
            local_bytes,
            subgroups=True,
            f16=True,
            dot4=self.dot4,
            matrix=self.matrix,
            wave=self.wave,
        )


def architecture(reported: str) -> Architecture | None:
    """The architecture for a reported name such as ``gfx90a:sramecc+:xnack-``; None if there are no kernels for it."""
    name = reported.partition(":")[0]
    found = NAME.fullmatch(name)
    if found is None or (generation := int(found[1])) < MIN_GENERATION:
        return None
    dot4: Dot4 = "sudot4" if generation in EITHER_DOT4 else "sdot4" if name in SIGNED_DOT4 else "none"
    matrix: Matrix = "none" if name in WITHOUT_WMMA else MFMA.get(name) or WMMA.get(generation, "none")
    return Architecture(name, 64 if generation == 9 else 32, dot4, matrix)
