"""Drafts of a draft layer: no token depends on them, and they are made only where that is faster.

Long, because the tests share the random layer, and a simulation of its pace stands beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from bitnet.core import load_model
from bitnet.core.engine import GenerationOptions
from bitnet.core.engine.drafter import MAX_LAYER_DRAFT, Drafter
from bitnet.core.engine.pacing import DRAFT_SIZES, DraftCosts, DraftOption
from bitnet.core.engine.prompt_lookup import Draft
from bitnet.core.errors import BitNetError, DeviceError, InvalidInputError
from bitnet.core.gguf import GGMLType, GGUFFile, TensorSource, i2s_bytes, write_gguf
from bitnet.core.hal import Device, KVSpec, Limits, SequenceStep, Step, StepLayout, Weight, run
from bitnet.core.model import ModelConfig
from bitnet.core.model.default import default_model_path
from bitnet.core.model.delta_net import DeltaNet
from bitnet.core.model.draft import DraftLayer
from bitnet.core.model.program import split_queries
from bitnet.core.testing.rig import dense, random_ternary, ternary

MakeRig = Callable[..., Any]
MakeModel = Callable[..., tuple[ModelConfig, dict[str, Weight]]]
REAL = pytest.mark.parametrize("device", ["cpu:scalar", "cpu:avx2", "cpu:avx512", "cpu:neon"], indirect=True)
"""Not numpy, whose sums depend on the batch."""
HYBRID: dict[str, Any] = {
    "architecture": "qwen35",
    "layers": 3,
    "activation": "silu",
    "sub_norms": False,
    "head_norms": True,
    "rotary_dim": 8,
    "output_gate": True,
    "delta_net": DeltaNet((True, False, True), 2, 4, 16, 16, 4),
}


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(np.random.default_rng().integers(1 << 32))
    print("seed", seed)
    return np.random.default_rng(seed)


@pytest.fixture
def layer(make_model: MakeModel, rng: np.random.Generator) -> Callable[..., DraftLayer]:
    """Makes a draft layer with random weights for the tiny model; ``echo``: one that predicts the last token again,
    which is often right where the head is the embedding."""

    def make(*, echo: bool = False, **config: Any) -> DraftLayer:
        shape, weights = make_model(rng, **{**config, "layers": 1, "delta_net": None})
        hidden = shape.hidden_size
        for half in ("embedding", "hidden"):
            codes = np.eye(hidden, dtype=np.int8) if echo else random_ternary(rng, hidden, hidden)
            weights[half] = ternary(codes, 1.0)
        for norm in ("enorm", "hnorm", "head_norm"):
            weights[norm] = dense(np.ones(hidden, np.float32))
        if echo:
            for name in ("blk.0.attn_output", "blk.0.ffn_down"):
                rows, columns = weights[name].shape
                weights[name] = ternary(np.zeros((rows, columns), np.int8), 1.0)
        if shape.output_gate:
            weights |= split_queries(shape, "blk.0.attn_q", weights)
        for name in ("token_embd", "output", "output_norm"):
            del weights[name]
        return DraftLayer(cast("Any", None), shape, weights, 1)

    return make


class Chance:
    """Chooses an option and a size at random, as no measurement would; with ``idle``, perhaps none."""

    def __init__(self, rng: np.random.Generator, *, idle: bool = True) -> None:
        self._rng, self._least, self.stale, self.token = rng, 0 if idle else 1, False, 0.0
        self.steps = 0

    def choose(self, drafts: Sequence[Draft], room: int) -> int:
        return self.choose_from([DraftOption(drafts)], room)[1]

    def choose_from(self, options: Sequence[DraftOption], room: int) -> tuple[int, int]:
        which = len(options) - 1 if self._least or self._rng.random() < 0.9 else 0
        lengths = [len(draft.tokens) for draft in options[which].drafts]
        fit = [size for size in DRAFT_SIZES if sum(min(size, n) for n in lengths) <= room]
        size = int(self._rng.choice([0, *fit][self._least :] if any(lengths) else [0]))
        return which if size else 0, size

    def making(self, seqs: int) -> float:
        return 1e-9

    def made(self, seqs: int, tokens: int, seconds: float) -> None: ...

    def plain(self, seqs: int, seconds: float) -> None: ...

    def drafted(self, tokens: int, seconds: float) -> None:
        self.steps += 1


def requests(rng: np.random.Generator, count: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts that share beginnings, some longer than a step, and options of every kind."""
    stems = [rng.integers(0, 256, int(rng.integers(1, 60))).tolist() for _ in range(6)]
    made = []
    for _ in range(count):
        prompt = stems[rng.integers(len(stems))] + rng.integers(0, 256, int(rng.integers(1, 20))).tolist()
        options: dict[str, Any] = {"max_tokens": int(rng.integers(1, 45)), "ignore_eos": bool(rng.integers(2))}
        kind = int(rng.integers(6))
        if kind < 3:
            options |= {"temperature": float(rng.uniform(0.2, 1.2)), "seed": int(rng.integers(99)), "top_k": 9}
        elif kind == 3:
            options |= {"logprobs": 2}
        elif kind == 4 and rng.random() < 0.3:
            options |= {"repetition_penalty": 1.2}
        made.append((prompt, options))
    return made


LIMITS = Limits(max_tokens=32, max_seqs=4, max_rows=16, max_blocks=32)


@REAL
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("lookup", [False, True])
def test_tokens_are_the_same(
    device: Device, make_rig: MakeRig, layer: Any, rng: np.random.Generator, echo: bool, lookup: bool
) -> None:
    """Each request alone without drafts, against 200 in batches, in chunks, preempted, and with shared prefixes."""
    asked = requests(rng, 200)
    more = {"limits": LIMITS, "tied_embeddings": True}
    plain = make_rig(device, **more)
    wanted = [plain.one(prompt, **options) for prompt, options in asked]
    rig = make_rig(device, num_blocks=40, draft=layer(echo=echo, tied_embeddings=True), lookup=lookup, **more)
    rig.engine._pace.drafts = chance = Chance(rng)
    left, leave = list[Any](), rig.engine._scheduler._leave_cache

    def counted(sequence: Any) -> None:
        left.append(sequence)
        leave(sequence)

    rig.engine._scheduler._leave_cache = counted
    done = rig.arriving(asked, rng)
    for name in ("tokens", "finish_reason", "logprobs"):
        assert [getattr(c, name) for c in done] == [getattr(c, name) for c in wanted], name
    drafted, accepted = (sum(getattr(c.timings, f"{name}_tokens") for c in done) for name in ("drafted", "accepted"))
    print(drafted, accepted, chance.steps)
    assert drafted > 200
    assert lookup or (accepted > drafted / 4 if echo else accepted < drafted / 4)
    assert len(left) > len(asked), "nobody was preempted"
    assert any(c.timings.cached_tokens for c in done)
    assert rig.free_blocks == 40


@REAL
def test_tokens_of_hybrid_models_are_the_same(
    device: Device, make_rig: MakeRig, layer: Any, rng: np.random.Generator
) -> None:
    """States are rolled back where a draft was wrong."""
    asked = requests(rng, 40)
    plain = make_rig(device, limits=LIMITS, state_entries=8, tied_embeddings=True, **HYBRID)
    wanted = [plain.one(prompt, **options) for prompt, options in asked]
    draft = layer(echo=True, tied_embeddings=True, **HYBRID)
    rig = make_rig(device, limits=LIMITS, num_blocks=80, state_entries=8, tied_embeddings=True, draft=draft, **HYBRID)
    rig.engine._pace.drafts = Chance(rng)
    done = rig.arriving(asked, rng)
    assert [c.tokens for c in done] == [c.tokens for c in wanted]
    assert sum(c.timings.drafted_tokens for c in done) > 40


@pytest.mark.parametrize("echo", [False, True])
def test_a_layer_continues_the_tokens_and_states_since_it_began(
    make_rig: MakeRig, layer: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, echo: bool
) -> None:
    """Its first drafted token is that of one step with all tokens since then, each after the model's state before it,
    which another run of the model gives; the others follow from its own states."""
    draft, more = layer(echo=echo, tied_embeddings=True), {"limits": LIMITS, "tied_embeddings": True}
    rig, oracle = make_rig(draft=draft, **more), make_rig(draft=draft, **more)
    rig.engine._pace.drafts = Chance(rng, idle=False)
    drafter, begun = rig.engine.drafter, rig.engine.drafter.draft
    history, seen = list[int](), list[tuple[list[int], int, list[int]]]()
    options = GenerationOptions(max_tokens=110, ignore_eos=True, temperature=0.3, seed=int(rng.integers(99)))
    (sequence,) = rig.engine.preparer.prepare(rng.integers(0, 256, 5).tolist(), options)

    def noted(sequences: Any, size: int) -> Any:
        count, drafts = len(drafter._rows[sequence]), begun(sequences, size)
        if drafter._followed[sequence].length == count:
            history.clear()
        history.extend(range(len(sequence.tokens) - count, len(sequence.tokens)))
        assert len(history) == drafter._followed[sequence].length
        assert history == list(range(history[0], len(sequence.tokens)))
        seen.append((list(history), count, drafts[0]))
        return drafts

    monkeypatch.setattr(drafter, "draft", noted)
    rig.engine.add([sequence])
    rig.finish()
    states = []
    for end in range(1, len(sequence.tokens)):
        step = [SequenceStep(sequence.tokens[end - 1 : end], end, range(32), [0])]
        run(oracle.executable, Step(StepLayout(oracle.program.limits), step, block_size=4))
        states.append(oracle.executable.read("hidden", 1)[0])
    executable = oracle.engine.drafter.executable
    right = 0
    for tokens, _, drafted in seen:
        for begin in range(0, len(tokens), 16):
            part = tokens[begin : begin + 16]
            end = begin + len(part)
            executable.write("state", np.stack([states[at - 1] for at in part]))
            fed = [sequence.tokens[at] for at in part]
            step = [SequenceStep(fed, end, range(2), [len(part) - 1])]
            found = run(executable, Step(StepLayout(executable.program.limits), step)).tolist()[0]
        while len(found) < len(drafted):
            end += 1
            executable.write("state", executable.read("state", 1))
            step = [SequenceStep(found[-1:], end, range(2), [0])]
            found += run(executable, Step(StepLayout(executable.program.limits), step)).tolist()[0]
        right += found == drafted
    assert right >= 0.9 * len(seen)  # a tie may be broken by a rounding
    assert len(seen) > 5
    assert any(count < len(tokens) for tokens, count, _ in seen), "no draft went on from an earlier one"
    if echo:
        assert any(count > 1 for _, count, _ in seen), "no draft was right"


@pytest.mark.parametrize(("accepted", "passes"), [(1, [(4, 5)]), (3, [(1, 7), (3, 8)])])
def test_a_draft_is_one_run_of_the_device_or_two(
    monkeypatch: pytest.MonkeyPatch, accepted: int, passes: list[tuple[int, int]]
) -> None:
    """``passes``: the passes of each run, and the position behind the tokens that its first pass is fed."""
    seen = []

    class Fake:
        def read(self, name: str, rows: int) -> Any:
            return np.zeros((rows, 8), np.float32)

        def write(self, name: str, array: Any) -> None:
            assert (name, len(array)) == ("state", accepted)

    def ran(executable: Any, step: Step, count: int = 1) -> Any:
        begin = step.layout.offsets["seq_len"]
        seen.append((count, int(step.data[begin])))
        fed = step.data[step.layout.offsets["tokens"] :][: step.tokens].tolist()
        assert fed == (sequence.tokens[-accepted:] if len(seen) == 1 else [10])
        return np.arange(10, 10 + count, dtype=np.int32)[:, None] + (len(seen) - 1)

    monkeypatch.setattr("bitnet.core.engine.drafter.run", ran)
    fake: Any = Fake()
    drafter, sequence = Drafter(fake, fake, limits=LIMITS, kv=KVSpec(1, 1, 4, 128, 4)), cast("Any", Talker())
    sequence.tokens = [1, 2, 3, 4]
    drafter.next_rows(1)
    drafter.accepted(sequence, range(1), [4])
    drafter._follow(sequence, 4, 4)
    sequence.tokens += range(5, 5 + accepted)
    drafter.next_rows(accepted)
    drafter.accepted(sequence, range(accepted), sequence.tokens[-accepted:])
    assert drafter.draft([sequence], 4) == [[10, 11, 12, 13]]
    assert seen == passes


def test_sampled_tokens_have_the_models_distribution(make_rig: MakeRig, layer: Any, rng: np.random.Generator) -> None:
    """Pairs of tokens after one prompt, of which the second is drafted; the bound is passed by one run in 10⁷."""
    options, again, chances = {"temperature": 0.7, "top_k": 3, "ignore_eos": True}, 0.0, dict[tuple[int, ...], float]()
    plain = make_rig(tied_embeddings=True)
    while not 0.2 < again < 0.8:  # the layer is right where a token comes again
        prompt, chances = rng.integers(0, 256, 6).tolist(), {}
        for first, chance in _distribution(plain, prompt):
            chances |= {(first, second): chance * of for second, of in _distribution(plain, [*prompt, first])}
        again = sum(chance for (first, second), chance in chances.items() if first == second)
    rig = make_rig(draft=layer(echo=True, tied_embeddings=True), tied_embeddings=True, limits=LIMITS)
    rig.engine._pace.drafts = Chance(rng)
    count = 1200
    options |= {"max_tokens": 3}
    done = [c for _ in range(count // 4) for c in rig.run([prompt], n=4, seed=int(rng.integers(1 << 62)), **options)]
    found: dict[tuple[int, ...], int] = {}
    for completion in done:
        found[completion.tokens[:2]] = found.get(completion.tokens[:2], 0) + 1
    assert set(found) <= set(chances)
    frequent = {pair: chance for pair, chance in chances.items() if chance * count >= 5}
    rare = 1 - sum(frequent.values())
    bins = [(found.get(pair, 0), chance * count) for pair, chance in frequent.items()]
    bins += [(count - sum(seen for seen, _ in bins), rare * count)] if rare * count >= 1 else []
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in bins)
    print(statistic, bins)
    assert statistic < 50  # of eight degrees of freedom at most
    assert sum(c.timings.accepted_tokens for c in done) > count / 20


def _distribution(rig: Any, prompt: list[int]) -> list[tuple[int, float]]:
    """The three likeliest next tokens, and their chances among themselves."""
    (entry,) = rig.one(prompt, max_tokens=1, logprobs=3, ignore_eos=True).logprobs
    chances = np.exp([logprob / 0.7 for _, logprob in entry.top])
    return list(zip([token for token, _ in entry.top], (chances / chances.sum()).tolist(), strict=True))


def simulated(cost: float, making: float, chance: float, steps: int = 1500) -> float:
    """Tokens a second relative to none drafted, where a layer is right with a ``chance``: a drafted token costs
    ``cost`` of a plain step to verify, and ``making`` to draft."""
    rng, pace, seconds, tokens = np.random.default_rng(1), DraftCosts(), 0.0, 0
    drafter = Drafter(cast("Any", None), cast("Any", None), limits=LIMITS, kv=KVSpec(1, 1, 4, 4))
    sequence: Any = Talker()
    drafter.accepted(sequence, range(1), [0])
    for _ in range(steps):
        expected = drafter.expected([sequence])
        which, size = pace.choose_from([DraftOption([Draft((), 0.0)]), DraftOption(expected, pace.making(1))], 31)
        took, right = rng.uniform(0.9, 1.1), 0
        if which:
            size = min(size, MAX_LAYER_DRAFT)
            pace.made(1, size, made := making * size * rng.uniform(0.9, 1.1))
            verified = (1 + cost * size) * took
            right = int(np.cumprod(rng.random(size) < chance).sum())
            followed = drafter._follow(sequence, 1, size)
            followed.drafted = [0] * right + [1] * (size - right)
            pace.drafted(size, verified)
            took = verified + made
        else:
            drafter.passed_over()
            pace.plain(1, took)
        seconds += took
        tokens += 1 + right
        sequence.tokens += [0] * (1 + right)
        drafter.next_rows(1)
        drafter.accepted(sequence, range(1), [0])
    return tokens / seconds


class Talker:
    """A sequence that may always have a draft, and whose tokens are all 0."""

    def __init__(self) -> None:
        self.tokens = [0]

    def draft_room(self, most: int) -> int:
        return most


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.7, 0.95])
@pytest.mark.parametrize("making", [0.02, 0.2, 1.0])
@pytest.mark.parametrize("cost", [0.05, 0.3, 1.0])
def test_the_pace_is_near_the_best_there_is(cost: float, making: float, chance: float) -> None:
    sizes = [min(size, MAX_LAYER_DRAFT) for size in DRAFT_SIZES]
    rates = [(1 + sum(chance**i for i in range(1, n + 1))) / (1 + (cost + making) * n) for n in sizes]
    found = simulated(cost, making, chance)
    print(chance, cost, making, found, max(1, *rates))
    assert found > max(0.95, 0.88 * max(rates))  # of 1,500 steps; it learns from a few that cost much


def test_a_layer_that_was_wrong_is_tried_again() -> None:
    drafter = Drafter(cast("Any", None), cast("Any", None), limits=LIMITS, kv=KVSpec(1, 1, 4, 4))
    sequence: Any = Talker()
    drafter.accepted(sequence, range(1), [0])
    drafter._follow(sequence, 1, 7).drafted = [1] * 7
    for _ in range(50):
        sequence.tokens.append(0)
        drafter.accepted(sequence, range(1), [0])
        drafter._follow(sequence, 1, 7).drafted = [1] * 7
    (draft,) = drafter.expected([sequence])
    assert draft.probability < 0.05
    for _ in range(4000):
        drafter.passed_over()
    (draft,) = drafter.expected([sequence])
    assert draft.probability > 0.9
    other: Any = Talker()
    drafter.accepted(other, range(1), [0])
    assert drafter.expected([other])[0].probability > 0.9
    assert not drafter._followed, "the other one was forgotten"


@pytest.fixture
def of_the_demo(tmp_path: Path) -> Path:
    """A draft layer for the demo model: its last layer again, fed with the model's states."""
    demo = GGUFFile(default_model_path())
    width, last = 384, 9
    tensors: dict[str, Any] = {}
    for name, tensor in demo.tensors.items():
        if name.startswith(f"blk.{last}."):
            raw = demo.data(tensor).copy()
            tensors[f"blk.{last + 1}.{name.removeprefix(f'blk.{last}.')}"] = TensorSource(
                tensor.shape, tensor.type, raw
            )
    both = np.concatenate([np.zeros((width, width), np.int8), np.eye(width, dtype=np.int8)], axis=1)
    start = f"blk.{last + 1}.nextn."
    tensors[f"{start}eh_proj.weight"] = TensorSource(both.shape, GGMLType.I2_S, i2s_bytes(both, 1.0))
    tensors |= {f"{start}{name}.weight": np.ones(width, np.float32) for name in ("enorm", "hnorm")}
    write_gguf(path := tmp_path / "layer.gguf", {"general.architecture": "bitnet-b1.58"}, tensors)
    return path


def test_load_model(of_the_demo: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    """Answers are those without, the layer's memory is freed, and wrong files are errors of the model."""
    asked = [{"role": "user", "content": "Tell me about a fox."}]
    with load_model(device="cpu") as plain, load_model(device="cpu", draft=of_the_demo) as model:
        engine = cast("Any", model)._worker.engine
        engine._pace.drafts = Chance(rng, idle=False)
        for options in ({}, {"temperature": 0.8, "seed": 3}, {"logprobs": 1}):
            wanted = plain.chat(asked, max_tokens=60, **cast("Any", options))
            found = model.chat(asked, max_tokens=60, **cast("Any", options))
            assert (found.tokens, found.logprobs) == (wanted.tokens, wanted.logprobs)
            assert found.timings.drafted_tokens
    with pytest.raises(DeviceError, match="closed"):
        engine.drafter.executable.stats()
    for wrong, message in ((tmp_path / "none.gguf", "none.gguf"), (default_model_path(), "has no draft layer")):
        with pytest.raises(BitNetError, match=message):
            load_model(device="cpu", draft=wrong)
    with pytest.raises(InvalidInputError, match="draft is 7"):
        load_model(device="cpu", draft=cast("Any", 7))
