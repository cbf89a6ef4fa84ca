"""Code shared by GPU backends: planning launches, compiling, memory, probing. A backend adds a driver and kernels."""

from bitnet.core.gpu.context import Bucket, Context, Dispatch
from bitnet.core.gpu.device import GpuDevice
from bitnet.core.gpu.drivers.interface import Arg, Buffer, Driver, Fetching, KernelSpec, Launch, Scalar, Size3, launch
from bitnet.core.gpu.executable import GpuExecutable
from bitnet.core.gpu.lowering import Lowering
from bitnet.core.gpu.ops.variants import variants
from bitnet.core.gpu.sources import KernelSources
from bitnet.core.gpu.weights import DenseBuffer, TernaryBuffer

__all__ = [
    "Arg",
    "Bucket",
    "Buffer",
    "Context",
    "DenseBuffer",
    "Dispatch",
    "Driver",
    "Fetching",
    "GpuDevice",
    "GpuExecutable",
    "KernelSources",
    "KernelSpec",
    "Launch",
    "Lowering",
    "Scalar",
    "Size3",
    "TernaryBuffer",
    "launch",
    "variants",
]
