"""Checks that a device computes correctly: compares a product with a random ternary matrix with exact integers."""

from __future__ import annotations

import numpy as np

from bitnet.core.gguf import pack_ternary
from bitnet.core.hal import (
    Device,
    Limits,
    Program,
    SequenceStep,
    Step,
    StepLayout,
    TensorSpec,
    TernaryData,
    TernaryMatmul,
    TernaryWeight,
    run,
)

ROWS, COLS = 48, 384


def wrong_products(device: Device, *, tokens: int = 1) -> str:
    """A description of the errors in a device's product for some tokens; empty if it is exact.

    Raises:
        BitNetError: The device fails.
    """
    rng = np.random.default_rng()
    x = rng.integers(-128, 128, (tokens, COLS), np.int8)
    codes = rng.integers(-1, 2, (ROWS, COLS), np.int8)
    exact = x.astype(np.int64) @ codes.T.astype(np.int64)
    weight = TernaryWeight((ROWS, COLS), lambda: TernaryData(pack_ternary(codes), np.ones(1, np.float32)))
    tensors = (
        TensorSpec("x", "i8", ("M", COLS)),
        TensorSpec("scale", "f32", ("M",)),
        TensorSpec("out", "f32", ("M", ROWS)),
    )
    product = TernaryMatmul("x", "scale", ("w",), "out")
    limits = Limits(tokens)
    program = Program([product], {t.name: t for t in tensors}, {"w": weight}, limits, name="self-check")
    executable = device.compile(program)
    try:
        executable.write("x", x)
        executable.write("scale", np.ones(tokens, np.float32))
        executable.write("out", np.full(exact.shape, np.nan, np.float32))
        run(executable, Step(StepLayout(program.limits), [SequenceStep([0] * tokens, length=tokens)]))
        wrong = np.count_nonzero(executable.read("out") != exact)
    finally:
        executable.close()
    return f"{wrong} of {exact.size} products are wrong" if wrong else ""
