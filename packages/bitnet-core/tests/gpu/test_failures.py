"""A driver that fails at any call: all its resources are freed, and nothing counts as done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest

from bitnet.core.errors import OutOfMemoryError, UnsupportedProgramError
from bitnet.core.gpu import Bucket, Buffer, Context, GpuDevice, KernelSpec, Launch, Lowering
from bitnet.core.gpu.ops import RowOps
from bitnet.core.gpu.ops.variants import GroupScaledMatmul, NormedRope, variants
from bitnet.core.hal import (
    AddBias,
    Attention,
    CenterRows,
    DeviceInfo,
    DeviceType,
    Limits,
    Op,
    Program,
    StepLayout,
    TernaryMatmul,
    TernaryWeight,
)
from bitnet.core.testing.model import TinyModel

INFO = DeviceInfo("none", "0", "none", "none", "none", DeviceType.DISCRETE)


class Memory:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class Failing:
    """Computes nothing, and refuses one of its calls, counted from 0."""

    def __init__(self, refused: int) -> None:
        self.refused, self.calls = refused, 0
        self.live: list[Memory] = []
        self.submitted: list[Launch] = []

    def _call(self) -> None:
        self.calls += 1
        if self.calls == self.refused + 1:
            raise OutOfMemoryError("no more.", device="none:0")

    def alloc(self, nbytes: int) -> Memory:
        self._call()
        self.live.append(Memory(nbytes))
        return self.live[-1]

    def free(self, buffer: Memory) -> None:
        self.live.remove(buffer)

    def upload(self, buffer: Buffer, array: np.ndarray[Any, Any], offset: int = 0) -> None:
        self._call()

    def download(self, buffer: Buffer, array: np.ndarray[Any, Any], offset: int = 0) -> None:
        self._call()

    def record(self, launches: Sequence[Launch]) -> Sequence[Launch]:
        self._call()
        return launches

    def submit(self, recording: Sequence[Launch]) -> None:
        self._call()
        self.submitted += recording

    def memory(self) -> tuple[int, int]:
        return 0, 0

    def close(self) -> None: ...


def launch(*args: Buffer) -> Launch:
    return Launch(KernelSpec("none", "none"), (1, 1, 1), (1, 1, 1), args)


def entry(ctx: Context, op: Op, bucket: Bucket) -> list[Launch]:
    """All that a lowering may ask of a context."""
    if isinstance(op, TernaryMatmul):
        ctx.ternary(op.weights)
    buffers = [ctx.dense("norm"), ctx.kv("k", 0), ctx.scratch("room", 64), ctx.zeroed("count", 4)]
    ctx.copy("head", 64, lambda to: [launch(to)])
    return [launch()] * len(buffers)


EVERY = (*get_args(Op), *variants(RowOps(1)))
LOWERING = Lowering(dict.fromkeys(EVERY, entry))


def test_what_a_failed_compile_had_is_given_back() -> None:
    program = TinyModel(np.random.default_rng(), layers=1).program(Limits(4, 1, 1, 4), 8)
    for refused in range(200):
        driver = Failing(refused)
        device = GpuDevice(INFO, driver, LOWERING)
        try:
            device.compile(program).close()
        except OutOfMemoryError:
            assert driver.live == [], f"after call {refused}"
            assert device.memory().used == 0
        else:
            assert driver.calls <= refused
            assert driver.live == []
            return
    pytest.fail("it never compiles")


@pytest.mark.parametrize(
    ("shape", "lacking"),
    [
        ({"group": 32, "ffn": 256}, GroupScaledMatmul),
        ({"head_norms": True}, NormedRope),
        ({"biased": True}, AddBias),
        ({"centered": True}, CenterRows),
        ({}, Attention),
    ],
)
def test_what_a_backend_has_no_kernels_for_is_refused(shape: dict[str, Any], lacking: type) -> None:
    program = TinyModel(np.random.default_rng(), layers=1, **shape).program(Limits(4, 1, 1, 4), 8)
    driver, table = Failing(-1), {kind: entry for kind in EVERY if kind is not lacking}
    with pytest.raises(UnsupportedProgramError, match=f"none:0: .*no kernels for {lacking.__name__}"):
        GpuDevice(INFO, driver, Lowering(table)).compile(program)
    assert driver.calls == 0
    GpuDevice(INFO, driver, LOWERING).compile(program).close()


def test_what_a_failed_load_had_is_given_back() -> None:
    """A weight's file may fail, too."""

    def broken() -> Any:
        raise OSError("the disk is gone")

    program = TinyModel(np.random.default_rng(), layers=1).program(Limits(4, 1, 1, 4), 8)
    whole = program.weights["k.0"]
    assert isinstance(whole, TernaryWeight)
    weights = {**program.weights, "k.0": TernaryWeight(whole.shape, broken)}
    driver = Failing(-1)
    with pytest.raises(OSError, match="gone"):
        GpuDevice(INFO, driver, LOWERING).compile(replace(program, weights=weights))
    assert driver.live == []


@pytest.mark.parametrize("refused", [1, 2])
def test_a_buffer_that_could_not_be_filled_is_filled_when_asked_for_again(refused: int) -> None:
    program = Program([], {}, {}, Limits(1))
    driver = Failing(-1)
    context = Context(driver, program, StepLayout(program.limits))

    def copy() -> Buffer:
        return context.copy("head", 64, lambda to: [launch(to)])

    driver.refused = driver.calls + refused
    with pytest.raises(OutOfMemoryError):
        copy()
    copied = copy()
    assert [made.args for made in driver.submitted] == [(copied,)]
    assert copy() is copied
    assert len(driver.submitted) == 1

    driver.refused = driver.calls + 1
    with pytest.raises(OutOfMemoryError):
        context.zeroed("count", 4)
    calls = driver.calls
    zeroed = context.zeroed("count", 4)
    assert driver.calls == calls + 2, "it was not zeroed"
    assert context.zeroed("count", 4) is zeroed
