"""The numpy device: every operation written from ``kernels/README.md`` alone, as plainly as numpy allows.

It is the device of last resort (``cpu:numpy``) if no native library fits, computes for the fake devices of
``BITNET_GPU_FAKE``, and lets readers of the contract check their understanding.
"""

from bitnet.core.reference.device import KERNELS, NUMPY_INFO, ReferenceDevice

__all__ = ["KERNELS", "NUMPY_INFO", "ReferenceDevice"]
