"""Random ternary products of many tokens on ``rocm:0``, bit by bit against exact integers and the contract's roundings.

A program of its own, as the driver is chosen by the environment of a process. It prints the seed, each shape with its
tile, and how many shapes were wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

import numpy as np

from bitnet.core.devices.options import open_options
from bitnet.core.gguf import pack_ternary
from bitnet.core.gpu import GpuDevice, Launch
from bitnet.core.gpu.clc import ClcOps
from bitnet.core.gpu.clc.amd import architecture
from bitnet.core.hal import (
    Limits,
    Program,
    SequenceStep,
    Step,
    StepLayout,
    TensorSpec,
    TernaryData,
    TernaryMatmul,
    TernaryWeight,
    Weight,
    run,
)
from bitnet.core.testing.linear import Grouped, check_groups
from bitnet.rocm.backend import BACKEND

KERNEL = "ternary_gemm_matrix"
SHAPES = (
    (60, 100, 9, False, 96),
    (130, 640, 20, True, 3),
    (200, 128, 70, False, 8),
    (200, 256, 70, True, 5),
    (200, 384, 130, False, 1),
)
"""Rows of W, its columns, tokens, whether the product is added, and compute units: one shape for each of the tiles."""
GROUPED = ((9, 64), (20, 128), (70, 256), (70, 64), (130, 128))
"""Tokens, and columns of a group, of a second product with each of these tiles, which has five groups."""


def wrong(device: GpuDevice, rng: np.random.Generator, rows: int, cols: int, tokens: int, add: bool) -> int:
    """Elements of a product that differ in a bit."""
    x = rng.integers(-128, 128, (tokens, cols), np.int8)
    scale = rng.uniform(0.01, 0.1, tokens).astype(np.float32)
    codes = [rng.integers(-1, 2, (n, cols), np.int8) for n in (rows - rows // 3, rows // 3)]
    scales = [rng.uniform(0.5, 2, 1).astype(np.float32) for _ in codes]
    start = (
        rng.standard_normal((tokens, rows)).astype(np.float32) if add else np.full((tokens, rows), np.nan, np.float32)
    )
    weights: dict[str, Weight] = {}
    for i, (code, factor) in enumerate(zip(codes, scales, strict=True)):
        weights[f"w{i}"] = TernaryWeight(code.shape, partial(TernaryData, pack_ternary(code), factor))
    tensors = (
        TensorSpec("x", "i8", ("M", cols)),
        TensorSpec("scale", "f32", ("M",)),
        TensorSpec("out", "f32", ("M", rows)),
    )
    product = TernaryMatmul("x", "scale", tuple(weights), "out", add=add)
    program = Program([product], {t.name: t for t in tensors}, weights, Limits(tokens), name="products")
    executable = device.compile(program)
    try:
        executable.write("x", x)
        executable.write("scale", scale)
        executable.write("out", start)
        run(executable, Step(StepLayout(program.limits), [SequenceStep([0] * tokens, length=tokens)]))
        found = executable.read("out")
    finally:
        executable.close()
    exact = (x.astype(np.int64) @ np.concatenate(codes).T.astype(np.int64)).astype(np.float32)
    row_scales = np.repeat(np.concatenate(scales), [len(code) for code in codes])
    expected = exact * (scale[:, None] * row_scales)
    expected = start + expected if add else expected
    return int(np.count_nonzero(found.view(np.uint32) != expected.view(np.uint32)))


def main() -> None:
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    rng, failed = np.random.default_rng(seed), 0
    (info,) = BACKEND.probe().devices
    device = BACKEND.open(info, open_options())
    assert isinstance(device, GpuDevice)
    driver, launched = device._driver, list[Launch]()
    record = driver.record

    def recorded(launches: Sequence[Launch]) -> object:
        launched.extend(launches)
        return record(launches)

    driver.record = recorded  # type: ignore[method-assign]
    kind = architecture(info.details["architecture"])
    assert kind is not None
    tiles = set()
    for rows, cols, tokens, add, units in SHAPES:
        abilities = kind.abilities(compute_units=units, group=1024, local_bytes=65536)
        device = GpuDevice(info, driver, ClcOps(abilities).lowering())
        launched.clear()
        count = wrong(device, rng, rows, cols, tokens, add)
        (spec,) = [launch.kernel for launch in launched if launch.kernel.entry == KERNEL]
        tile = tuple(value for name, value in spec.defines if name in ("TM", "TN", "WAVES_M", "WAVES_N"))
        tiles.add(tile)
        failed += count > 0
        print(f"{rows} x {cols}, {tokens} tokens, tile {tile}: {count} of {rows * tokens} differ")
        more, group = GROUPED[len(tiles) - 1]
        grouped = Grouped(more, (rows - rows // 3, rows // 3), 5 * group, group, add)
        launched.clear()
        check_groups(device, rng, grouped)
        assert KERNEL in {launch.kernel.entry for launch in launched}
        print(grouped)
    print(f"{len(tiles)} tiles, {failed} wrong")
    driver.close()


if __name__ == "__main__":
    main()
