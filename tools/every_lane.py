"""A plugin of pytest (``-p every_lane``): CUDA kernels are compiled as racecheck understands them.

Every lane arrives at a barrier, where otherwise one lane arrives for its warp; kernels/cuda/hopper.cuh says why.
"""

from __future__ import annotations

from collections.abc import Sequence

from bitnet.core.gpu import KernelSpec
from bitnet.cuda import compiler


def install() -> None:
    """Change the options of all kernels that are compiled from now on."""
    plain = compiler.options

    def options(spec: KernelSpec, arch: str) -> Sequence[str]:
        return [*plain(spec, arch), "-DEVERY_LANE_ARRIVES=1"]

    compiler.options = options  # type: ignore[assignment]


def pytest_configure() -> None:
    install()
