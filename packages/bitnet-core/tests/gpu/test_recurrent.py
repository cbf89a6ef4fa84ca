"""Launches of recurrent layers and transforms on every GPU API, and where the passes of a run find their states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from bitnet.core.gpu import Context, GpuExecutable, Launch, Lowering
from bitnet.core.gpu.context import Bucket
from bitnet.core.gpu.ops import RowOps
from bitnet.core.gpu.ops.variants import key, recurrent_variants, variants
from bitnet.core.hal import (
    LOOK_AHEAD,
    STATES,
    CausalConv,
    DeltaGates,
    DeltaRule,
    DeviceInfo,
    DeviceType,
    Embed,
    GatedQuant,
    GluNormQuant,
    Limits,
    NormQuant,
    NormRows,
    Op,
    Program,
    Sample,
    SequenceStep,
    StateSpec,
    Step,
    StepLayout,
    Transform,
)
from bitnet.core.testing.rig import dense, tensor

WIDTH, HEADS, D_K, D_V, TAPS, ENTRIES = 96, 6, 8, 12, 4, 5
LIMITS = Limits(40, 3, 3)
BEFORE, AFTER = Transform(32, "signs"), Transform(16)
ROW = np.ones(WIDTH, np.float32)
WEIGHTS: dict[str, Any] = {
    "norm": dense(ROW),
    "signs": dense(ROW),
    "head": dense(ROW[:D_V]),
    "bias": dense(ROW[:HEADS]),
    "rate": dense(-ROW[:HEADS]),
    "alpha": dense(np.ones((HEADS, WIDTH), np.float32)),
    "beta": dense(np.ones((HEADS, WIDTH), np.float32)),
    "conv": dense(np.ones((WIDTH, TAPS), np.float32)),
    "table": dense(np.ones((50, WIDTH), np.float32)),
}
SPECS = {"tail": StateSpec((TAPS - 1, WIDTH), ENTRIES), "matrix": StateSpec((HEADS, D_K, D_V), ENTRIES)}
OPS: Sequence[Op] = (
    Embed("table", "x", BEFORE),
    NormQuant("x", "norm", 1e-5, "q", "s", BEFORE),
    NormQuant("x", None, 1e-5, "q", "s", AFTER),
    DeltaGates("x", "norm", 1e-5, "alpha", "beta", "bias", "rate", "gates"),
    CausalConv("x", "conv", "tail", "mixed"),
    DeltaRule("qkv", "gates", "matrix", "delta", 2, 1e-6, tiled=True),
    GatedQuant("delta", "z", "silu", "head", 1e-6, "dq", "s", Transform(8), 2),
    GatedQuant("mixed", "x", "sigmoid", None, 1e-6, "q", "s"),
    GluNormQuant("glu", "norm", 1e-5, "silu", "q", "s", BEFORE),
    GluNormQuant("glu", None, 1e-5, "silu", "q", "s", BEFORE),
    NormRows("x", "norm", 1e-5, "last", AFTER),
    Sample("last", "next"),
)
WIDTHS = {"x": WIDTH, "mixed": WIDTH, "gates": 2 * HEADS, "qkv": 4 * D_K + HEADS * D_V, "glu": 2 * WIDTH}
WIDTHS |= {"delta": HEADS * D_V, "z": HEADS * D_V}


GROUP = 64
"""Work-items of a work-group, as on a device that has no more."""


def program() -> Program:
    specs = [tensor(name, "f32", "M", width) for name, width in WIDTHS.items()]
    specs += [tensor("q", "i8", "M", WIDTH), tensor("dq", "i8", "M", HEADS * D_V), tensor("s", "f32", "M")]
    specs += [tensor("last", "f32", "R", WIDTH), tensor("next", "i32", "R")]
    return Program(OPS, {spec.name: spec for spec in specs}, WEIGHTS, LIMITS, states=SPECS)


class Memory:
    def __init__(self, nbytes: int) -> None:
        self.data = np.zeros(nbytes, np.uint8)
        self.nbytes = nbytes


class NoDevice:
    """A driver that computes nothing, but has memory."""

    def alloc(self, nbytes: int) -> Memory:
        return Memory(nbytes)

    def free(self, buffer: Any) -> None: ...

    def upload(self, buffer: Any, array: np.ndarray[Any, Any], offset: int = 0) -> None:
        buffer.data[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def download(self, buffer: Any, array: np.ndarray[Any, Any], offset: int = 0) -> None: ...

    def record(self, launches: Sequence[Launch]) -> object:
        return launches

    def submit(self, recording: Any) -> None: ...

    def memory(self) -> tuple[int, int]:
        return 0, 0

    def close(self) -> None: ...


def lowering() -> Lowering:
    rows = RowOps(group=GROUP)
    table = {**rows.table(), **variants(rows)}
    return Lowering({**table, **recurrent_variants(rows, table)})


@pytest.mark.parametrize("index", range(len(OPS)))
@pytest.mark.parametrize("tokens", [1, 40])
def test_no_launch_has_a_buffer_twice_or_more_work_than_there_is(index: int, tokens: int) -> None:
    """WebGPU binds no buffer twice if a kernel writes it. Sequences are no more than the limits allow."""
    made, op = program(), OPS[index]
    context = Context(NoDevice(), made, StepLayout(LIMITS))
    launches = lowering().table[key(made, op)](context, op, Bucket(tokens, min(tokens, 3), 0)) or []
    assert launches
    for launch in launches:
        if launch.kernel.file not in ("norm_quant", "sample"):  # which have any buffer for a norm that is not there
            written = [buffer for buffer in launch.buffers if buffer is not context.step]
            assert len(set(map(id, written))) == len(written), launch.kernel
        if launch.kernel.file == "delta_rule":
            assert launch.grid == (1, HEADS, min(tokens, 3))
            assert launch.block == (GROUP, 1, 1)
    if getattr(op, "transform", None) is not None:
        (hadamard,) = (launch for launch in launches if launch.kernel.file == "hadamard")
        block, signs = (dict(hadamard.kernel.defines)[name] for name in ("BLOCK", "SIGNS"))
        assert block == op.transform.block  # type: ignore[union-attr]
        assert signs == (0 if op.transform.signs is None else 2 if isinstance(op, Embed) else 1)  # type: ignore[union-attr]


def test_each_state_has_room_for_all_entries() -> None:
    context = Context(NoDevice(), program(), StepLayout(LIMITS))
    sizes = {name: context.state(name).nbytes for name in SPECS}
    assert sizes == {"tail": 4 * 3 * WIDTH * ENTRIES, "matrix": 4 * HEADS * D_K * D_V * ENTRIES}
    assert context.state("tail") is context.state("tail")


def test_passes_that_go_on_read_what_those_before_have_written() -> None:
    """The first pass of a step reads ``state_from``; all later ones, in later calls as well, ``state_to``."""
    info = DeviceInfo("none", "0", "none", "none", "none", DeviceType.DISCRETE, features=(STATES, LOOK_AHEAD))
    executable = GpuExecutable(NoDevice(), info, program(), lowering(), lambda _: None)
    step: Any = executable.context.step
    words, at = step.data.view(np.int32), executable.context.layout.offsets
    parts = [SequenceStep([1], 9, rows=[0], state_from=f, state_to=t) for f, t in ((-1, 3), (0, 2))]
    executable.start(Step(executable.context.layout, parts), 2)
    assert words[at["state_from"] :][:2].tolist() == [-1, 0]
    executable.go_on(2)
    assert words[at["state_from"] :][:2].tolist() == [3, 2]
    assert words[at["state_to"] :][:2].tolist() == [3, 2]
