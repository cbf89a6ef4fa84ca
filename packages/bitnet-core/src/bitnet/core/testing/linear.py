"""Tests of ``embed``, ``ternary_matmul``, ``dense_matmul`` and ``quantize``.

Long, because the tests of all four share their random weights, their shapes and their bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from bitnet.core.errors import InvalidInputError
from bitnet.core.hal import (
    DenseMatmul,
    Device,
    Embed,
    Limits,
    NormQuant,
    Op,
    Program,
    Quantize,
    SequenceStep,
    Step,
    StepLayout,
    TernaryMatmul,
    run,
)
from bitnet.core.hal.operands import MAX_K
from bitnet.core.testing import oracle
from bitnet.core.testing.base import DeviceTests
from bitnet.core.testing.cases import Size, log_uniform, over, pick
from bitnet.core.testing.rig import (
    Array,
    Rig,
    assert_products,
    assert_rel,
    assert_same_bits,
    assert_within,
    dense,
    not_yet,
    random_ternary,
    tensor,
    ternary,
    tokens,
)


class Shape(NamedTuple):
    """A product of ``[m, k]`` and ``[n, k]``; ``spare`` rows of the tensors are left unused.

    Without spare rows, a read of a row past the last is one past the end of a buffer
    (:mod:`bitnet.core.testing.guard`).
    """

    m: int
    n: int
    k: int
    spare: int = 0


def ternary_shapes(size: Size) -> list[Shape]:
    fixed = [
        Shape(1, 1, 4),
        Shape(1, 7, 128),
        Shape(3, 33, 132, 2),
        Shape(2, 5, 252),
        Shape(16, 64, 640),
        Shape(17, 129, 1280, 15),
        Shape(4, 37, 5460),  # the feed-forward width of bitnet_b1_58-xl: no multiple of 8
        Shape(65, 96, 3200),
        Shape(1, 2560, 2560),
        Shape(5, 300, 6912),
        Shape(512, 40, 256),
        Shape(33, 580, 8),  # many tokens and many rows: what a prompt is
        Shape(70, 700, 388, 3),
        Shape(131, 1101, 196),
        Shape(67, 10400, 20),
        Shape(2, 3, MAX_K),
    ]

    def draw(rng: np.random.Generator) -> Shape:
        m, n, k = log_uniform(rng, 1, 512), log_uniform(rng, 1, 3000), log_uniform(rng, 4, 8192, 4)
        return Shape(m, n, k, int(rng.integers(0, 9)))

    return pick(size, fixed, draw, lambda s: s.m * s.n * s.k)


class Grouped(NamedTuple):
    """A product of ``[m, k]`` and the rows ``n`` of each part, whose columns have a scale for each ``group``."""

    m: int
    n: tuple[int, ...]
    k: int
    group: int
    add: bool = False


def grouped_shapes(size: Size) -> list[Grouped]:
    fixed = [
        Grouped(1, (1,), 32, 32),
        Grouped(1, (7,), 128, 128),
        Grouped(2, (33, 5), 192, 64, add=True),
        Grouped(3, (50,), 1024, 256),
        Grouped(1, (9,), 4224, 128),
        Grouped(1, (64, 16, 16), 2560, 128),
        Grouped(9, (40,), 132, 132),
        Grouped(5, (101, 3), 4096, 64),
        Grouped(17, (129,), 2176, 32, add=True),
        Grouped(1, (1000,), 6144, 2048),
        Grouped(70, (300,), 4224, 128),
        Grouped(35, (577,), 1024, 32, add=True),
        Grouped(70, (1210, 40, 600), 384, 128),
        Grouped(33, (640,), 512, 256),
        Grouped(32, (600,), 384, 384, add=True),
        Grouped(40, (1200,), 2048, 1024),
        Grouped(2, (40,), 8192, 4096),
        Grouped(1, (40,), 3204, 3204),
        Grouped(1, (5,), 40960, 32),
        Grouped(3, (9,), 17408, 128),
    ]

    def draw(rng: np.random.Generator) -> Grouped:
        group = 1 << int(rng.integers(5, 10))
        k = log_uniform(rng, group, 8192, group)
        parts = tuple(log_uniform(rng, 1, 700) for _ in range(rng.integers(1, 4)))
        return Grouped(log_uniform(rng, 1, 100), parts, k, group, bool(rng.integers(2)))

    return pick(size, fixed, draw, lambda s: s.m * sum(s.n) * s.k)


def binary_shapes(size: Size) -> list[Grouped]:
    fixed = [
        Grouped(1, (1,), 128, 32),
        Grouped(1, (7, 1), 128, 128),
        Grouped(1, (49, 33, 16), 2048, 128, add=True),
        Grouped(1, (130,), 896, 64),
        Grouped(1, (5,), 4224, 128),
        Grouped(1, (40,), 3200, 3200),
        Grouped(2, (97,), 640, 128),
        Grouped(4, (64, 20), 384, 128, add=True),
        Grouped(7, (50,), 1024, 256),
        Grouped(8, (161, 3), 512, 32),
        Grouped(9, (40,), 1408, 128),
        Grouped(35, (577,), 1024, 64, add=True),
        Grouped(70, (1210, 40, 600), 384, 128),
        Grouped(2, (3,), MAX_K, MAX_K),
        Grouped(1, (3,), MAX_K, 128),
    ]

    def draw(rng: np.random.Generator) -> Grouped:
        group = 1 << int(rng.integers(5, 10))
        k = log_uniform(rng, max(group, 128), 8192, max(group, 128))
        parts = tuple(log_uniform(rng, 1, 700) for _ in range(rng.integers(1, 4)))
        return Grouped(log_uniform(rng, 1, 100), parts, k, group, bool(rng.integers(2)))

    return pick(size, fixed, draw, lambda s: s.m * sum(s.n) * s.k)


def dense_shapes(size: Size) -> list[Shape]:
    fixed = [
        Shape(1, 1, 4),
        Shape(1, 321, 128),
        Shape(3, 1031, 640, 1),
        Shape(2, 32003, 64),
        Shape(1, 1001, 2560),
        Shape(33, 77, 100, 3),
        Shape(5, 33, 68),
        Shape(64, 700, 2560),
        Shape(70, 301, 544, 2),
        Shape(1, 128256, 2560),
    ]

    def draw(rng: np.random.Generator) -> Shape:
        m, n, k = log_uniform(rng, 1, 64), log_uniform(rng, 1, 40000), log_uniform(rng, 4, 4096, 4)
        return Shape(m, n, k, int(rng.integers(0, 5)))

    return pick(size, fixed, draw, lambda s: s.m * s.n * s.k)


def quantize_shapes(size: Size) -> list[tuple[int, int]]:
    most = {"small": 5_000, "quick": 700_000, "full": 20_000_000}[size]
    shapes = [(1, 1), (1, 3), (7, 5), (33, 129), (255, 257), (640, 1000), (4096, 4097)]
    return [s for s in shapes if s[0] * s[1] <= most]


def uneven(rng: np.random.Generator, *shape: int) -> Array:
    """Normal numbers whose rows differ in size by orders of magnitude."""
    rows = rng.standard_normal(shape) * 10.0 ** rng.uniform(-4, 4, (shape[0], 1))
    return rows.astype(np.float32)


def check_groups(device: Device, rng: np.random.Generator, case: Grouped, binary: Sequence[bool] = ()) -> None:
    """The bits of a product whose scales differ from group to group by up to a hundred times, of both signs, some zero.

    The first tokens have small sums. Each of the last ones has the greatest sums that some row of weights can give.
    ``binary`` says which parts are declared binary, and have no zeros; none if it is empty.

    Raises:
        UnsupportedProgramError: The device refuses such weights.
    """
    scale: oracle.F32 = rng.uniform(1e-4, 2, (case.m,)).astype(np.float32)
    weights, binary = [], tuple(binary) or (False,) * len(case.n)
    for n, no_zeros in zip(case.n, binary, strict=True):
        units = 10 ** rng.uniform(-2, 0, (n, case.k // case.group)) * rng.choice([-1, 0, 1, 1, 1], (n, 1))
        matrix = random_ternary(rng, n, case.k)
        if no_zeros:
            matrix[matrix == 0] = rng.choice(np.array([-1, 1], np.int8), np.count_nonzero(matrix == 0))
        weights.append((matrix, units.astype(np.float16)))
    codes = rng.integers(-128, 128, (case.m, case.k), dtype=np.int8)
    loud = int(rng.integers(case.m))
    codes[: rng.integers(loud + 1)] //= 8
    rows = np.concatenate([w for w, _ in weights])
    followed = rows[rng.integers(len(rows), size=case.m - loud)]
    codes[loud:] = np.where(followed == 0, codes[loud:], np.where(followed > 0, 127, -128))
    addend = uneven(rng, case.m, sum(case.n)) if case.add else None
    product = oracle.group_matmul(codes, scale, weights)
    _check_product(device, codes, scale, weights, product, addend, spare=2 if case.add else 0, binary=binary)


def check_quantised(device: Device, rng: np.random.Generator, case: Grouped) -> tuple[str, ...]:
    """The bits of a product of one token that is quantised first, by whichever kernels, whose names are returned.

    Whole numbers up to 127 are their own codes, and their unit is 1.
    """
    (n,), k = case.n, case.k
    codes = rng.integers(-127, 128, (1, k)).astype(np.int8)
    codes[0, rng.integers(k)] = 127
    units = (10 ** rng.uniform(-2, 0, (n, k // case.group)) * rng.choice([-1, 1], (n, 1))).astype(np.float16)
    weight = random_ternary(rng, n, k), units
    before = rng.standard_normal((1, n)).astype(np.float32)
    specs = [tensor("x", "f32", "M", k), tensor("q", "i8", "M", k), tensor("s", "f32", "M"), tensor("y", "f32", "M", n)]
    ops: list[Op] = [NormQuant("x", None, 0.0, "q", "s"), TernaryMatmul("q", "s", ("w",), "y", case.add)]
    executable = device.compile(Program(ops, {s.name: s for s in specs}, {"w": ternary(*weight)}, Limits(1)))
    try:
        executable.write("x", codes.astype(np.float32))
        executable.write("y", before if case.add else np.full_like(before, np.nan))
        run(executable, Step(StepLayout(Limits(1)), tokens(1)))
        _assert_product(
            executable.read("y"),
            oracle.group_matmul(codes, np.ones(1, np.float32), [weight]),
            before if case.add else None,
        )
        return executable.kernels
    finally:
        executable.close()


def _check_product(
    device: Device,
    codes: oracle.I8,
    scale: oracle.F32,
    weights: Sequence[tuple[oracle.I8, float | npt.NDArray[np.float16]]],
    product: oracle.F32,
    addend: Array | None,
    spare: int,
    binary: Sequence[bool] | None = None,
) -> None:
    (m, k), n = codes.shape, sum(len(w) for w, _ in weights)
    names = tuple(f"w{i}" for i in range(len(weights)))
    specs = [tensor("x", "i8", "M", k), tensor("s", "f32", "M"), tensor("out", "f32", "M", n)]
    op = TernaryMatmul("x", "s", names, "out", addend is not None)
    declared = zip(names, weights, binary or (False,) * len(weights), strict=True)
    loaded = {name: ternary(*weight, binary=no_zeros) for name, weight, no_zeros in declared}
    inputs: dict[str, Array] = {"x": codes, "s": scale}
    if addend is not None:
        inputs["out"] = addend
    with Rig(device, [op], specs, loaded, limits=Limits(m + spare)) as rig:
        out = rig.run(tokens(m), inputs, ["out"])["out"]
    _assert_product(out, product, addend)


def _assert_product(out: Array, product: oracle.F32, addend: Array | None) -> None:
    """The contract's bits; with an addend, to the last place."""
    if addend is None:
        assert_same_bits("out", out, product)
    else:
        total = addend.astype(np.float64) + product
        assert_within("out", out, total, np.spacing(np.maximum(abs(total), abs(addend)).astype(np.float32)))


class LinearTests(DeviceTests):
    @pytest.mark.parametrize("dtype", [np.float16, np.float32])
    def test_embed(self, device: Device, rng: np.random.Generator, dtype: type[np.floating]) -> None:
        vocabulary, width, count = 321, 132, 37
        table = uneven(rng, vocabulary, width).astype(dtype)
        table[5, :3] = [np.finfo(dtype).smallest_subnormal, -0.0, np.finfo(dtype).max]
        ids = rng.integers(0, vocabulary, count).astype(np.int32)
        ids[:4] = [0, vocabulary - 1, 5, 5]
        specs = [tensor("out", "f32", "M", width)]
        limits = Limits(count + 3 * (dtype == np.float16), 2)
        with Rig(device, [Embed("t", "out")], specs, {"t": dense(table)}, limits=limits) as rig:
            out = rig.run([SequenceStep(ids[:9], 9), SequenceStep(ids[9:], 60)], {}, ["out"])["out"]
        assert_same_bits("out", out, table[ids].astype(np.float32))

    @over(ternary_shapes)
    @pytest.mark.parametrize("add", [False, True], ids=["replace", "add"])
    def test_ternary_matmul(self, device: Device, rng: np.random.Generator, case: Shape, add: bool) -> None:
        codes = rng.integers(-128, 128, (case.m, case.k), dtype=np.int8)
        self._ternary(device, rng, codes, [case.n], add=add, spare=case.spare)

    @pytest.mark.parametrize("parts", [(7, 3, 1), (64, 16, 16), (1, 1, 1), (40, 5)], ids=str)
    def test_ternary_matmul_of_stacked_weights(
        self, device: Device, rng: np.random.Generator, parts: tuple[int, ...]
    ) -> None:
        codes = rng.integers(-127, 128, (5, 260), dtype=np.int8)
        self._ternary(device, rng, codes, parts, spare=parts[0] % 2)

    def test_ternary_matmul_of_stacked_weights_by_many_tokens(self, device: Device, rng: np.random.Generator) -> None:
        codes = rng.integers(-128, 128, (99, 84), dtype=np.int8)
        self._ternary(device, rng, codes, (1250, 777, 90), add=True, spare=3)

    @pytest.mark.parametrize("k", [4, 132, 6912, MAX_K])
    def test_ternary_matmul_at_the_extremes(self, device: Device, rng: np.random.Generator, k: int) -> None:
        """Sums as great as they get: an accumulator of 16 bits, or one that saturates, loses them."""
        self._extremes(device, 4, 4, k)

    def test_ternary_matmul_of_many_tokens_at_the_extremes(self, device: Device) -> None:
        self._extremes(device, 67, 580, 836)

    @over(grouped_shapes)
    def test_ternary_matmul_of_groups(self, device: Device, rng: np.random.Generator, case: Grouped) -> None:
        with not_yet():
            check_groups(device, rng, case)

    @over(binary_shapes)
    def test_ternary_matmul_of_binary_weights(self, device: Device, rng: np.random.Generator, case: Grouped) -> None:
        with not_yet():
            check_groups(device, rng, case, [True] * len(case.n))

    def test_ternary_matmul_of_some_binary_weights(self, device: Device, rng: np.random.Generator) -> None:
        with not_yet():
            check_groups(device, rng, Grouped(1, (60, 35), 512, 128), [True, False])

    def test_binary_weights_with_a_zero_are_refused(self, device: Device, rng: np.random.Generator) -> None:
        matrix = rng.choice(np.array([-1, 1], np.int8), (5, 128))
        matrix[3, rng.integers(128)] = 0
        weight = ternary(matrix, np.ones((5, 1), np.float16), binary=True)
        specs = [tensor("x", "i8", "M", 128), tensor("s", "f32", "M"), tensor("y", "f32", "M", 5)]
        op = TernaryMatmul("x", "s", ("w",), "y")
        with not_yet(), pytest.raises(InvalidInputError, match="weights besides −1 and \\+1"):
            Rig(device, [op], specs, {"w": weight}, limits=Limits(1))

    @pytest.mark.parametrize(
        "quantised",
        [
            Grouped(1, (37,), 128, 64),
            Grouped(1, (33,), 320, 64, add=True),
            Grouped(1, (70,), 2176, 128),
            Grouped(1, (17,), 4352, 256, add=True),
            Grouped(1, (9,), 17408, 128),
        ],
        ids=str,
    )
    def test_ternary_matmul_of_groups_that_quantises(
        self, device: Device, rng: np.random.Generator, quantised: Grouped
    ) -> None:
        """Rows, columns and groups that fill no work-group or step of one."""
        with not_yet():
            check_quantised(device, rng, quantised)

    def _extremes(self, device: Device, m: int, n: int, k: int) -> None:
        codes = np.stack([np.full(k, c, np.int8) for c in (127, -128, -127, 0)])
        matrix = np.stack([np.full(k, w, np.int8) for w in (1, -1, 0)] + [np.resize([1, 1, -1], k).astype(np.int8)])
        scale = np.array([1 / 127, 3e-3, 1e6, 1e-30], np.float32)
        token, row = np.arange(m) % 4, np.arange(n) % 4
        self._check_ternary(device, codes[token], scale[token], [(matrix[row], 0.7)])

    def _ternary(
        self,
        device: Device,
        rng: np.random.Generator,
        codes: oracle.I8,
        parts: Sequence[int],
        *,
        add: bool = False,
        spare: int,
    ) -> None:
        m, k = codes.shape
        scale: oracle.F32 = rng.uniform(1e-4, 2, (m,)).astype(np.float32)
        weights = [(random_ternary(rng, n, k), float(rng.uniform(1e-3, 3))) for n in parts]
        addend = uneven(rng, m, sum(parts)) if add else None
        self._check_ternary(device, codes, scale, weights, addend=addend, spare=spare)

    def _check_ternary(
        self,
        device: Device,
        codes: oracle.I8,
        scale: oracle.F32,
        weights: list[tuple[oracle.I8, float]],
        *,
        addend: Array | None = None,
        spare: int = 0,
    ) -> None:
        _check_product(device, codes, scale, weights, oracle.ternary_matmul(codes, scale, weights), addend, spare)

    @over(dense_shapes)
    @pytest.mark.parametrize("dtype", [np.float16, np.float32])
    def test_dense_matmul(
        self, device: Device, rng: np.random.Generator, case: Shape, dtype: type[np.floating]
    ) -> None:
        x, weight = uneven(rng, case.m, case.k), rng.standard_normal((case.n, case.k)).astype(dtype)
        specs = [tensor("x", "f32", "R", case.k), tensor("out", "f32", "R", case.n)]
        limits = Limits(case.m + case.spare, max_rows=case.m + case.spare)
        with Rig(device, [DenseMatmul("x", "w", "out")], specs, {"w": dense(weight)}, limits=limits) as rig:
            out = rig.run(tokens(case.m, range(case.m)), {"x": x}, ["out"])["out"]
        assert_products("out", out, x, weight)

    @over(quantize_shapes)
    @pytest.mark.parametrize("magnitude", [1e-7, 1.0, 1e5])
    def test_quantize(self, device: Device, rng: np.random.Generator, case: tuple[int, int], magnitude: float) -> None:
        x = (rng.standard_normal(case) * magnitude + rng.uniform(-1, 1) * magnitude).astype(np.float32)
        x[0, 0] = 0
        self._check_quantize(device, x)

    def test_quantize_of_zeros(self, device: Device) -> None:
        self._check_quantize(device, np.zeros((3, 130), np.float32))

    def _check_quantize(self, device: Device, x: Array) -> None:
        specs = [tensor("x", "f32", *x.shape), tensor("codes", "i8", *x.shape), tensor("scale", "f32", 1)]
        with Rig(device, [Quantize("x", "codes", "scale")], specs, limits=Limits(1)) as rig:
            out = rig.run(tokens(1), {"x": x}, ["codes", "scale"])
        quotient, scale = oracle.absmean(x)
        assert_rel("scale", out["scale"], np.array([scale]), 1e-6)
        near = abs(abs(quotient) - 0.5) < 1e-5
        exact = np.clip(np.rint(quotient), -1, 1)
        assert_within("codes", out["codes"], exact, np.where(near, 1.0, 0.0))
        assert set(np.unique(out["codes"])) <= {-1, 0, 1}
