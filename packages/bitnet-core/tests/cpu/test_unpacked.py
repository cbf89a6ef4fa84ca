"""With one sequence, a first short step multiplies ternary matrices as their mapped file has them."""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from bitnet.core import load_model, loading
from bitnet.core.cpu import native
from bitnet.core.cpu.backend import BACKEND
from bitnet.core.cpu.device import CpuDevice, CpuExecutable
from bitnet.core.cpu.lowering import UNPACKED_TOKENS
from bitnet.core.errors import ModelFileError
from bitnet.core.gguf.ternary import pack_ternary
from bitnet.core.hal import (
    DenseMatmul,
    Limits,
    NormRows,
    Op,
    Program,
    Sample,
    SequenceStep,
    Step,
    StepLayout,
    TernaryData,
    TernaryMatmul,
    TernaryWeight,
    run,
)
from bitnet.core.testing.rig import dense, random_ternary, tensor
from make_random_model import make_model
from random_shapes import PRESETS

LEVELS = [name for name in native.LEVELS if name in native.levels(native.library().handle)]
TOKENS = 80


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def mapped(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The same array in a mapping."""
    found = np.frombuffer(mmap.mmap(-1, codes.nbytes), np.uint8).reshape(codes.shape)
    found[:] = codes
    return found


class Products:
    """A program of one product of several matrices, whose results end in a sample, for one sequence."""

    def __init__(self, device: CpuDevice, rng: np.random.Generator, rows: list[int], k: int) -> None:
        self.matrices = [random_ternary(rng, n, k) for n in rows]
        self.scales = rng.uniform(0.01, 2, len(rows)).astype(np.float32)
        weights = {f"w{i}": self._weight(i) for i in range(len(rows))}
        width = sum(rows)
        specs = (
            *(tensor("x", "i8", "M", k), tensor("s", "f32", "M"), tensor("y", "f32", "M", width)),
            *(tensor("h", "f32", "R", width), tensor("logits", "f32", "R", 64), tensor("out", "i32", "R")),
        )
        ops: list[Op] = [
            TernaryMatmul("x", "s", tuple(weights), "y"),
            NormRows("y", "norm", 1e-5, "h"),
            DenseMatmul("h", "head", "logits"),
            Sample("logits", "out"),
        ]
        limits = Limits(TOKENS, 1, 1)
        self.layout = StepLayout(limits)
        rest = {"norm": dense(np.ones(width, np.float32)), "head": dense(np.ones((64, width), np.float32))}
        program = Program(ops, {s.name: s for s in specs}, {**weights, **rest}, limits, name="products")
        self.executable: CpuExecutable = device.compile(program, keep=True)

    def _weight(self, i: int) -> TernaryWeight:
        weights = self.matrices[i]
        data = TernaryData(mapped(pack_ternary(weights)), self.scales[i : i + 1])
        return TernaryWeight((weights.shape[0], weights.shape[1]), lambda: data)

    @property
    def waits(self) -> bool:
        return self.executable._lowered.layers_wait

    def check(self, rng: np.random.Generator, tokens: int) -> None:
        """Run a step of random activations, and compare every result bit for bit."""
        k = self.matrices[0].shape[1]
        x = rng.integers(-127, 128, (TOKENS, k)).astype(np.int8)
        s = rng.uniform(1e-3, 1, TOKENS).astype(np.float32)
        exact = [
            (x.astype(np.int64) @ w.T.astype(np.int64)).astype(np.float32) * (s[:, None] * scale)
            for w, scale in zip(self.matrices, self.scales, strict=True)
        ]
        expected = np.concatenate(exact, axis=1)
        for name, array in (("x", x), ("s", s), ("y", np.full_like(expected, np.nan))):
            self.executable.write(name, array)
        run(self.executable, Step(self.layout, [SequenceStep([0] * tokens, tokens, rows=[tokens - 1])]))
        found = self.executable.read("y", TOKENS)
        np.testing.assert_array_equal(found[:tokens], expected[:tokens])
        assert np.isnan(found[tokens:]).all()


@pytest.mark.parametrize("tokens", [1, 2, 7, 22, UNPACKED_TOKENS])
def test_products_are_exact_before_and_after_packing(device: CpuDevice, rng: np.random.Generator, tokens: int) -> None:
    shapes = [(rng.integers(1, 400, rng.integers(1, 4)).tolist(), int(rng.integers(1, 12))) for _ in range(3)]
    shapes.append(([16 * int(rng.integers(1, 20))], 3))  # whole tiles, and a strip that is not whole squares of words
    for rows, blocks in shapes:
        rows[-1] += -sum(rows) % 4
        products = Products(device, rng, rows, 128 * blocks)
        assert products.waits
        products.check(rng, tokens)
        assert products.waits, rows
        for after in (tokens, 1, TOKENS):
            products.check(rng, after)
            assert not products.waits
        products.executable.close()


def test_a_long_first_step_packs_before(device: CpuDevice, rng: np.random.Generator) -> None:
    products = Products(device, rng, [200], 256)
    products.check(rng, UNPACKED_TOKENS + 1)
    assert not products.waits


@pytest.mark.parametrize("level", LEVELS)
def test_tokens_are_those_of_packed_layers(
    level: str,
    library: ctypes.CDLL,
    tmp_path: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "IDLE", 60)  # nothing is packed between two requests
    make_model(tmp_path / "m.gguf", replace(PRESETS["small"], ffn=640), seed=int(rng.integers(1000)))
    prompt = rng.integers(5, 500, int(rng.integers(2, 40))).tolist()
    answers = []
    for sequences in (1, 2):
        device = CpuDevice(BACKEND.probe().devices[0], library, level=level, threads=2)
        with load_model(tmp_path / "m.gguf", device=device, max_seqs=sequences, context=128) as model:
            lowered = model._replicas[0].executable._lowered  # type: ignore[attr-defined]
            assert lowered.layers_wait == (sequences == 1)
            first = model.generate(prompt, max_tokens=1).tokens
            assert lowered.layers_wait == (sequences == 1)
            answers.append((first, model.generate(prompt, max_tokens=20, ignore_eos=True).tokens))
            assert not lowered.layers_wait
        device.close()
    assert answers[0] == answers[1]


def test_an_idle_model_packs_its_weights(tmp_path: Path) -> None:
    make_model(tmp_path / "m.gguf", PRESETS["small"])
    with load_model(tmp_path / "m.gguf", device="cpu", max_seqs=1, context=128) as model:
        (warm_up,) = model._warm_ups
        assert warm_up.wait(60)
        executable = model._replicas[0].executable
        assert isinstance(executable, CpuExecutable)
        assert not executable._lowered.layers_wait
        assert not executable._lowered.head_waits
        tokens = model.generate([5, 6, 7], max_tokens=9, ignore_eos=True).tokens
    with load_model(tmp_path / "m.gguf", device="cpu", max_seqs=2, context=128) as model:
        assert model.generate([5, 6, 7], max_tokens=9, ignore_eos=True).tokens == tokens


def test_a_file_that_changes_before_it_is_packed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "IDLE", 60)
    path = tmp_path / "m.gguf"
    make_model(path, PRESETS["small"])
    with load_model(path, device="cpu", max_seqs=1, context=128) as model:
        model.generate([5, 6, 7], max_tokens=1)
        os.utime(path, ns=(1, 1))
        with pytest.raises(ModelFileError, match="was written to"):
            model.generate([5, 6, 7], max_tokens=4)
