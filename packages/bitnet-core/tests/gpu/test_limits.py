"""What kernels that count in 32 bits cannot take is refused before anything runs."""

from __future__ import annotations

import numpy as np
import pytest

from bitnet.core.errors import InvalidInputError
from bitnet.core.gpu import Buffer, Context
from bitnet.core.gpu.context import Bucket
from bitnet.core.gpu.ops import MOST_QUANTIZED, RowOps
from bitnet.core.hal import Limits, Program, Quantize, StepLayout, TensorSpec


class Memory:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class NoDevice:
    """What a context needs of a driver, less the device."""

    def alloc(self, nbytes: int) -> Buffer:
        return Memory(nbytes)


@pytest.mark.parametrize("rows", [MOST_QUANTIZED // 4096, MOST_QUANTIZED // 4096 + 1, 2**20, 2**21])
def test_elements_to_quantise(rows: int) -> None:
    shape, op = (rows, 4096), Quantize("x", "codes", "scale")
    specs = [TensorSpec("x", "f32", shape), TensorSpec("codes", "i8", shape), TensorSpec("scale", "f32", (1,))]
    program = Program([op], {spec.name: spec for spec in specs}, {}, Limits(1))
    context = Context(NoDevice(), program, StepLayout(program.limits))  # type: ignore[arg-type]
    if rows * 4096 > MOST_QUANTIZED:
        with pytest.raises(InvalidInputError, match=f"{rows * 4096:,} elements"):
            RowOps(256).quantize(context, op, Bucket(1, 0, 0))
    else:
        partial, _, codes = RowOps(256).quantize(context, op, Bucket(1, 0, 0))
        stride = max(launch.grid[0] * launch.block[0] for launch in (partial, codes))
        for launch in (partial, codes):
            (n,) = (int(a) for a in launch.args if isinstance(a, np.int32))
            assert n == rows * 4096
            assert n + stride < 2**31
