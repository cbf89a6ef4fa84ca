"""AMD's architectures by the name that the driver gives: wave size and dot products of bytes.

Facts from LLVM's "User Guide for AMDGPU Backend" and from what its compiler takes for each.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from bitnet.core.gpu.clc.abilities import Abilities, Dot4

NAME = re.compile(r"gfx(\d{1,2})([0-9a-f]{2})")
"""Name of an architecture: its generation, then minor version and stepping in hexadecimal digits."""
SIGNED_DOT4 = {"gfx906", "gfx908", "gfx90a", "gfx940", "gfx941", "gfx942", "gfx950", "gfx1011", "gfx1012"} | {
    f"gfx103{stepping}" for stepping in range(7)
}
"""Architectures with ``v_dot4_i32_i8``."""
EITHER_DOT4 = (11, 12)
"""Generations with ``v_dot4_i32_iu8``."""
MOST_GROUP = 1024
"""Work-items of a work-group at most."""
LEAST = 9
"""The first generation that ROCm 6 knows."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture.

    Attributes:
        name: What compilers call it, such as ``gfx90a``.
        wave: Work-items that run in step, as the kernels are compiled.
        dot4: Dot products of four bytes.
    """

    name: str
    wave: int
    dot4: Dot4

    def abilities(self, *, compute_units: int, group: int, local_bytes: int) -> Abilities:
        """What the kernels may use of a device, by its numbers as in :class:`~bitnet.core.gpu.clc.Abilities`."""
        return Abilities(
            compute_units, min(group, MOST_GROUP), local_bytes, subgroups=True, f16=True, dot4=self.dot4, wave=self.wave
        )


def architecture(reported: str) -> Architecture | None:
    """Architecture of a device that reports a name such as ``gfx90a:sramecc+:xnack-``; None for one without kernels."""
    name = reported.partition(":")[0]
    found = NAME.fullmatch(name)
    if found is None or (generation := int(found[1])) < LEAST:
        return None
    dot4: Dot4 = "sudot4" if generation in EITHER_DOT4 else "sdot4" if name in SIGNED_DOT4 else "none"
    return Architecture(name, 64 if generation == 9 else 32, dot4)
