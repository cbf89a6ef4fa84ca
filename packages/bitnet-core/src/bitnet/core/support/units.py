"""Human-readable numbers, with SI prefixes."""

from __future__ import annotations


def size(count: float) -> str:
    """A human-readable number of bytes: ``1.2 GB``."""
    return f"{scaled(count)}B"


def scaled(count: float) -> str:
    """A number with its SI prefix: ``1.2 G``."""
    for prefix in ("", "k", "M", "G"):
        if count < 1000:
            return f"{count:.3g} {prefix}"
        count /= 1000
    return f"{count:.3g} T"
