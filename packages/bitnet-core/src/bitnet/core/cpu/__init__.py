"""The CPU device: C kernels for each instruction-set level behind ctypes, and numpy as the last resort."""
