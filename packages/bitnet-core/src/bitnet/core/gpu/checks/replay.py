"""Checks that a device replays recordings correctly: compares steps replayed and launched one by one.

HIP graphs of ROCm 7.2.0 to 7.2.3 are known to replay incorrectly on some devices.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from bitnet.core.errors import DeviceError, DeviceLostError
from bitnet.core.gguf import pack_ternary
from bitnet.core.gpu.device import GpuDevice
from bitnet.core.hal import (
    DenseMatmul,
    DenseWeight,
    Embed,
    Limits,
    NormQuant,
    NormRows,
    Op,
    Program,
    Sample,
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

WIDTH, TOKENS, LAYERS = 256, 64, 8
"""Columns and rows of each matrix, tokens of the vocabulary, and products of a step."""
STARTS, STEPS = (1, 40), 4
"""First tokens of the runs, and decode steps of each: a graph may go wrong only when it is launched again."""

Array = npt.NDArray[Any]


class Replayer(Protocol):
    """A driver with two ways to run its recordings.

    Attributes:
        graphs: Whether new recordings are replayed as a whole; if false, their launches start one by one.
    """

    graphs: bool


def wrong_replay(device: GpuDevice, driver: Replayer) -> str:
    """A description of how replayed steps differ from the same launches one by one; empty if they are bit-identical.

    Afterwards, the driver's graphs are disabled.

    Raises:
        BitNetError: The device fails without graphs, or is lost.
    """
    program = _program(np.random.default_rng())
    driver.graphs = False
    expected = _run(device, program)
    driver.graphs = True
    try:
        replayed = _run(device, program)
    except DeviceLostError:
        raise
    except DeviceError as error:
        return error.message
    finally:
        driver.graphs = False
    same = all(np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in zip(expected, replayed, strict=True))
    return "" if same else f"{device.info.name}: a replayed step differs from the same step launched kernel by kernel."


def _run(device: GpuDevice, program: Program) -> list[Array]:
    """The tokens of some runs, and the contents of all tensors of the program after each."""
    executable, found = device.compile(program, keep=True), []
    try:
        for start in STARTS:
            step = Step(StepLayout(program.limits), [SequenceStep([start], length=1, rows=(0,))])
            found += [run(executable, step, STEPS), *(executable.read(name) for name in program.tensors)]
        return found
    finally:
        executable.close()


def _program(rng: np.random.Generator) -> Program:
    """A chain of products with random weights, each applied to the sum of the previous ones."""
    data = TernaryData(pack_ternary(rng.integers(-1, 2, (WIDTH, WIDTH), np.int8)), np.full(1, 0.1, np.float32))
    gain, table = np.ones(WIDTH, np.float32), rng.standard_normal((TOKENS, WIDTH)).astype(np.float32)
    weights: dict[str, Weight] = {
        "gain": DenseWeight(gain.shape, "f32", lambda: gain),
        "table": DenseWeight(table.shape, "f32", lambda: table),
        "matrix": TernaryWeight((WIDTH, WIDTH), lambda: data),
    }
    layer: list[Op] = [NormQuant("x", "gain", 1e-5, "q", "s"), TernaryMatmul("q", "s", ("matrix",), "x", add=True)]
    head: list[Op] = [NormRows("x", "gain", 1e-5, "last"), DenseMatmul("last", "table", "logits")]
    tensors = (
        TensorSpec("x", "f32", ("M", WIDTH)),
        TensorSpec("q", "i8", ("M", WIDTH)),
        TensorSpec("s", "f32", ("M",)),
        TensorSpec("last", "f32", ("R", WIDTH)),
        TensorSpec("logits", "f32", ("R", TOKENS)),
        TensorSpec("token", "i32", ("R",)),
    )
    ops = [Embed("table", "x"), *layer * LAYERS, *head, Sample("logits", "token")]
    return Program(ops, {spec.name: spec for spec in tensors}, weights, Limits(1), name="replay check")
