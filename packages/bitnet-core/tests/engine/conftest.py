"""A tiny model with random weights, engines over it on real devices, and a tokenizer of bytes."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from bitnet.core.engine import Completion, Engine, GenerationOptions
from bitnet.core.engine.preparer import Preparer
from bitnet.core.engine.setup import make_drafter
from bitnet.core.hal import Device, DeviceInfo, Executable, Limits, OpenOptions, Program, Weight
from bitnet.core.model import ModelConfig
from bitnet.core.model.cache import cache_layout
from bitnet.core.model.draft import DraftLayer
from bitnet.core.model.program import build_program
from bitnet.core.model.weights import expected_weights
from bitnet.core.reference import NUMPY_INFO, ReferenceDevice
from bitnet.core.testing.rig import dense, random_ternary, ternary

EOS = 256
CONFIG = ModelConfig(
    architecture="bitnet-b1.58",
    name="tiny",
    vocab_size=260,
    hidden_size=64,
    layers=1,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn_size=96,
    context_length=512,
    rms_eps=1e-5,
    rope_theta=10_000.0,
    rope_style="neox",
    rope_freq_factors=None,
    activation="relu2",
    sub_norms=True,
    tied_embeddings=False,  # a tied random head mostly repeats its input
)


def random_weights(config: ModelConfig, rng: np.random.Generator) -> dict[str, Weight]:
    """Weights of any architecture, scaled so that no layer drowns another."""
    weights: dict[str, Weight] = {}
    for name, (kind, shape) in expected_weights(config):
        if kind == "ternary" and len(shape) == 3:  # of all experts, with a scale for each row
            rows = shape[0] * shape[1]
            units = rng.uniform(0.02, 0.1, (rows, 1)).astype(np.float16)
            weights[name] = ternary(random_ternary(rng, rows, shape[2]), units)
        elif kind == "ternary":
            weights[name] = ternary(random_ternary(rng, *shape), float(rng.uniform(0.02, 0.1)))
        elif name.endswith(("ffn_gate_inp", "ssm_alpha", "ssm_beta", "ssm_conv1d", "ssm_dt.bias")):
            weights[name] = dense(rng.normal(0, 0.4, shape).astype(np.float32))
        elif name.endswith("ssm_a"):
            weights[name] = dense(-rng.uniform(0.02, 0.5, shape).astype(np.float32))
        elif kind == "norm":
            weights[name] = dense(rng.uniform(0.5, 1.5, shape).astype(np.float32))
        else:
            weights[name] = dense(rng.normal(0, 0.3, shape).astype(np.float16))
    if config.tied_embeddings:
        weights["output"] = weights["token_embd"]
    return weights


@pytest.fixture
def make_model() -> Callable[..., tuple[ModelConfig, dict[str, Weight]]]:
    """Makes a configuration and random weights, from random numbers and whatever differs from the tiny model."""

    def make(rng: np.random.Generator, **config: Any) -> tuple[ModelConfig, dict[str, Weight]]:
        shape = replace(CONFIG, **config)
        return shape, random_weights(shape, rng)

    return make


class ByteText:
    """Tokens 0 … 255 are bytes of UTF-8, the others nothing."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, *tokens: int) -> str:
        return self._decoder.decode(bytes(token for token in tokens if token < 256))

    def lacks(self, character: str, tokens: Sequence[int]) -> bool:
        return character.isascii() and ord(character) not in tokens

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


@dataclass
class Rig:
    """An engine over the tiny model, and what tests do with one."""

    engine: Engine
    executable: Executable
    program: Program

    def run(self, prompts: Sequence[Sequence[int]], *, n: int = 1, **options: Any) -> list[Completion]:
        """Continue all prompts at once; completions in the order of submission."""
        numbers = []
        for prompt in prompts:
            sequences = self.engine.preparer.prepare(prompt, GenerationOptions(**options), n)
            self.engine.add(sequences)
            numbers += [s.number for s in sequences]
        done = self.finish()
        return [done[number] for number in numbers]

    def one(self, prompt: Sequence[int], **options: Any) -> Completion:
        return self.run([prompt], **options)[0]

    def arriving(
        self,
        asked: Sequence[tuple[Sequence[int], dict[str, Any]]],
        rng: np.random.Generator,
        check: Callable[[], None] = lambda: None,
    ) -> list[Completion]:
        """Continue prompts with their options, up to three of which arrive before each step; ``check`` follows it."""
        waiting, numbers, done = list(asked), [], dict[int, Any]()
        while waiting or self.engine.busy:
            for _ in range(int(rng.integers(0, 4)) if self.engine.busy else 1):
                if waiting:
                    prompt, options = waiting.pop(0)
                    sequences = self.engine.preparer.prepare(prompt, GenerationOptions(**options))
                    numbers.append(sequences[0].number)
                    self.engine.add(sequences)
            done |= self.step()
            check()
        return [done[number] for number in numbers]

    def finish(self) -> dict[int, Any]:
        """Step until nothing is left; results by sequence number."""
        done = dict[int, Any]()
        while self.engine.busy:
            done |= self.step()
        return done

    def step(self) -> dict[int, Any]:
        """One step; the results of what ended in it, by sequence number."""
        return {update.sequence: update.result for update in self.engine.step() if update.result is not None}

    @property
    def free_blocks(self) -> int:
        return self.engine._scheduler.pool.available


def cpu_devices() -> dict[str, Callable[[], Device]]:
    """Every level of the CPU device by name; each opens it."""
    from bitnet.core.cpu.backend import BACKEND

    def opener(info: DeviceInfo) -> Callable[[], Device]:
        return lambda: BACKEND.open(info, OpenOptions())

    return {info.name: opener(info) for info in BACKEND.probe().devices}


@pytest.fixture(params=["cpu:numpy", "cpu:scalar", "cpu:avx2", "cpu:avx512", "cpu:amx", "cpu:neon"])
def device(request: pytest.FixtureRequest, require_device: Callable[[str, str | None], None]) -> Iterator[Device]:
    """Each level of the CPU device in turn; use it where levels could differ."""
    name = request.param
    if name == "cpu:numpy":
        yield ReferenceDevice(NUMPY_INFO)
        return
    found = cpu_devices()
    require_device(name, None if name in found else f"this machine has no {name}")
    opened = found[name]()
    yield opened
    opened.close()


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    """``make_rig(device=…, limits=…)``: an engine over the same weights each time, on the numpy device by default."""
    made: list[Rig] = []

    def make(
        device: Device | None = None,
        *,
        limits: Limits | None = None,
        num_blocks: int = 64,
        block_size: int = 4,
        context: int | None = None,
        weights_seed: int = 7,
        nan_in: str = "",
        lookup: bool = False,
        state_entries: int = 0,
        tables: int | None = None,
        draft: DraftLayer | None = None,
        **config: Any,
    ) -> Rig:
        shape = replace(CONFIG, **config)
        windows = cache_layout(shape, tables).windows
        limits = limits or Limits(max_tokens=32, max_seqs=4, max_rows=8, max_blocks=32)
        limits = replace(limits, tables=len(windows))
        weights = random_weights(shape, np.random.default_rng(weights_seed))
        if nan_in:
            table = weights[nan_in].load().copy()  # type: ignore[union-attr]
            table[7, 3] = np.nan
            weights[nan_in] = dense(table)
        program = build_program(
            shape,
            weights,
            limits=limits,
            num_blocks=num_blocks,
            block_size=block_size,
            state_entries=state_entries,
            hidden=draft is not None,
        )
        opened = device or ReferenceDevice(NUMPY_INFO)
        executable = opened.compile(program)
        drafter = None
        if draft is not None:
            drafter = make_drafter(draft, weights, opened, executable, limits=limits, context=64, kv_dtype="f16")
        assert program.kv is not None
        preparer = Preparer(
            context=context or limits.max_blocks * block_size,
            vocab_size=shape.vocab_size,
            eos=frozenset({EOS}),
            text=lambda prompt: ByteText(),
            lookup=lookup,
        )
        features = opened.info.features
        engine = Engine(
            executable,
            preparer,
            limits=limits,
            kv=program.kv,
            device="cpu:numpy",
            features=features,
            state_entries=state_entries,
            windows=windows,
            drafter=drafter,
        )
        made.append(Rig(engine, executable, program))
        return made[-1]

    yield make
    for rig in made:
        rig.executable.close()
        if rig.engine.drafter is not None:
            rig.engine.drafter.executable.close()
