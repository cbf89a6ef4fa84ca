"""The CPU device: C kernels for each instruction-set level, called through ctypes, with numpy as the last resort."""
