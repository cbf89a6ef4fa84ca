"""The CUDA backend against the operations' contract, on every device it finds.

Long, because each kernel has shapes of its own, and all are methods of one suite.
"""

from contextlib import closing
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from bitnet.core.hal import (
    EMBEDDERS,
    EXPERTS,
    KV_I8,
    STATES,
    WINDOWS,
    Device,
    ExpertMatmul,
    GluNormQuant,
    Limits,
    NormQuant,
    Op,
    Program,
    Route,
    Step,
    StepLayout,
    TernaryMatmul,
    Transform,
    Weight,
    run,
)
from bitnet.core.testing import ConformanceSuite, oracle, oracle_experts
from bitnet.core.testing.attention import Heads, Paged, Part
from bitnet.core.testing.cases import needs
from bitnet.core.testing.experts import Mixture, choices
from bitnet.core.testing.linear import Grouped, check_groups
from bitnet.core.testing.norms import check_codes
from bitnet.core.testing.recurrent import Conv, Delta
from bitnet.core.testing.recurrent_inputs import Inputs, check_inputs
from bitnet.core.testing.rig import (
    assert_same_bits,
    assert_within,
    dense,
    random_ternary,
    tensor,
    ternary,
    tokens,
)
from bitnet.core.testing.tables import Table, check_head
from bitnet.core.testing.transforms import Blocks, random_signs
from bitnet.cuda import products
from bitnet.cuda.attention import FAR
from bitnet.cuda.backend import BACKEND
from bitnet.cuda.groups import GroupShape
from bitnet.cuda.slices import SliceShape


class Mixed(NamedTuple):
    """A mixture for ``m`` tokens: ``top`` of ``experts`` of ``width`` columns between, for rows of ``hidden``.
    ``scaled``: each row of a matrix has a scale of its own."""

    m: int
    experts: int
    top: int
    hidden: int
    width: int
    scaled: bool = True
    clamp: float | None = 7.0


class TestConformance(ConformanceSuite):
    backend = BACKEND

    @needs(EXPERTS)
    @pytest.mark.parametrize(
        "shape",
        [
            Mixed(1, 1, 1, 256, 256),
            Mixed(1, 256, 8, 2048, 512),
            Mixed(2, 40, 8, 2048, 512, scaled=False),
            Mixed(3, 9, 3, 768, 256, clamp=None),
            Mixed(5, 33, 5, 1024, 768, clamp=0.5),
            Mixed(8, 70, 8, 512, 2048, scaled=False),
            Mixed(8, 5, 5, 1280, 256),
            Mixed(23, 20, 4, 512, 256),
        ],
        ids=str,
    )
    def test_a_whole_mixture(self, device: Device, rng: np.random.Generator, shape: Mixed) -> None:
        """Router, products, activations and sums in as few kernels as the device takes. Whole numbers are their own
        codes, so that only the codes of activations may be next to a rounding border."""
        m, count, top, hidden, width, scaled, clamp = shape
        x = rng.integers(-127, 128, (m, hidden)).astype(np.float32)
        x[np.arange(m), rng.integers(0, hidden, m)] = 127
        router = (rng.standard_normal((count, hidden)) * 4 / np.sqrt(hidden)).astype(np.float32)
        codes = [random_ternary(rng, count * n, k) for n, k in ((width, hidden), (width, hidden), (hidden, width))]
        sizes = [float(np.float32((1.5 / k) ** 0.5)) for k in (hidden, hidden, width)]
        units = [
            rng.uniform(0.5 * size, 2 * size, (len(w), 1)).astype(np.float16)
            for size, w in zip(sizes, codes, strict=True)
        ]
        names = ("gate", "up", "down")
        weights: dict[str, Weight] = {"gain": dense(np.ones(hidden, np.float32)), "router": dense(router)}
        for name, w, unit, size in zip(names, codes, units, sizes, strict=True):
            weights[name] = ternary(w, unit if scaled else size)
        specs = [tensor("x", "f32", "M", hidden), tensor("a", "i8", "M", hidden), tensor("s", "f32", "M")]
        specs += [tensor("ids", "i32", "M", top), tensor("shares", "f32", "M", top)]
        specs += [tensor("gu", "f32", "M", top * 2 * width), tensor("h", "i8", "M", top * width)]
        specs.append(tensor("hs", "f32", "M") if top == 1 else tensor("hs", "f32", "M", top))
        ops: list[Op] = [
            Route("x", "gain", 1e-5, "router", "ids", "shares"),
            NormQuant("x", "gain", 1e-5, "a", "s"),
            ExpertMatmul("a", "s", "ids", count, ("gate", "up"), "gu"),
            GluNormQuant("gu", None, 1e-5, "silu", "h", "hs", clamp=clamp, parts=top),
            ExpertMatmul("h", "hs", "ids", count, ("down",), "x", "shares"),
        ]
        limits = Limits(m + 2)
        with closing(device.compile(Program(ops, {s.name: s for s in specs}, weights, limits))) as executable:
            executable.write("x", x)
            run(executable, Step(StepLayout(limits), tokens(m)))
            out = executable.read("x", m)
        logits, bound = oracle_experts.route(x, np.ones(hidden), 1e-5, router)
        order = np.argsort(-logits, axis=1, kind="stable")
        best = -np.sort(-logits, axis=1)[:, : top + 1]
        clear = (-np.diff(best, axis=1) > 4 * bound.max(axis=1)[:, None]).all(axis=1) if count > 1 else np.ones(m, bool)
        assert clear.sum() * 2 >= m, "experts are too close for this test"
        shares = oracle_experts.shares(logits, order[:, :top])

        def matrix(which: int, e: int) -> npt.NDArray[np.float64]:
            rows = slice(e * len(codes[which]) // count, (e + 1) * len(codes[which]) // count)
            found: npt.NDArray[np.float64] = codes[which][rows] * np.float64(
                units[which][rows] if scaled else sizes[which]
            )
            return found

        norm = 1 / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1) + 1e-5)
        for row in np.flatnonzero(clear):
            total, slack = np.zeros(hidden), 1e-5 * abs(x[row]).astype(np.float64)
            for j, e in enumerate(order[row, :top]):
                gate, up = (matrix(which, e) @ x[row].astype(np.float64) * norm[row] for which in range(2))
                if clamp is not None:
                    gate, up = np.minimum(gate, clamp), np.clip(up, -clamp, clamp)
                exact = oracle.absmax((gate / (1 + np.exp(-gate)) * up)[None])
                near = abs(exact.quotient[0] - np.floor(exact.quotient[0]) - 0.5) < 5e-3
                down = matrix(2, e)
                part = down @ np.rint(exact.quotient[0]) * exact.scale[0]
                total += shares[row, j] * part
                slack += shares[row, j] * exact.scale[0] * (abs(down) @ (near + 2e-5 * abs(exact.quotient[0])))
                slack += 1e-4 * shares[row, j] * abs(part) + 2 * bound[row].max() * abs(shares[row, j] * part)
            assert_within("x", out[row], x[row] + total, slack + 1e-9)

    @needs(EXPERTS)
    @pytest.mark.parametrize(
        "shape",
        [
            Mixture(1, 12, 3, 100, 512, 512),
            Mixture(9, 256, 8, 512, 2048, 2048),
            Mixture(64, 256, 8, 130, 512, 512, 1),
            Mixture(33, 16, 4, 1030, 256, 0),
            Mixture(300, 40, 8, 72, 768, 768, 3),
            Mixture(500, 20, 8, 300, 2048, 2048),
            Mixture(700, 3, 3, 260, 1280, 0),
            Mixture(150, 5, 2, 68, 4096, 4096, 1),
        ],
        ids=str,
    )
    def test_products_of_experts_on_tensor_cores(
        self, device: Device, rng: np.random.Generator, shape: Mixture
    ) -> None:
        """Tiles of 8, 16 and 32 pairs, ragged in pairs and rows; one scale a row or a matrix; a long K."""
        self._products(device, rng, shape, choices(rng, shape))
        self._sums(device, rng, shape, choices(rng, shape))

    @needs(WINDOWS)
    @pytest.mark.parametrize(
        ("heads", "window"),
        [
            (Heads(16, 4, 128), 512),
            (Heads(16, 4, 128, dtype="i8"), 512),
            (Heads(6, 2, 64, 16), 70),
            (Heads(5, 1, 128, 64, "i8"), 1),
            (Heads(3, 3, 128, 8), 300),
            (Heads(4, 1, 256), 130),
        ],
        ids=str,
    )
    def test_windows_of_many_tokens(self, device: Device, rng: np.random.Generator, heads: Heads, window: int) -> None:
        """Several tiles of tokens and of positions, a later chunk, and short sequences beside it; then few tokens."""
        paged = Paged(device, rng, heads, length=1500, seqs=3, chunk=700, window=window)
        with paged.rig:
            paged.run([(0, Part(0, 700))])
            paged.run([(0, Part(700, 620))])
            paged.run([(0, Part(1320, 150)), (1, Part(0, 529)), (2, Part(0, 1))])
            paged.run([(0, Part(1470, 9)), (1, Part(529, 7))])
            paged.run([(0, Part(1479, 1)), (1, Part(536, 1))])
            paged.run([(0, Part(1480, 1))])

    @pytest.mark.parametrize(
        "shape",
        [
            Table(1, 1, 512, 128),
            Table(3, 70_001, 512, 64),
            Table(8, 1000, 2560, 128),
            Table(9, 33, 1024, 64, spare=3),
            Table(64, 3000, 1536, 128),
        ],
    )
    def test_head_on_tensor_cores(self, device: Device, rng: np.random.Generator, shape: Table) -> None:
        """One tile, several for a warp, and the last ones of fewer rows; one block's rows of x, and more."""
        check_head(device, rng, shape)

    @needs(STATES)
    @pytest.mark.parametrize(
        "shape",
        [
            Delta(1, 1, 128, 128, 190),
            Delta(2, 6, 128, 128, 700, tiled=1),
            Delta(1, 5, 128, 36, 200),
            Delta(2, 2, 32, 100, 300),
            Delta(3, 6, 96, 132, 150),
            Delta(1, 4, 64, 64, 520, tiled=1),
        ],
        ids=str,
    )
    def test_delta_rule_in_chunks(self, device: Device, rng: np.random.Generator, shape: Delta) -> None:
        """Whole and ragged chunks, beside sequences of few tokens; five value heads of a key head; ragged columns."""
        self.test_delta_rule(device, rng, shape)

    @needs(STATES)
    @pytest.mark.parametrize(
        "shape",
        [
            Inputs(1, 5120, 10240, 6144, 48, block=1024),
            Inputs(5, 1024, 48, 33, 7, block=1024),
            Inputs(8, 5120, 10240, 6144, 48, block=1024),
        ],
        ids=str,
    )
    def test_inputs_of_a_wide_recurrent_layer(self, device: Device, rng: np.random.Generator, shape: Inputs) -> None:
        """Norm with gates, and both products with the convolution, in a launch each; ragged rows, too."""
        check_inputs(device, rng, shape)

    @needs(STATES)
    @pytest.mark.parametrize(
        "shape",
        [(9, 3, 36), (61, 48, 644), (65, 7, 132), (200, 33, 2564), (70, 3, 32), (129, 48, 5120), (200, 50, 992)],
        ids=str,
    )
    def test_delta_gates_of_many_tokens(
        self, device: Device, rng: np.random.Generator, shape: tuple[int, int, int]
    ) -> None:
        """Tiles of tokens and heads, ragged in both; columns for eight warps, or for one; and on tensor cores, with
        as many shares of the columns as there are steps, and fewer."""
        self.test_delta_gates(device, rng, shape)

    @needs(STATES)
    @pytest.mark.parametrize(
        "shape", [Conv(36, 4, 200), Conv(260, 2, 129), Conv(1028, 8, 300), Conv(4, 5, 90)], ids=str
    )
    def test_causal_conv_of_many_tokens(self, device: Device, rng: np.random.Generator, shape: Conv) -> None:
        """Several tokens of a thread, of one sequence and of two."""
        self.test_causal_conv(device, rng, shape)

    @needs(STATES)
    @pytest.mark.parametrize("normed", [True, False], ids=["norm", "plain"])
    @pytest.mark.parametrize(
        "shape", [Blocks(65, 1, 1024), Blocks(70, 37, 32), Blocks(100, 11, 256), Blocks(66, 17, 1024)], ids=str
    )
    def test_transforms_of_many_rows(
        self, device: Device, rng: np.random.Generator, shape: Blocks, normed: bool
    ) -> None:
        """One unit of 1,024 elements and several, as many as warps and fewer, the last one ragged."""
        self.test_norm_quant_of_a_transform(device, rng, shape, normed)
        self.test_glu_norm_quant_of_a_transform(device, rng, shape, "silu")

    @needs(STATES)
    @pytest.mark.parametrize("shape", [(65, 6, 32), (70, 24, 64), (66, 12, 128)], ids=str)
    def test_gated_quant_of_many_rows(
        self, device: Device, rng: np.random.Generator, shape: tuple[int, int, int]
    ) -> None:
        self.test_gated_quant(device, rng, shape, True, "silu")
        self.test_gated_quant(device, rng, shape, False, "sigmoid")

    @needs(STATES)
    @pytest.mark.parametrize("group", [None, 64, 128], ids=str)
    @pytest.mark.parametrize(
        ("m", "k", "block"),
        [
            (1, 512, 128),
            (1, 5120, 1024),
            (1, 17408, 1024),
            (3, 256, 256),
            (4, 1280, 256),
            (7, 5120, 1024),
            (8, 17408, 1024),
            (65, 2176, 128),
            (200, 5120, 1024),
        ],
    )
    def test_products_of_transformed_rows(
        self, device: Device, rng: np.random.Generator, m: int, k: int, block: int, group: int | None
    ) -> None:
        """The bits of a product. Of few rows, the quantisation also leaves codes as the product reads them; of many, it
        finds sums of rows or their greatest sum of a group."""
        units = rng.uniform(0.01, 0.1, (130, k // group)).astype(np.float16) if group else 0.0625
        w = random_ternary(rng, 130, k)
        specs = [tensor("x", "f32", "M", k), tensor("q", "i8", "M", k), tensor("s", "f32", "M")]
        specs.append(tensor("out", "f32", "M", 130))
        weights: dict[str, Weight] = {"w": ternary(w, units), "signs": dense(random_signs(rng, k))}
        transform = Transform(block, "signs")
        ops: list[Op] = [NormQuant("x", None, 0.0, "q", "s", transform), TernaryMatmul("q", "s", ("w",), "out")]
        limits = Limits(m + 3)
        x = rng.standard_normal((m, k)) * 10.0 ** rng.uniform(-2, 0, (m, k))
        with closing(device.compile(Program(ops, {s.name: s for s in specs}, weights, limits))) as executable:
            executable.write("x", x.astype(np.float32))
            run(executable, Step(StepLayout(limits), tokens(m)))
            codes, scale, out = (executable.read(name, m) for name in ("q", "s", "out"))
        multiply: Any = oracle.group_matmul if group else oracle.ternary_matmul
        assert_same_bits("out", out, multiply(codes, scale, [(w, units)]))

    @pytest.mark.parametrize(
        ("m", "n", "k"),
        [
            (9, 3, 16),
            (13, 2561, 2560),
            (16, 4000, 272),
            (24, 14000, 656),
            (33, 300, 6912),
            (64, 9001, 144),
            (130, 300, 2064),
            (512, 2560, 1280),
            (700, 2561, 400),
            (1500, 9000, 144),
            (2048, 2560, 272),
            (2048, 3840, 1040),
        ],
    )
    @pytest.mark.parametrize("add", [False, True], ids=["replace", "add"])
    def test_ternary_matmul_of_few_and_of_many_tokens(
        self, device: Device, rng: np.random.Generator, m: int, n: int, k: int, add: bool
    ) -> None:
        """Few: a tile for four warps, two or one, and several for a warp. Many: each kind of tile, several for a block.
        Ragged rows and columns, and a short K."""
        self._ternary(device, rng, rng.integers(-127, 128, (m, k), dtype=np.int8), [n], add=add, spare=m % 7)

    @pytest.mark.parametrize(
        ("m", "n", "k", "shape"),
        [
            (9, 3, 16, SliceShape(64, 16, 1, 1)),
            (13, 201, 784, SliceShape(64, 16, 2, 2)),
            (16, 130, 400, SliceShape(128, 16, 4, 1)),
            (20, 90, 1168, SliceShape(64, 32, 1, 2)),
            (33, 500, 1296, SliceShape(192, 32, 8, 1)),
            (40, 300, 2064, SliceShape(64, 32, 1, 4)),
            (50, 700, 2576, SliceShape(256, 64, 2, 1)),
            (61, 300, 2576, SliceShape(128, 64, 1, 1)),
            (64, 90, 1168, SliceShape(64, 64, 2, 2)),
            (64, 130, 6928, SliceShape(128, 64, 5, 1)),
            (64, 450, 1040, SliceShape(192, 64, 8, 1)),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("add", [False, True], ids=["replace", "add"])
    def test_products_in_slices(
        self,
        device: Device,
        rng: np.random.Generator,
        monkeypatch: pytest.MonkeyPatch,
        m: int,
        n: int,
        k: int,
        shape: SliceShape,
        add: bool,
    ) -> None:
        """Slices alone and with others, in a block and in a cluster, with room for all activations and for some; ragged
        rows, columns and tokens. Devices without such a kernel multiply as they always do."""
        monkeypatch.setattr(products, "slice_shape", lambda *_: shape)
        self._ternary(device, rng, rng.integers(-128, 128, (m, k), dtype=np.int8), [n], add=add, spare=m % 7)

    @pytest.mark.parametrize(
        "shape",
        [
            Grouped(1, (5,), 512, 128),
            Grouped(1, (2001, 70), 2560, 128, add=True),
            Grouped(1, (25003,), 1024, 128),
            Grouped(1, (8000, 9001), 4608, 128, add=True),
            Grouped(1, (2200,), 16384, 128),
            Grouped(1, (37,), 40960, 128),
            Grouped(1, (5120,), 17408, 128, add=True),
            Grouped(5, (5,), 256, 128),
            Grouped(8, (2001, 70), 2560, 64, add=True),
            Grouped(7, (5120,), 17408, 128, add=True),
            Grouped(9, (4000,), 1280, 128),
            Grouped(16, (3000, 1000), 4096, 128, add=True),
            Grouped(21, (17000,), 768, 64),
            Grouped(40, (10001,), 512, 128, add=True),
            Grouped(64, (300,), 12288, 128),
            Grouped(64, (4100,), 4352, 64),
            Grouped(12, (37,), 40960, 128),
            Grouped(13, (2001,), 1280, 256),
            Grouped(64, (9001,), 2304, 256, add=True),
            Grouped(65, (130,), 512, 128),
            Grouped(300, (130,), 512, 128),
            Grouped(200, (2049,), 384, 128, add=True),
            Grouped(300, (131, 2), 640, 64, add=True),
            Grouped(700, (2561,), 640, 128),
            Grouped(513, (4000, 72), 1024, 64),
            Grouped(1100, (4198,), 640, 128, add=True),
            Grouped(257, (260,), 4224, 128, add=True),
            Grouped(400, (70,), 1024, 256),
            Grouped(100, (3001,), 2560, 256, add=True),
        ],
    )
    def test_groups(self, device: Device, rng: np.random.Generator, shape: Grouped) -> None:
        """One token, few and many: one tile and several for a warp or block, all of them on their way at once or not,
        ragged rows, odd numbers of groups, too long a row."""
        check_groups(device, rng, shape)

    @pytest.mark.parametrize(
        "shape",
        [
            Grouped(17, (4003,), 640, 128),
            Grouped(31, (2500, 13), 1408, 128, add=True),
            Grouped(40, (20001,), 640, 64),
            Grouped(64, (71,), 1280, 128, add=True),
        ],
        ids=str,
    )
    def test_groups_in_small_tiles(self, device: Device, rng: np.random.Generator, shape: Grouped) -> None:
        """Tiles of each number of tokens from 16 to 64 where there are such: ragged in rows, tokens and groups."""
        check_groups(device, rng, shape)

    @pytest.mark.parametrize(
        ("grouped", "shape"),
        [
            (Grouped(17, (70,), 1024, 128), GroupShape(64, 16, 1)),
            (Grouped(33, (3, 198), 2048, 128, add=True), GroupShape(64, 32, 1)),
            (Grouped(64, (201,), 5120, 128, add=True), GroupShape(64, 64, 1)),
            (Grouped(61, (300, 13), 3072, 128), GroupShape(128, 64, 1)),
            (Grouped(40, (500,), 4096, 128), GroupShape(192, 32, 1)),
            (Grouped(50, (450,), 17408, 128, add=True), GroupShape(192, 64, 1)),
        ],
        ids=str,
    )
    def test_groups_of_few_tokens(
        self,
        device: Device,
        rng: np.random.Generator,
        monkeypatch: pytest.MonkeyPatch,
        grouped: Grouped,
        shape: GroupShape,
    ) -> None:
        """Each kind of tile, ragged in rows and tokens; rings that hold all groups, and some."""
        monkeypatch.setattr(products, "few_groups_shape", lambda *_: shape)
        check_groups(device, rng, grouped)

    @pytest.mark.parametrize("norm", [False, True], ids=["quantise", "norm"])
    @pytest.mark.parametrize(("rows", "columns"), [(130, 2560), (19456, 2560), (300, 12288)])
    def test_groups_of_one_token_with_its_norm(
        self, device: Device, rng: np.random.Generator, rows: int, columns: int, norm: bool
    ) -> None:
        """Whole numbers up to 127 are their own codes, so that only the scale is rounded."""
        x = rng.integers(-127, 128, (1, columns)).astype(np.float32)
        x[0, rng.integers(columns)] = 127
        units = rng.uniform(0.01, 0.1, (rows, columns // 128)).astype(np.float16)
        w = random_ternary(rng, rows, columns), units
        specs = [tensor("x", "f32", "M", columns), tensor("a", "i8", "M", columns), tensor("s", "f32", "M")]
        specs.append(tensor("out", "f32", "M", rows))
        weights: dict[str, Weight] = {"w": ternary(*w), "gain": dense(np.full(columns, 1, np.float32))}
        ops: list[Op] = [
            NormQuant("x", "gain" if norm else None, 1e-5, "a", "s"),
            TernaryMatmul("a", "s", ("w",), "out"),
        ]
        limits = Limits(4)
        with closing(device.compile(Program(ops, {s.name: s for s in specs}, weights, limits))) as executable:
            executable.write("x", x)
            executable.write("out", np.full((4, rows), np.nan, np.float32))
            run(executable, Step(StepLayout(limits), tokens(1)))
            out = executable.read("out")
        scale = np.array([1 / np.sqrt(np.mean(x.astype(np.float64) ** 2) + 1e-5) if norm else 1], np.float32)
        expected = oracle.group_matmul(x.astype(np.int8), scale, [w])
        assert_within("out", out[:1], expected.astype(np.float64), 4e-6 * abs(expected) + 1e-12)
        assert np.isnan(out[1:]).all(), "rows past the step's token were written"

    @pytest.mark.parametrize(
        ("m", "width", "group"),
        [
            (1, 132, 128),
            (1, 13004, 128),
            (5, 132, 64),
            (8, 2604, 128),
            (8, 17408, 128),
            (23, 2604, 128),
            (32, 13004, 64),
            (16, 13004, 128),
            (37, 13004, 64),
            (9, 2604, 256),
            (100, 132, 256),
            (12, 132, None),
            (20, 9004, None),
            (700, 6912, None),
            (513, 300, None),
            (100, 2560, None),
            (60, 640, None),
            (700, 6912, 128),
            (513, 300, 64),
            (257, 132, 128),
            (100, 2560, 64),
        ],
    )
    @pytest.mark.parametrize("activation", ["relu2", "silu", "gelu_tanh"])
    def test_gates_of_any_number_of_tokens(
        self,
        device: Device,
        rng: np.random.Generator,
        m: int,
        width: int,
        group: int | None,
        activation: Literal["relu2", "silu", "gelu_tanh"],
    ) -> None:
        """Gates and ups multiplied in the product that makes them, as in no program that keeps its tensors."""
        k = 656 if group is None else 640 if m > 64 and group < 256 else 1024
        codes, scale = rng.integers(-127, 128, (m, k), dtype=np.int8), rng.uniform(1e-3, 0.1, m).astype(np.float32)

        def unit() -> float | npt.NDArray[np.float16]:
            return (
                rng.uniform(0.01, 0.1, (width, k // group)).astype(np.float16)
                if group
                else float(rng.uniform(0.01, 0.1))
            )

        gate, up = ((random_ternary(rng, width, k), unit()) for _ in range(2))
        gain = rng.uniform(0.5, 2, width).astype(np.float32)
        specs = [tensor("x", "i8", "M", k), tensor("xs", "f32", "M"), tensor("gu", "f32", "M", 2 * width)]
        specs += [tensor("h", "i8", "M", width), tensor("hs", "f32", "M")]
        ops: list[Op] = [
            TernaryMatmul("x", "xs", ("gate", "up"), "gu"),
            GluNormQuant("gu", "gain", 1e-5, activation, "h", "hs"),
        ]
        weights: dict[str, Weight] = {"gate": ternary(*gate), "up": ternary(*up), "gain": dense(gain)}
        limits = Limits(m + 3)
        executable = device.compile(Program(ops, {s.name: s for s in specs}, weights, limits))
        try:
            executable.write("x", codes)
            executable.write("xs", scale)
            executable.write("h", np.full((m + 3, width), -128, np.int8))
            run(executable, Step(StepLayout(limits), tokens(m)))
            h, hs = executable.read("h"), executable.read("hs", m)
        finally:
            executable.close()
        multiply: Any = oracle.group_matmul if group else oracle.ternary_matmul
        products = oracle.glu(multiply(codes, scale, [gate, up]), activation)
        check_codes(h[:m], hs, oracle.absmax(oracle.rms_norm(products, gain, 1e-5)))
        assert (h[m:] == -128).all(), "rows past the step's tokens were written"

    @needs(EMBEDDERS)
    @pytest.mark.parametrize("group", [None, 128])
    @pytest.mark.parametrize("m", [1, 7, 40, 300])
    def test_gates_and_ups_of_inputs_of_their_own(
        self, device: Device, rng: np.random.Generator, m: int, group: int | None
    ) -> None:
        """Two products fill the columns that an activation reads, in a program that keeps no tensors. Whole numbers are
        their own codes."""
        k, width = 640, 260
        inputs = {name: rng.integers(-127, 128, (m, k)).astype(np.float32) for name in "xz"}
        for rows in inputs.values():
            rows[np.arange(m), rng.integers(0, k, m)] = 127
        units = [rng.uniform(5e-4, 2e-3, (width, k // group)).astype(np.float16) if group else 1e-3 for _ in range(2)]
        gate, up = ((random_ternary(rng, width, k), unit) for unit in units)
        specs = [tensor(name, "f32", "M", k) for name in inputs] + [tensor("a", "i8", "M", k), tensor("s", "f32", "M")]
        specs += [tensor("gu", "f32", "M", 2 * width), tensor("h", "i8", "M", width), tensor("hs", "f32", "M")]
        ops: list[Op] = [
            NormQuant("x", None, 0.0, "a", "s"),
            TernaryMatmul("a", "s", ("gate",), "gu", column=0),
            NormQuant("z", None, 0.0, "a", "s"),
            TernaryMatmul("a", "s", ("up",), "gu", column=width),
            GluNormQuant("gu", None, 0.0, "gelu_tanh", "h", "hs"),
        ]
        weights: dict[str, Weight] = {"gate": ternary(*gate), "up": ternary(*up)}
        limits = Limits(m + 3)
        with closing(device.compile(Program(ops, {s.name: s for s in specs}, weights, limits))) as executable:
            for name, rows in inputs.items():
                executable.write(name, rows)
            executable.write("gu", np.full((m + 3, 2 * width), np.nan, np.float32))
            executable.write("h", np.full((m + 3, width), -128, np.int8))
            run(executable, Step(StepLayout(limits), tokens(m)))
            h, hs = executable.read("h"), executable.read("hs", m)
        multiply: Any = oracle.group_matmul if group else oracle.ternary_matmul
        ones, codes = np.ones(m, np.float32), {name: rows.astype(np.int8) for name, rows in inputs.items()}
        parts = [multiply(codes[name], ones, [w]) for name, w in (("x", gate), ("z", up))]
        check_codes(h[:m], hs, oracle.absmax(oracle.glu(np.concatenate(parts, axis=1), "gelu_tanh")))
        assert (h[m:] == -128).all(), "rows past the step's tokens were written"

    @pytest.mark.parametrize(
        "heads",
        [
            Heads(20, 5, 128),
            Heads(6, 2, 64, 16),
            Heads(3, 3, 128, 8),
            Heads(5, 1, 64, 64),
            Heads(20, 5, 128, dtype="i8"),
            Heads(6, 2, 64, 16, "i8"),
            Heads(5, 1, 128, 64, "i8"),
        ],
    )
    def test_attention_of_many_tokens(self, device: Device, rng: np.random.Generator, heads: Heads) -> None:
        """Several tiles of tokens and of positions, a later chunk, and short sequences beside it; then a few tokens
        of two sequences."""
        paged = Paged(device, rng, heads, length=780, seqs=3, chunk=700)
        with paged.rig:
            paged.run([(0, Part(0, 620))])
            paged.run([(0, Part(620, 150)), (1, Part(0, 529)), (2, Part(0, 1))])
            paged.run([(0, Part(770, 9)), (1, Part(529, 7))])

    @needs(KV_I8)
    @pytest.mark.parametrize("norms", [False, True], ids=["", "norms"])
    @pytest.mark.parametrize(
        ("heads", "pasts"),
        [
            (Heads(24, 4, 256), (479, 0, 1, 15, 63, 64, 200, 510)),
            (Heads(24, 4, 256, dtype="i8"), (33, 479, 12)),
            (Heads(7, 1, 256, 16), (700, 129)),
            (Heads(8, 1, 256, dtype="i8"), (300, 17)),
            (Heads(3, 3, 256, 64, style="interleaved"), (1500,)),
            (Heads(12, 2, 256), (FAR + 130,)),
            (Heads(10, 5, 256, 16, "i8", "interleaved"), tuple(range(250, 330, 5))),
            (Heads(32, 16, 256, 16), tuple(range(300, 380, 5))),
        ],
        ids=str,
    )
    def test_decoding_with_wide_heads(
        self, device: Device, rng: np.random.Generator, heads: Heads, pasts: tuple[int, ...], norms: bool
    ) -> None:
        """Two warps share a tile, each with half of a head: in a cluster, several, none, and one block."""
        paged = Paged(device, rng, heads, length=max(pasts) + 3, seqs=len(pasts), chunk=512, norms=norms)
        with paged.rig:
            for s, past in enumerate(pasts):
                for at in range(0, past, 512):
                    paged.fill(s, Part(at, min(512, past - at)))
            for i in range(2):
                paged.run([(s, Part(past + i, 1)) for s, past in enumerate(pasts)])

    @needs(KV_I8)
    @pytest.mark.parametrize(
        ("heads", "past", "seqs"),
        [
            (Heads(4, 1, 128, dtype="i8"), FAR + 300, 1),
            (Heads(4, 1, 128), FAR + 300, 1),
            (Heads(10, 5, 128, 16, "i8", "interleaved"), FAR + 13, 1),
            (Heads(10, 5, 128, 16, style="interleaved"), FAR + 14, 1),
            (Heads(4, 1, 64, dtype="i8"), FAR + 1, 1),
            (Heads(20, 5, 128, dtype="i8"), 2046, 1),
            (Heads(2, 1, 128, 64, "i8"), 2500, 1),
            (Heads(8, 1, 128), 2047, 1),
            (Heads(16, 8, 128), FAR + 300, 1),
            (Heads(16, 8, 128, dtype="i8"), FAR + 300, 1),
            (Heads(16, 8, 128, dtype="i8"), 2400, 1),
            (Heads(10, 5, 128), FAR + 20, 2),
            (Heads(10, 5, 128, dtype="i8"), FAR + 20, 2),
            (Heads(4, 4, 128), FAR + 20, 4),
            (Heads(4, 4, 128, dtype="i8"), FAR + 20, 4),
        ],
        ids=str,
    )
    def test_a_far_context(self, device: Device, rng: np.random.Generator, heads: Heads, past: int, seqs: int) -> None:
        """So many positions that one cluster or several share them, with tiles in registers or in shared memory."""
        paged = Paged(device, rng, heads, length=past + 5, seqs=seqs, chunk=512)
        with paged.rig:
            for s in range(seqs):
                for at in range(0, past - s, 512):
                    paged.fill(s, Part(at, min(512, past - s - at)))
            for i in range(4):
                paged.run([(s, Part(past - s + i, 1)) for s in range(seqs)])
