"""The compact LM head: bounds of its scores, and the same tokens as from exact logits for any input."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest

from bitnet.core import load_model
from bitnet.core.cpu import native
from bitnet.core.cpu.backend import BACKEND
from bitnet.core.cpu.compact_head import CompactHead
from bitnet.core.cpu.device import CpuDevice, CpuExecutable
from bitnet.core.hal import (
    BLOCK_SIZES,
    GREEDY,
    MAX_LOGPROBS,
    NO_TOKEN,
    BlockType,
    BlockWeight,
    DenseMatmul,
    Limits,
    Op,
    Program,
    Sample,
    SamplingParams,
    SequenceStep,
    Step,
    StepLayout,
    run,
)
from bitnet.core.testing.block_tables import blocks_of, floats, random_blocks
from bitnet.core.testing.rig import dense, tensor

Array = npt.NDArray[np.float32]
Wide = npt.NDArray[np.float64]
DRAWS = (
    GREEDY,
    SamplingParams(0.9, top_k=7, seed=11),
    SamplingParams(1.0, top_k=30, top_p=0.8, min_p=0.01, seed=12),
    SamplingParams(0.6, min_p=0.1, seed=13),
    SamplingParams(1.1, top_p=0.9, seed=14),
    SamplingParams(0.1, top_p=0.95, seed=17),
    SamplingParams(1.0, top_p=0.3, seed=18),
    SamplingParams(1.0, top_p=1e-4, seed=19),
    SamplingParams(1e-3, top_p=0.9999, seed=20),
    SamplingParams(1.0, top_p=0.9, min_p=0.05, seed=21),
    SamplingParams(1.0, seed=15),
    SamplingParams(1e-30, seed=16),
)
LEVELS = [name for name in native.LEVELS if name in native.levels(native.library().handle)]


class HeadAlone:
    """A program of nothing but a head, on one level of this processor; ``waits``: packed when a step needs it."""

    def __init__(
        self,
        library: ctypes.CDLL,
        level: str,
        weight: npt.NDArray[np.float16 | np.float32] | BlockWeight,
        rows: int,
        *,
        waits: bool = False,
    ) -> None:
        self.device = CpuDevice(BACKEND.probe().devices[0], library, level=level, threads=3)
        vocabulary, width = weight.shape
        specs = tensor("x", "f32", "R", width), tensor("logits", "f32", "R", vocabulary), tensor("out", "i32", "R")
        ops: list[Op] = [DenseMatmul("x", "head", "logits"), Sample("logits", "out")]
        limits = Limits(rows, rows, rows)
        self.layout = StepLayout(limits)
        program = Program(
            ops,
            {s.name: s for s in specs},
            {"head": weight if isinstance(weight, BlockWeight) else dense(weight)},
            limits,
            name="head",
        )
        self.executable: CpuExecutable = self.device.compile(program)
        if self.executable._lowered.head_waits and not waits:
            self.executable._lowered.pack_head()

    def run(self, x: Array, params: SamplingParams, *, logits: bool, logprobs: int | None = None) -> list[int]:
        parts = [SequenceStep([0], 7 + i, rows=[0], sampling=params) for i in range(len(x))]
        self.executable.write("x", x)
        step = Step(self.layout, parts, logits=logits, logprobs=logprobs)
        tokens: list[int] = run(self.executable, step)[0].tolist()
        return tokens

    @property
    def all_scored(self) -> bool:
        """Whether the last run computed all logits of a row."""
        library, handle = self.device.library, self.executable._handle
        vocabulary = self.logits(1).shape[1]
        return bool(library.bitnet_executable_scored(handle) >= vocabulary)

    def logits(self, rows: int) -> Array:
        return self.executable.read("logits", rows)


@pytest.fixture
def head(library: ctypes.CDLL) -> Iterator[Callable[..., HeadAlone]]:
    made: list[HeadAlone] = []

    def make(
        level: str, weight: npt.NDArray[np.float16 | np.float32] | BlockWeight, rows: int, **options: bool
    ) -> HeadAlone:
        made.append(HeadAlone(library, level, weight, rows, **options))
        return made[-1]

    yield make
    for each in made:
        each.device.close()


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(np.random.default_rng().integers(2**31))
    print("seed", seed)
    return np.random.default_rng(seed)


@pytest.mark.parametrize("level", LEVELS)
def test_the_first_token_does_not_wait_for_the_compact_head(
    head: Callable[..., HeadAlone], rng: np.random.Generator, level: str
) -> None:
    """Alone, a sequence has its first token from all logits, and the next ones from the compact head; the same ones."""
    vocabulary, width = int(rng.integers(200, 3000)), 4 * int(rng.integers(1, 160))
    weight = (rng.standard_normal((vocabulary, width)) * rng.uniform(0.1, 3, width)).astype("f2")
    packed = head(level, weight, 2)
    assert not packed.executable._lowered.head_waits
    for params in (GREEDY, SamplingParams(0.9, top_k=7, seed=11), SamplingParams(1.0, top_p=0.3, seed=18)):
        alone, parts = (head(level, weight, 1, waits=True) for _ in range(2))
        lowered = alone.executable._lowered
        for turn in range(3):
            assert lowered.head_waits == (turn < 2)  # before the second one
            x = rng.standard_normal((1, width)).astype(np.float32)
            expected = packed.run(x, params, logits=False)
            assert alone.run(x, params, logits=True) == expected  # needs no compact head
            assert alone.run(x, params, logits=False) == expected, (params, turn)
            assert any(name.startswith("head_sample") for name in alone.executable.kernels) == (turn > 0)
        parts.run(x, params, logits=False, logprobs=3)  # whose normaliser may be the compact head's
        assert not parts.executable._lowered.head_waits


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rows", range(1, 17))
def test_tokens_are_those_of_the_exact_logits(
    head: Callable[..., HeadAlone], rng: np.random.Generator, level: str, rows: int
) -> None:
    """Any number of rows, any vocabulary, any width, weights in either type, activations with and without outliers."""
    vocabulary, width = int(rng.integers(1, 3000)), 4 * int(rng.integers(1, 160))
    weight = rng.standard_normal((vocabulary, width)) * rng.uniform(0.1, 3, width)
    made = head(level, weight.astype(rng.choice(["f2", "f4"])), rows)
    for params in DRAWS:
        x = rng.standard_normal((rows, width)).astype(np.float32)
        x[rng.integers(rows), rng.integers(width)] *= rng.choice([0, 1, 500])
        assert made.run(x, params, logits=False) == made.run(x, params, logits=True), params


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", BLOCK_SIZES)
def test_logits_of_blocks_are_those_of_their_floats(
    head: Callable[..., HeadAlone], rng: np.random.Generator, level: str, dtype: BlockType
) -> None:
    """Bit for bit, and so the tokens, too, from a compact copy of either."""
    columns, rows = BLOCK_SIZES[dtype][0], int(rng.integers(1, 12))
    vocabulary, width = int(rng.integers(1, 700)), columns * int(rng.integers(1, 6))
    data = random_blocks(rng, vocabulary, width, dtype)
    packed, plain = (head(level, w, rows) for w in (blocks_of(data, width, dtype), floats(data, width, dtype)))
    for params in DRAWS:
        x = rng.standard_normal((rows, width)).astype(np.float32)
        found = [made.run(x, params, logits=logits) for made in (packed, plain) for logits in (True, False)]
        assert all(tokens == found[0] for tokens in found), params
        for made in (packed, plain):
            made.run(x, params, logits=True)
        np.testing.assert_array_equal(packed.logits(rows), plain.logits(rows))


@pytest.mark.parametrize("rows", [1, 4])
def test_top_p_of_a_peaked_distribution_reads_few_rows(
    head: Callable[..., HeadAlone], rng: np.random.Generator, rows: int
) -> None:
    """Tokens as from all logits, also where the first winner does not pass; frequencies are like those of words."""
    vocabulary, width = 40_000, 256
    direction = rng.standard_normal(width)
    direction /= np.linalg.norm(direction)
    frequencies = -2.0 * np.log(rng.permutation(vocabulary) + 3.0)
    weight = rng.standard_normal((vocabulary, width)) * 0.3 / np.sqrt(width) + np.outer(frequencies, direction) / 16
    made = head(LEVELS[-1], weight.astype(np.float16), rows)
    x = (16 * direction + 0.3 * rng.standard_normal((rows, width))).astype(np.float32)
    whole, rejected = 0, 0
    for top_p in (0.95, 0.8):
        for _ in range(40):
            params = SamplingParams(1.0, top_p=top_p, seed=int(rng.integers(2**63)))
            tokens = made.run(x, params, logits=False)
            whole += made.executable.stats().weight_bytes > vocabulary * width * 2
            assert tokens == made.run(x, params, logits=True), params
            rejected += tokens != made.run(x, SamplingParams(1.0, seed=params.seed), logits=True)
    assert rejected > 4
    assert whole <= 8 * rows, f"{whole} of 80 steps computed all logits"


def columns_of(weight: npt.NDArray[np.float16]) -> Wide:
    """The size of each column, as a head of fewer than 4,096 rows has it."""
    sizes: Wide = np.sqrt((weight.astype(np.float64) ** 2).sum(axis=0) / 4096)
    return sizes


def sigmas(made: HeadAlone, weight: npt.NDArray[np.float16], x: Array) -> Wide:
    """How far each score that is left in the logits is off, in the standard deviations of ADR 0060's bound."""
    made.run(x, GREEDY, logits=False)
    wide, column, width = weight.astype(np.float64), columns_of(weight), weight.shape[1]
    step = abs(wide / column).max(axis=1) / 7.5
    y = x * column
    weights = step * np.linalg.norm(y, axis=1)[:, None] / np.sqrt(12)
    stored = np.linalg.norm(wide / column, axis=1) + step * np.sqrt(width) / 2
    activations = stored * abs(y).max(axis=1)[:, None] / 126.5 / 2
    off: Wide = abs(made.logits(len(x)) - x.astype(np.float64) @ wide.T) / np.hypot(weights, activations)
    return off


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("outlier", [1, 40, 5000])
def test_scores_are_within_their_bound(
    head: Callable[..., HeadAlone], rng: np.random.Generator, level: str, rows: int, outlier: float
) -> None:
    """An outlier among the activations leaves few of their 8 bits to the others, and the bound grows with that."""
    weight = rng.standard_normal((2000, 512)).astype(np.float16)
    weight[:500] = weight[0]  # equal rows: equal errors
    x = rng.standard_normal((rows, 512)).astype(np.float32)
    x[np.arange(rows), rng.integers(512, size=rows)] *= outlier
    off = sigmas(head(level, weight, rows), weight, x)
    assert off.max() < 7.5
    if outlier == 1:  # nearly all of it the weights' rounding, so what the codes leave out is what it should be
        assert 0.8 < off[:, 500:].std() / np.sqrt(1 - 2 / np.pi) < 1.2  # of half a normal distribution


@pytest.mark.parametrize("level", LEVELS)
def test_errors_of_activations_do_not_add_up(
    head: Callable[..., HeadAlone], rng: np.random.Generator, level: str
) -> None:
    """All but one lie in the same place between two steps, and all weights are positive: rounded alike, they would."""
    weight = (0.5 + abs(rng.standard_normal((300, 4096)))).astype(np.float16)
    y = np.full((2, 4096), rng.uniform(0.2, 0.45))
    y[:, rng.integers(4096)] = 126.5
    x = (y / columns_of(weight)).astype(np.float32)
    assert sigmas(head(level, weight, 2), weight, x).max() < 7.5


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.0])
@pytest.mark.parametrize("where", ["weight", "row", "column", "x", "all x"])
def test_numbers_that_are_none(
    head: Callable[..., HeadAlone], rng: np.random.Generator, level: str, rows: int, value: float, where: str
) -> None:
    vocabulary, width = 700, 64
    weight = rng.standard_normal((vocabulary, width)).astype(np.float16)
    x = rng.standard_normal((rows, width)).astype(np.float32)
    place = int(rng.integers(vocabulary)), int(rng.integers(width))
    if where == "weight":
        weight[place] = value
    elif where == "row":
        weight[place[0]] = value
    elif where == "column":
        weight[:, place[1]] = value
    elif where == "x":
        x[-1, place[1]] = value
    else:
        x[:] = value
    made = head(level, weight, rows)
    for params in DRAWS:
        usual, exact = made.run(x, params, logits=False), made.run(x, params, logits=True)
        assert all(NO_TOKEN <= token < vocabulary for token in usual)
        logits = made.logits(rows)
        for r in range(rows):
            assert (usual[r] == NO_TOKEN) == (exact[r] == NO_TOKEN) == np.isnan(logits[r]).any(), params
            if np.isfinite(logits[r]).all() or params is GREEDY:
                assert usual[r] == exact[r], params


@pytest.mark.parametrize("level", LEVELS)
def test_the_lowest_of_equal_tokens(head: Callable[..., HeadAlone], rng: np.random.Generator, level: str) -> None:
    weight = rng.standard_normal((50, 128)).astype(np.float16)[np.arange(4000) % 50]
    made = head(level, weight, 3)
    x = rng.standard_normal((3, 128)).astype(np.float32)
    best = (x.astype(np.float64) @ weight[:50].astype(np.float64).T).argmax(axis=1)
    assert made.run(x, GREEDY, logits=False) == best.tolist()


def test_greedy_tokens_of_the_demo_model(rng: np.random.Generator) -> None:
    """1,000 random contexts, as ``tools/check_head.py`` compares those of larger models."""
    contexts = []
    with load_model(device="cpu", context=64, max_seqs=16) as model:
        for _ in range(1000):
            contexts.append(rng.integers(0, model.config.vocab_size, rng.integers(1, 12)).tolist())
        usual, exact = (
            [c.tokens for c in model.generate_batch(contexts, max_tokens=1, ignore_eos=True, logprobs=logprobs)]
            for logprobs in (None, MAX_LOGPROBS + 1)  # more than a device reports: the host reads all logits
        )
    assert usual == exact
    assert len({token for (token,) in usual}) > 20


def test_perplexity_of_the_demo_model_is_that_of_the_f16_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same layers on the same device: rounding to int8 differs more between devices than two heads may."""
    with load_model(device="cpu", context=256) as model:
        text = [
            t for _ in range(6) for t in model.generate("1", max_tokens=60, temperature=1.0, ignore_eos=True).tokens
        ]
        (*_, here) = model.perplexity(text, context=128)
    monkeypatch.setattr(CompactHead, "of", lambda program: None)
    with load_model(device="cpu", context=256) as model:
        (*_, there) = model.perplexity(text, context=128)
    assert here.value == pytest.approx(there.value, rel=1e-3)
