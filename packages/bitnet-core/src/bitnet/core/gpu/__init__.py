"""What GPU backends share, so that a backend is four small files: ``backend``, ``compiler``, ``device`` and ``ops``."""

from bitnet.core.gpu.context import MAX_COUNT, Bucket, Context
from bitnet.core.gpu.device import GpuDevice
from bitnet.core.gpu.driver import Arg, Buffer, Driver, KernelSpec, Launch, Scalar, Size3
from bitnet.core.gpu.executable import GpuExecutable
from bitnet.core.gpu.plan import Dispatch, Lowering
from bitnet.core.gpu.sources import KernelSources
from bitnet.core.gpu.weights import DenseBuffer, TernaryBuffer

__all__ = [
    "MAX_COUNT",
    "Arg",
    "Bucket",
    "Buffer",
    "Context",
    "DenseBuffer",
    "Dispatch",
    "Driver",
    "GpuDevice",
    "GpuExecutable",
    "KernelSources",
    "KernelSpec",
    "Launch",
    "Lowering",
    "Scalar",
    "Size3",
    "TernaryBuffer",
]
