"""Tests of ``embed``, ``dense_matmul`` and sampling with tables in blocks, which a device may refuse."""

from __future__ import annotations

from contextlib import closing
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from bitnet.core.gguf import GGMLType
from bitnet.core.gguf.quants import decode
from bitnet.core.hal import (
    BLOCK_SIZES,
    BLOCK_TABLES,
    GREEDY,
    BlockType,
    BlockWeight,
    DenseMatmul,
    Device,
    Embed,
    Limits,
    Op,
    Program,
    Sample,
    SequenceStep,
    Step,
    StepLayout,
    run,
)
from bitnet.core.testing.base import DeviceTests
from bitnet.core.testing.cases import Size, log_uniform, over, pick
from bitnet.core.testing.heads import DRAWS
from bitnet.core.testing.poison import poison_step
from bitnet.core.testing.rig import Rig, assert_within, tensor, tokens
from bitnet.core.testing.tables import activations, taken

SCALES_AT: dict[BlockType, tuple[int, ...]] = {"q8_0": (0,), "q4_0": (0,), "q6_k": (208,), "q4_k": (0, 2)}
"""Where a block has f16 numbers."""


class BlockTable(NamedTuple):
    """A table of ``rows`` rows and ``width`` columns in blocks of a type, multiplied with ``m`` rows."""

    m: int
    rows: int
    width: int
    dtype: BlockType


def block_shapes(size: Size) -> list[BlockTable]:
    fixed = [
        BlockTable(1, 1, 32, "q8_0"),
        BlockTable(1, 301, 288, "q4_0"),
        BlockTable(3, 129, 256, "q6_k"),
        BlockTable(5, 67, 512, "q4_k"),
        BlockTable(6, 203, 2016, "q8_0"),
        BlockTable(17, 97, 1280, "q4_k"),
        BlockTable(2, 1031, 768, "q6_k"),
        BlockTable(9, 300, 544, "q4_0"),
    ]

    def draw(rng: np.random.Generator) -> BlockTable:
        dtype: BlockType = rng.choice([*BLOCK_SIZES])
        columns = BLOCK_SIZES[dtype][0]
        width = log_uniform(rng, columns, 4096, columns)
        return BlockTable(log_uniform(rng, 1, 64), log_uniform(rng, 1, 3000), width, dtype)

    return pick(size, fixed, draw, lambda s: s.m * s.rows * s.width)


def random_blocks(rng: np.random.Generator, rows: int, width: int, dtype: BlockType) -> npt.NDArray[np.uint8]:
    """Random blocks, ``uint8[rows, bytes]``; f16 numbers of both signs and any size, some zero, some subnormal."""
    columns, size = BLOCK_SIZES[dtype]
    blocks = rng.integers(0, 256, (rows * width // columns, size), dtype=np.uint8)
    for at in SCALES_AT[dtype]:
        scales = 10 ** rng.uniform(-4, -1, len(blocks)) * rng.choice([-1, 0, 1, 1, 1, 1, 1, 6e-5], len(blocks))
        blocks[:, at : at + 2] = scales.astype("<f2").reshape(-1, 1).view(np.uint8)
    return blocks.reshape(rows, -1)


def blocks_of(data: npt.NDArray[np.uint8], width: int, dtype: BlockType) -> BlockWeight:
    """A weight of these blocks, read-only like a mapped file, at an odd multiple of two bytes."""
    memory = np.empty(data.nbytes + 2, np.uint8)
    fixed = memory[2:].reshape(data.shape)
    fixed[:] = data
    fixed.setflags(write=False)
    return BlockWeight((len(data), width), dtype, lambda: fixed)


def floats(data: npt.NDArray[np.uint8], width: int, dtype: BlockType) -> npt.NDArray[np.float32]:
    """The table in f32, by numpy."""
    out = np.empty((len(data), width), np.float32)
    decode(GGMLType[dtype.upper()], data, out)
    return out


class BlockTableTests(DeviceTests):
    @over(block_shapes)
    def test_embed_of_a_table_in_blocks(self, device: Device, rng: np.random.Generator, case: BlockTable) -> None:
        data = random_blocks(rng, case.rows, case.width, case.dtype)
        ids = rng.integers(0, case.rows, case.m).astype(np.int32)
        ids[-1] = case.rows - 1
        specs, weights = [tensor("out", "f32", "M", case.width)], {"t": blocks_of(data, case.width, case.dtype)}
        with (
            taken(device, BLOCK_TABLES),
            Rig(device, [Embed("t", "out")], specs, weights, limits=Limits(case.m)) as rig,
        ):
            out = rig.run([SequenceStep(ids, case.m)], {}, ["out"])["out"]
            assert_within("out", out, floats(data, case.width, case.dtype)[ids].astype(np.float64), 0.0)

    @over(block_shapes)
    def test_dense_matmul_of_a_table_in_blocks(
        self, device: Device, rng: np.random.Generator, case: BlockTable
    ) -> None:
        data = random_blocks(rng, case.rows, case.width, case.dtype)
        x = activations(rng, case.m, case.width)
        specs = [tensor("x", "f32", "R", case.width), tensor("out", "f32", "R", case.rows)]
        limits, weights = Limits(case.m, max_rows=case.m), {"w": blocks_of(data, case.width, case.dtype)}
        with (
            taken(device, BLOCK_TABLES),
            Rig(device, [DenseMatmul("x", "w", "out")], specs, weights, limits=limits) as rig,
        ):
            out = rig.run(tokens(case.m, range(case.m)), {"x": x}, ["out"])["out"]
            wide, table = x.astype(np.float64), floats(data, case.width, case.dtype).astype(np.float64)
            assert_within("out", out, wide @ table.T, 1e-6 * (abs(wide) @ abs(table).T) + 1e-37)

    @pytest.mark.parametrize("dtype", BLOCK_SIZES)
    def test_sampling_from_a_head_in_blocks(self, device: Device, rng: np.random.Generator, dtype: BlockType) -> None:
        """Tied as an embedding; tokens are those of the step with its logits, greedy ones the best in float64."""
        vocabulary, width = {"small": (301, 256), "quick": (2003, 512), "full": (151_936, 2048)}[self.run_size]
        rows = int(rng.integers(1, 6))
        data = random_blocks(rng, vocabulary, width, dtype)
        specs = [
            tensor("e", "f32", "M", width),
            tensor("x", "f32", "R", width),
            tensor("logits", "f32", "R", vocabulary),
            tensor("out", "i32", "R"),
        ]
        ops: list[Op] = [Embed("head", "e"), DenseMatmul("x", "head", "logits"), Sample("logits", "out")]
        limits = Limits(rows, rows, rows)
        weights = {"head": blocks_of(data, width, dtype)}
        program = Program(ops, {s.name: s for s in specs}, weights, limits, name="head")
        with taken(device, BLOCK_TABLES), closing(device.compile(program)) as executable:
            for params in (GREEDY, *DRAWS):
                x = activations(rng, rows, width)
                parts = [SequenceStep([0], int(at) + 1, rows=[0], sampling=params) for at in rng.integers(0, 99, rows)]
                executable.write("x", x)
                roughly, exactly = (
                    run(executable, poison_step(Step(StepLayout(limits), parts, logits=logits)))[0]
                    for logits in (False, True)
                )
                assert roughly.tolist() == exactly.tolist(), f"{params} chose another token where no logits are read"
                if params is GREEDY:
                    table = floats(data, width, dtype).astype(np.float64)
                    exact, bounds = x.astype(np.float64) @ table.T, 1e-6 * (abs(x).astype(np.float64) @ abs(table).T)
                    chosen = exact[np.arange(rows), roughly]
                    assert (chosen >= exact.max(axis=1) - 2 * bounds.max(axis=1)).all(), "a better token is there"
