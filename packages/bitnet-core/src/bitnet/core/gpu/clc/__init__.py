"""The lowering to OpenCL C kernels, shared by every driver that takes them: what to launch, by what a device has."""

from bitnet.core.gpu.clc.abilities import Abilities
from bitnet.core.gpu.clc.ops import ClcOps, sources

__all__ = ["Abilities", "ClcOps", "sources"]
