"""Embeddings whose rows the CPU looks up in their file's blocks, in place of a copy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bitnet.core.cpu.device import CpuDevice
from bitnet.core.gguf import GGMLType
from bitnet.core.gguf.blocks import FORMATS, code_places, encode_blocks
from bitnet.core.gguf.types import BLOCKS
from bitnet.core.hal import CodeBlocks, DenseMatmul, Embed, Limits, Op, SequenceStep, Transform
from bitnet.core.testing import oracle_recurrent
from bitnet.core.testing.rig import Rig, dense, random_ternary, tensor, ternary

TYPES = [dtype for dtype in FORMATS if code_places(dtype) is not None]


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def table_of(rng: np.random.Generator, dtype: GGMLType, rows: int, count: int) -> tuple[Any, Any, Any]:
    """A table of rows of so many blocks: the weight, whose packed codes are wrong, its values, and its blocks."""
    columns = BLOCKS[dtype][0]
    codes = random_ternary(rng, rows, count * columns)
    if dtype is GGMLType.Q1_0:
        codes = np.where(codes == 0, 1, codes).astype(np.int8)
    scales = (rng.uniform(-2, 2, (rows, count)) * rng.choice([0, 1, 1, 1], (rows, count))).astype(np.float16)
    blocks = encode_blocks(dtype, (codes + 1).astype(np.uint8).reshape(-1, columns), scales.reshape(-1))
    places = code_places(dtype)
    assert places is not None
    found = CodeBlocks(blocks.reshape(rows, -1), FORMATS[dtype].scale_at, *places)
    values = codes * np.repeat(scales.astype(np.float64), columns, axis=1)
    return replace(ternary(-codes, scales), blocks=lambda: found), values, found


@pytest.mark.parametrize("transformed", [False, True], ids=["plain", "transform"])
@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.name)
def test_rows_are_those_of_the_file(
    device: CpuDevice, rng: np.random.Generator, dtype: GGMLType, transformed: bool
) -> None:
    """The packed codes, which have other signs, are not used."""
    rows = int(rng.integers(1, 70))
    weight, values, _ = table_of(rng, dtype, rows, int(rng.integers(1, 6)))
    ids = rng.integers(0, rows, 9).astype(np.int32)
    ids[-1] = rows - 1
    width, wanted = values.shape[1], values[ids]
    signs = rng.choice(np.array([-1, 1], np.float32), width)
    if transformed:
        wanted = oracle_recurrent.hadamard(wanted.astype(np.float32), 32) * signs
    op = Embed("t", "out", Transform(32, "signs") if transformed else None)
    specs = [tensor("out", "f32", "M", width)]
    with Rig(device, [op], specs, {"t": weight, "signs": dense(signs)}, limits=Limits(12)) as rig:
        out = rig.run([SequenceStep(ids, len(ids))], {}, ["out"])["out"]
    if transformed:
        assert (abs(out - wanted).max(axis=1) <= 1e-5 * abs(wanted).max(axis=1)).all()
    else:
        np.testing.assert_array_equal(out, wanted)


def test_a_table_that_is_the_head_too_is_packed(device: CpuDevice, rng: np.random.Generator) -> None:
    """Its products need the packed form, and rows come from there: the one with other signs."""
    weight, values, _ = table_of(rng, GGMLType.PTQ1_0, 40, 2)
    ids = rng.integers(0, 40, 5).astype(np.int32)
    ops: list[Op] = [Embed("t", "out"), DenseMatmul("x", "t", "logits")]
    specs = [tensor("out", "f32", "M", 256), tensor("x", "f32", "R", 256), tensor("logits", "f32", "R", 40)]
    with Rig(device, ops, specs, {"t": weight}, limits=Limits(5)) as rig:
        out = rig.run([SequenceStep(ids, 5)], {}, ["out"])["out"]
    np.testing.assert_array_equal(out, -values[ids])
