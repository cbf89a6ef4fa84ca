"""Helper processes for untrusted input: limited in time and memory, and killed when they exceed a limit."""

from bitnet.core.support.helper.process import Helper, HelperEnded, Limits, Program

__all__ = ["Helper", "HelperEnded", "Limits", "Program"]
