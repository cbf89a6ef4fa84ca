"""A plugin of pytest (``-p for_racecheck``): CUDA kernels are compiled and launched as racecheck can follow them.

Every lane arrives at a barrier, where otherwise one lane arrives for its warp; kernels/cuda/hopper.cuh says why. The
head's kernels, which take a share of its rows a block, get the blocks of a small GPU: each block is watched thread by
thread, which takes hundreds of times as long, and what races within a block is the same in each. Launches form no
graph and follow each other: with a graph, the heads' programs end with an illegal address when the tool watches one
kernel alone (compute-sanitizer 2025.3.1, which fails so with 16 of 67 kernels even without).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bitnet.core.gpu import KernelSpec, Launch
from bitnet.cuda import compiler
from bitnet.cuda.device import CudaDriver
from bitnet.cuda.head import HeadOps

MULTIPROCESSORS = 4
"""Multiprocessors that the head's kernels are launched for."""


def install() -> None:
    """Change the options of all kernels that are compiled, the launches of all heads, and recordings, from now on."""
    plain, made = compiler.options, HeadOps.__init__

    def options(spec: KernelSpec, arch: str) -> Sequence[str]:
        return [*plain(spec, arch), "-DEVERY_LANE_ARRIVES=1"]

    def small(ops: HeadOps, multiprocessors: int, capability: tuple[int, int]) -> None:
        made(ops, min(multiprocessors, MULTIPROCESSORS), capability)

    def record(driver: CudaDriver, launches: Sequence[Launch]) -> Sequence[Launch]:
        with driver._entered():
            driver._load([launch.kernel for launch in launches])
        return tuple(launches)

    def submit(driver: CudaDriver, recording: Sequence[Launch]) -> None:
        with driver._entered():
            for launch in recording:
                driver._launch(replace(launch, overlaps=False), driver._functions[launch.kernel])
                driver._wait()

    CudaDriver.record = record  # type: ignore[assignment,method-assign]
    CudaDriver.submit = submit  # type: ignore[assignment,method-assign]
    compiler.options = options  # type: ignore[assignment]
    HeadOps.__init__ = small  # type: ignore[method-assign,assignment]


def pytest_configure() -> None:
    install()
