"""The CUDA backend against the operations' contract, on every device it finds."""

from contextlib import closing
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest

from bitnet.core.hal import (
    KV_I8,
    STATES,
    Device,
    GluNormQuant,
    Limits,
    NormQuant,
    Op,
    Program,
    Step,
    StepLayout,
    TernaryMatmul,
    Weight,
    run,
)
from bitnet.core.testing import ConformanceSuite, oracle
from bitnet.core.testing.attention import Heads, Paged, Part
from bitnet.core.testing.cases import needs
from bitnet.core.testing.linear import Grouped, check_groups
from bitnet.core.testing.norms import check_codes
from bitnet.core.testing.recurrent import Delta
from bitnet.core.testing.rig import assert_within, dense, random_ternary, tensor, ternary, tokens
from bitnet.core.testing.tables import Table, check_head
from bitnet.cuda.attention import FAR
from bitnet.cuda.backend import BACKEND


class TestConformance(ConformanceSuite):
    backend = BACKEND

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
    @pytest.mark.parametrize("activation", ["relu2", "silu"])
    def test_gates_of_any_number_of_tokens(
        self,
        device: Device,
        rng: np.random.Generator,
        m: int,
        width: int,
        group: int | None,
        activation: Literal["relu2", "silu"],
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
