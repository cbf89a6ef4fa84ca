"""The lowering to OpenCL C kernels, shared by every driver that accepts them; it depends on a device's abilities.

A backend on it is a probe, a driver (:class:`bitnet.core.gpu.Driver`), a compiler
(:class:`bitnet.core.gpu.programs.Compiler`), and the :class:`Abilities` of a device.
"""

from bitnet.core.gpu.clc.abilities import Abilities
from bitnet.core.gpu.clc.device import open_device
from bitnet.core.gpu.clc.launching import values, work_items
from bitnet.core.gpu.clc.ops import ClcOps, sources
from bitnet.core.gpu.clc.vendors import tried

__all__ = ["Abilities", "ClcOps", "open_device", "sources", "tried", "values", "work_items"]
