"""Runs small programs on a device: writes inputs, poisons everything else, and checks that nothing else changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from bitnet.core.errors import UnsupportedProgramError
from bitnet.core.hal import (
    DenseWeight,
    Device,
    KVSpec,
    Limits,
    Op,
    Program,
    SequenceStep,
    StateSpec,
    Step,
    StepLayout,
    TensorSpec,
    TernaryData,
    TernaryWeight,
    Weight,
    run,
)
from bitnet.core.hal.program import NUMPY_DTYPES, Dim, DType
from bitnet.core.testing import poison

Array = npt.NDArray[Any]

POISON: Mapping[str, Any] = {"f32": np.float32("nan"), "i8": np.int8(-128), "i32": np.int32(-(2**31))}
"""A code that no operation may produce: absmax int8 stops at -127."""


def tensor(name: str, dtype: DType, *shape: Dim) -> TensorSpec:
    return TensorSpec(name, dtype, shape)


def dense(array: Array) -> DenseWeight:
    """A weight from an f32 or f16 array, read-only like a mapped file."""
    fixed = np.ascontiguousarray(array)
    fixed.setflags(write=False)
    return DenseWeight(fixed.shape, "f16" if fixed.dtype == np.float16 else "f32", lambda: fixed)


def ternary(
    matrix: npt.NDArray[np.int8], scale: float | npt.NDArray[np.float16], *, binary: bool = False
) -> TernaryWeight:
    """A weight of ``matrix[N, K]`` in {-1, 0, 1}, packed as :class:`TernaryData` describes.

    ``scale`` is one, or ``f16[N, K / group]``. ``binary`` declares that no weight is 0.
    """
    rows, columns = matrix.shape
    blocks = -(-columns // 128)
    codes = np.ones((rows, blocks * 128), np.uint8)
    codes[:, :columns] = matrix + 1
    fields = codes.reshape(rows, blocks, 4, 32)
    packed = fields[:, :, 0] << 6 | fields[:, :, 1] << 4 | fields[:, :, 2] << 2 | fields[:, :, 3]
    data = np.ascontiguousarray(packed.reshape(rows, blocks * 32))
    data.setflags(write=False)
    if isinstance(scale, np.ndarray):
        group = columns // scale.shape[1]
        return TernaryWeight((rows, columns), lambda: TernaryData(data, scale), group=group, binary=binary)
    return TernaryWeight((rows, columns), lambda: TernaryData(data, np.array([scale], np.float32)))


def random_ternary(rng: np.random.Generator, rows: int, columns: int) -> npt.NDArray[np.int8]:
    return rng.integers(-1, 2, (rows, columns), dtype=np.int8)


def tokens(count: int, rows: Sequence[int] = ()) -> list[SequenceStep]:
    """A step of one sequence whose tokens do not matter."""
    return [SequenceStep(np.zeros(count, np.int32), count, rows=rows)]


@contextmanager
def not_yet() -> Iterator[None]:
    """Mark the test as an expected failure if the device refuses the program with ``UnsupportedProgramError``."""
    try:
        yield
    except UnsupportedProgramError as error:
        pytest.xfail(f"not yet: {error}")


class Rig:
    """A program compiled on a device. Use it as a context manager, which closes the executable."""

    def __init__(
        self,
        device: Device,
        ops: Sequence[Op],
        tensors: Iterable[TensorSpec],
        weights: Mapping[str, Weight] | None = None,
        *,
        limits: Limits,
        kv: KVSpec | None = None,
        states: Mapping[str, StateSpec] | None = None,
    ) -> None:
        specs = {t.name: t for t in tensors}
        self.program = Program(ops, specs, weights or {}, limits, kv, "conformance", states=states or {})
        self.layout = StepLayout(limits)
        self.executable = device.compile(self.program, keep=True)

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.executable.close()

    def step(self, sequences: Sequence[SequenceStep]) -> Step:
        """A step, poisoned where it belongs to no token, sequence or row."""
        block_size = self.program.kv.block_size if self.program.kv else 32
        return poison.poison_step(Step(self.layout, sequences, block_size=block_size))

    def run(
        self, sequences: Sequence[SequenceStep], inputs: Mapping[str, Array], outputs: Sequence[str]
    ) -> dict[str, Array]:
        """Run one step and return the rows of ``outputs`` that it must write.

        A tensor in both is read and written. Every row that is not an input is poisoned first, and must still hold its
        poison afterwards unless the step writes it. Tensors that are not outputs must be unchanged.
        """
        if not poison.wanted():
            return self._run_unwritten(sequences, inputs, outputs)
        before = {
            name: self._poisoned(spec, inputs.get(name), written=name in outputs)
            for name, spec in self.program.tensors.items()
        }
        for name, array in before.items():
            self.executable.write(name, array)
        step = self.step(sequences)
        run(self.executable, step)
        result = {}
        for name, spec in self.program.tensors.items():
            after = self.executable.read(name)
            assert after.dtype == before[name].dtype, f"{name} was read as {after.dtype}"
            assert after.shape == before[name].shape, f"{name} was read with shape {after.shape}"
            rows = {"M": step.tokens, "R": step.rows}.get(str(spec.shape[0]), len(after)) if name in outputs else 0
            assert_same_bits(f"{name} past row {rows}, which nothing was to write,", after[rows:], before[name][rows:])
            if name in outputs:
                result[name] = after[:rows]
        return result

    def _run_unwritten(
        self, sequences: Sequence[SequenceStep], inputs: Mapping[str, Array], outputs: Sequence[str]
    ) -> dict[str, Array]:
        """The same, but writes only the inputs and reads only the rows that the step must write."""
        for name, array in inputs.items():
            self.executable.write(name, array)
        step = self.step(sequences)
        run(self.executable, step)
        rows = {"M": step.tokens, "R": step.rows}
        shapes = {name: self.program.tensors[name].shape for name in outputs}
        return {n: self.executable.read(n, rows[s[0]] if isinstance(s[0], str) else None) for n, s in shapes.items()}

    def _poisoned(self, spec: TensorSpec, rows: Array | None, *, written: bool) -> Array:
        capacity = {"M": self.program.limits.max_tokens, "R": self.program.limits.max_rows}
        shape = [capacity[n] if isinstance(n, str) else n for n in spec.shape]
        array = np.full(shape, POISON[spec.dtype], NUMPY_DTYPES[spec.dtype])
        if written and array.dtype.kind == "f":  # a NaN that no poison of an input becomes by arithmetic
            array.view(f"u{array.itemsize}")[:] |= 1
        if rows is not None:
            array[: len(rows)] = rows
        return array


def assert_same_bits(what: str, out: Array, expected: Array) -> None:
    """Equal to the last bit, NaNs and signs of zeros included."""
    assert out.shape == expected.shape, f"{what} has shape {out.shape}, not {expected.shape}"
    assert out.dtype == expected.dtype, f"{what} is {out.dtype}, not {expected.dtype}"
    kind = np.dtype(f"u{out.dtype.itemsize}")
    wrong = np.ascontiguousarray(out).view(kind) != np.ascontiguousarray(expected).view(kind)
    _no(wrong, f"{what} differs", out, expected)


def assert_rel(what: str, out: Array, exact: npt.NDArray[np.float64], bound: float) -> None:
    """``max|out − exact| ≤ bound · max|exact|`` over each row (the last axis)."""
    assert out.shape == exact.shape, f"{what} has shape {out.shape}, not {exact.shape}"
    error = abs(out.astype(np.float64) - exact)
    # Not `error > limit`: a NaN must fail.
    wrong = ~(error <= bound * abs(exact).max(axis=-1, keepdims=True))
    _no(wrong, f"{what} is beyond rel {bound:g}", out, exact)


def assert_within(what: str, out: Array, exact: npt.NDArray[np.float64], bound: float | Array) -> None:
    """``|out − exact| ≤ bound`` for each element."""
    assert out.shape == exact.shape, f"{what} has shape {out.shape}, not {exact.shape}"
    wrong = ~(abs(out.astype(np.float64) - exact) <= bound)
    _no(wrong, f"{what} is beyond its bound", out, exact)


def assert_products(what: str, out: Array, x: Array, weight: Array) -> None:
    """``out = x · weightᵀ`` within 1e-6 of the sum of the products' magnitudes, for each element."""
    a, b = x.astype(np.float64), weight.astype(np.float64).T
    assert_within(what, out, a @ b, 1e-6 * (abs(a) @ abs(b)))


def _no(wrong: npt.NDArray[np.bool_], what: str, out: Array, expected: Array) -> None:
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        where = f"{wrong.sum()} of {wrong.size} elements, first at {at}"
        raise AssertionError(f"{what} in {where}: {out[at]!r}, where {expected[at]!r} is right")
