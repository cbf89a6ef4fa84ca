"""Sizes that overflow the kernels' 32-bit counters are refused before anything runs."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from bitnet.core.errors import InvalidInputError
from bitnet.core.gpu import Context
from bitnet.core.gpu.context import Bucket
from bitnet.core.gpu.ops import MAX_QUANTIZED, RowOps
from bitnet.core.hal import Limits, Program, Quantize, StepLayout, TensorSpec


@pytest.mark.parametrize("rows", [MAX_QUANTIZED // 4096, MAX_QUANTIZED // 4096 + 1, 2**20, 2**21])
def test_elements_to_quantise(rows: int) -> None:
    shape, op = (rows, 4096), Quantize("x", "codes", "scale")
    specs = [TensorSpec("x", "f32", shape), TensorSpec("codes", "i8", shape), TensorSpec("scale", "f32", (1,))]
    program = Program([op], {spec.name: spec for spec in specs}, {}, Limits(1))
    memory = SimpleNamespace(alloc=lambda nbytes: SimpleNamespace(nbytes=nbytes))  # all that is needed of a driver
    context = Context(memory, program, StepLayout(program.limits))
    if rows * 4096 > MAX_QUANTIZED:
        with pytest.raises(InvalidInputError, match=f"{rows * 4096:,} elements"):
            RowOps(256).quantize(context, op, Bucket(1, 0, 0))
    else:
        partial, _, codes = RowOps(256).quantize(context, op, Bucket(1, 0, 0))
        stride = max(launch.grid[0] * launch.block[0] for launch in (partial, codes))
        for launch in (partial, codes):
            (n,) = (int(a) for a in launch.args if isinstance(a, np.int32))
            assert n == rows * 4096
            assert n + stride < 2**31
