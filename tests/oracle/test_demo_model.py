"""The demo model's training code: what PyTorch computes in training is what a device computes from the exported file.

Runs where torch is: ``uvx --with tox-uv tox -e oracle``.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bitnet.core import load_model
from demo_model import tokens
from demo_model.export import export
from demo_model.shape import Shape

torch = pytest.importorskip("torch", reason="torch is not installed; tox -e oracle has it")

if True:  # after the check that it is there
    from demo_model.model import BitLinear, DemoModel, absmax_int8, absmean_ternary
    from demo_model.train import write_weights

SHAPE = Shape(layers=1, context_length=256)


@pytest.fixture
def seed() -> int:
    """New in every run; a failing test prints it."""
    return secrets.randbits(31)


@pytest.mark.parametrize(("layers", "median"), [(1, 1e-5), (3, 0.03)])
def test_the_exported_file_gives_the_logits_of_training(tmp_path: Path, seed: int, layers: int, median: float) -> None:
    """In one layer, what a token gives to others depends on codes made of the embedding alone, which both round alike.

    In more, an int8 code on a rounding border now and then falls to the other side, and later tokens see it.
    """
    torch.manual_seed(seed)
    model = DemoModel(replace(SHAPE, layers=layers))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.mul_(torch.rand_like(parameter) + 0.5)
        model.token_embd.copy_(model.token_embd.half().float())  # as the file stores it
    tokens.train(SHAPE.vocab_size, seed=1, count=4_000).save(str(tmp_path / "tokenizer.json"))
    write_weights(model, tmp_path / "weights.npz")
    export(tmp_path, tmp_path / "model.gguf")
    ids = np.random.default_rng(seed).integers(6, SHAPE.vocab_size, 200).tolist()
    with torch.no_grad():
        logits = model(torch.tensor([ids]))[0, :-1].double()
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
    with load_model(tmp_path / "model.gguf", device="cpu", kv_dtype="f32") as loaded:
        error = np.abs(loaded.score(ids) - expected)
    assert np.median(error) < median
    assert error.max() < 0.5


def test_quantisers_round_and_pass_gradients_through(seed: int) -> None:
    torch.manual_seed(seed)
    weight = torch.randn(64, 128, requires_grad=True)
    codes, scale = absmean_ternary(weight)
    assert set(codes.unique().tolist()) == {-1, 0, 1}
    assert float(scale) == pytest.approx(float(weight.detach().abs().mean()))
    codes.sum().backward()
    assert torch.allclose(weight.grad, torch.full_like(weight, 1 / float(scale)))
    q, unit = absmax_int8(torch.randn(5, 128) * 9)
    assert torch.equal(q, q.round())
    assert torch.equal(q.abs().amax(-1), torch.full((5,), 127.0))
    assert unit.shape == (5, 1)


def test_a_layer_is_its_dequantised_product_and_keeps_the_order_of_its_matrices(seed: int) -> None:
    torch.manual_seed(seed)
    layer = BitLinear(128, {"attn_q": 64, "attn_k": 32, "attn_v": 32})
    assert list(layer.weights) == ["attn_q", "attn_k", "attn_v"]
    x = torch.randn(7, 128)
    parts = []
    q, unit = absmax_int8(x)
    for weight in layer.weights.values():
        codes, scale = absmean_ternary(weight)
        parts.append((q * unit).double() @ (codes * scale).double().T)
    expected = torch.cat(parts, dim=-1)
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        error = (layer(x, dtype).double() - expected).abs().max() / expected.abs().max()
        assert float(error) < bound


def test_training_lowers_the_loss(seed: int) -> None:
    torch.manual_seed(seed)
    model = DemoModel(SHAPE)
    batch = torch.randint(6, 40, (2, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        loss = model.loss(batch, torch.ones_like(batch, dtype=torch.bool))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 1
