"""The numpy device: every operation written from ``kernels/README.md`` alone, as plainly as numpy allows.

It is the device of last resort (``cpu:numpy``) where no native library fits, serves the fake devices of
``BITNET_GPU_FAKE``, and is what a reader of the contract can check their understanding against.
"""

from bitnet.core.reference.device import KERNELS, NUMPY_INFO, ReferenceDevice

__all__ = ["KERNELS", "NUMPY_INFO", "ReferenceDevice"]
