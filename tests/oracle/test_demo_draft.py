"""The training of the demo model's draft layer: what PyTorch computes is what a device computes from the written file.

Runs where torch is: ``uvx --with tox-uv tox -e oracle``.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet.core.cpu.backend import BACKEND
from bitnet.core.gguf.ternary import unpack_ternary
from bitnet.core.hal import Executable, Limits, OpenOptions, SequenceStep, Step, StepLayout, run
from bitnet.core.model import ModelFile, open_model
from bitnet.core.model.draft import build_draft_program, open_draft
from demo_model import tokens
from demo_model.export import export
from demo_model.shape import Shape

torch = pytest.importorskip("torch", reason="torch is not installed; tox -e oracle has it")

if True:  # after the check that it is there
    from torch.nn import functional as F

    from demo_model.draft import LATER, DraftLayer, draft_loss, frozen
    from demo_model.model import DemoModel
    from demo_model.train import Optimizer, write_weights

SHAPE = Shape(layers=1, context_length=256)
LIMITS = Limits(max_tokens=64, max_rows=64, max_blocks=8)


@pytest.fixture(scope="module")
def seed() -> int:
    """New in every run; a failing test prints it."""
    number = secrets.randbits(31)
    print("seed", number)
    torch.manual_seed(number)
    return number


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, seed: int) -> ModelFile:
    """A model with random weights."""
    folder = tmp_path_factory.mktemp("model")
    tokens.train(SHAPE.vocab_size, seed=1, count=2_000).save(str(folder / "tokenizer.json"))
    write_weights(_shaken(DemoModel(SHAPE)), folder / "weights.npz")
    export(folder, folder / "model.gguf")
    return open_model(folder / "model.gguf")


@pytest.fixture
def layer(seed: int) -> DraftLayer:
    return _shaken(DraftLayer(SHAPE))


def _shaken(module: Any) -> Any:
    """A module whose norms have random weights."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name:
                parameter.mul_(torch.rand_like(parameter) + 0.5)
    return module


def _vocabulary(file: ModelFile) -> Any:
    return file.metadata["tokenizer.ggml.tokens"]


@pytest.fixture
def executable(tmp_path: Path, file: ModelFile, layer: DraftLayer) -> Executable:
    """The program of the layer's file."""
    layer.write(tmp_path / "draft.gguf", _vocabulary(file))
    draft = open_draft(tmp_path / "draft.gguf", file)
    assert draft.planes == 1
    program = build_draft_program(draft, file.weights, limits=LIMITS, num_blocks=8, kv_dtype="f32")
    return BACKEND.open(BACKEND.probe().devices[0], OpenOptions()).compile(program)


def test_a_device_drafts_as_the_layer_is_trained(
    file: ModelFile, layer: DraftLayer, executable: Executable, seed: int
) -> None:
    """After each of 40 tokens, three drafted ones: states and logits, each to a few roundings of an int8 code.

    Then the next token is fed with the model's state, in the place of what was drafted there.
    """
    rng, model, count = np.random.default_rng(seed), frozen(file), 40
    ids = rng.integers(6, SHAPE.vocab_size, count + 3)
    states = rng.normal(0, 1, (count, SHAPE.hidden_size)).astype(np.float32)
    with torch.no_grad():
        table = model.token_embd
        embedded = [table[torch.from_numpy(ids[ahead : ahead + count])][None] for ahead in range(3)]
        drafted = layer.unrolled(embedded, torch.from_numpy(states)[None], torch.zeros(1, count, dtype=torch.long))
        expected = [(state[0].numpy(), F.linear(state[0], table).numpy()) for state in drafted]
    errors = []
    for position in range(count):
        fed = states[position : position + 1]
        for ahead in range(3):
            executable.write("state", fed)
            end = position + ahead + 1
            step = [SequenceStep([int(ids[end - 1])], end, range(8), [0])]
            run(executable, Step(StepLayout(LIMITS), step))
            fed = executable.read("state", 1)
            for name, exact in zip(("state", "logits"), expected[ahead], strict=True):
                found = executable.read(name, 1)[0]
                errors.append(np.abs(found - exact[position]).max() / np.abs(exact[position]).max())
    print(np.median(errors), max(errors))
    assert np.median(errors) < 0.02
    assert max(errors) < 0.15


def test_the_frozen_model_has_the_numbers_of_its_file(file: ModelFile) -> None:
    model = frozen(file)
    for name, (codes, scale) in model.ternary().items():
        weight: Any = file.weights[name]
        data = weight.load()
        assert float(scale) == pytest.approx(float(data.scale[0]), rel=1e-5)
        np.testing.assert_array_equal(codes.numpy(), unpack_ternary(data.codes, weight.shape[1]))
    for name, tensor in model.dense().items():
        dense: Any = file.weights[name]
        np.testing.assert_array_equal(tensor.numpy(), dense.load().astype(np.float32))


def test_the_loss_counts_what_could_be_drafted_in_each_answer(file: ModelFile, layer: DraftLayer, seed: int) -> None:
    """Against each answer by itself, token by token."""
    rng, model, depth = np.random.default_rng(seed), frozen(file), 3
    ids = torch.from_numpy(rng.integers(6, SHAPE.vocab_size, (2, 48)))
    taught = torch.zeros(2, 48, dtype=torch.bool)
    answers = [(0, 5, 12), (0, 13, 14), (0, 20, 48), (1, 0, 9), (1, 30, 33)]
    for row, begin, end in answers:
        taught[row, begin:end] = True
    with torch.no_grad():
        states = model.hidden(ids)
        wanted = F.linear(states, model.token_embd)
        losses = [list[float]() for _ in range(depth)]
        hits = [list[bool]() for _ in range(depth)]
        for row, begin, end in answers:
            first = max(begin, 1)
            before = states[None, row, first - 1 : end - 1]
            padded = F.pad(ids[row], (0, depth))
            embedded = [model.token_embd[padded[first + a : end + a]][None] for a in range(depth)]
            found = layer.unrolled(embedded, before, torch.zeros(1, end - first, dtype=torch.long))
            for position in range(first, end):
                right = True
                for ahead in range(depth):
                    if position + ahead + 1 >= end:
                        break
                    target = wanted[row, position + ahead].softmax(-1)
                    logits = F.linear(found[ahead][0, position - first], model.token_embd)
                    losses[ahead].append(float(-(target * logits.log_softmax(-1)).sum()))
                    right &= int(logits.argmax()) == int(target.argmax())
                    hits[ahead].append(right)
                    right &= int(target.argmax()) == int(ids[row, position + ahead + 1])
        total, shares = draft_loss(layer, model, ids, taught, depth, torch.float32)
    expected = sum(float(np.mean(part)) * LATER**ahead for ahead, part in enumerate(losses))
    assert float(total) == pytest.approx(expected, rel=1e-3)
    assert shares.tolist() == pytest.approx([float(np.mean(part)) for part in hits], abs=0.03)


def test_training_lowers_the_loss_and_leaves_the_model(file: ModelFile, layer: DraftLayer, seed: int) -> None:
    model = frozen(file)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    batch = torch.randint(6, 40, (2, 48))
    optimizer = Optimizer(layer, 3e-3)
    losses = []
    for _ in range(8):
        loss, _ = draft_loss(layer, model, batch, torch.ones_like(batch, dtype=torch.bool), 3, torch.float32)
        optimizer.step(loss, 0.1)
        losses.append(float(loss.detach()))
    print(losses)
    assert losses[-1] < losses[0] - 0.5  # the rest is the entropy of what a random model says
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_an_exported_models_tokenizer_is_the_trained_one(file: ModelFile) -> None:
    trained = tokens.load(file.path.parent / "tokenizer.json")
    merges: Any = file.metadata["tokenizer.ggml.merges"]
    again = tokens.of_vocabulary(_vocabulary(file), merges)
    for text in ("What is 17 + 25?", " a  b\n\n2", "naïve “quotes” 日本 😀", "I'll it's\tTAB", "<|eot_id|>"):
        assert again.encode(text).ids == trained.encode(text).ids, text
    assert again.decode(again.encode("A fox.").ids) == "A fox."
