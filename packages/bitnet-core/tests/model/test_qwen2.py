"""Model files of Qwen2's shape: biases of q, k and v, in files with one scale a matrix and with scales of groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bitnet.core import load_model
from bitnet.core.cli import main
from bitnet.core.errors import ModelFileError
from bitnet.core.gguf import GGMLType, TensorSource
from bitnet.core.gguf.blocks import encode_blocks
from bitnet.core.hal import AddBias, Limits, RopeAppend, TernaryMatmul
from bitnet.core.model.program import build_program

PARTS = {"attn_q": 128, "attn_k": 64, "attn_v": 64}


@pytest.fixture(params=[None, 64], ids=["I2_S", "Q2_0"])
def qwen2(request: pytest.FixtureRequest, tiny: Callable[..., Any]) -> Any:
    """The small model with biases instead of sub-norms; in Q2_0 with a scale for each 64 columns."""
    model, rng, group = tiny("qwen2"), np.random.default_rng(), request.param
    for layer in range(2):
        for name in ("attn_sub_norm", "ffn_sub_norm"):
            del model.tensors[f"blk.{layer}.{name}.weight"]
        for name, size in PARTS.items():
            model.tensors[f"blk.{layer}.{name}.bias"] = rng.normal(size=size).astype(np.float32)
    for name, codes in model.codes.items():
        if group is None:
            model.scales[name] = float(np.float16(rng.uniform(0.05, 0.2)))
            model.i2s(name)
            continue
        scales = rng.uniform(0.05, 0.2, codes.size // group).astype(np.float16)
        blocks = encode_blocks(GGMLType.Q2_0, (codes + 1).astype(np.uint8).reshape(-1, group), scales)
        model.tensors[f"{name}.weight"] = TensorSource(codes.shape, GGMLType.Q2_0, blocks.reshape(-1))
    model.metadata["tokenizer.ggml.pre"] = "qwen2"
    return model


def test_the_biases_stand_before_the_rotation(qwen2: Any) -> None:
    """One vector for the stacked products, in their order."""
    file = qwen2.open()
    assert (file.config.rope_style, file.config.activation, file.config.qkv_biases) == ("neox", "silu", True)
    program = build_program(file.config, file.weights, limits=Limits(4, max_blocks=2), num_blocks=2)
    kinds = [type(op) for op in program.ops]
    assert kinds.count(AddBias) == 2
    for at, op in enumerate(program.ops):
        if isinstance(op, AddBias):
            before, after = program.ops[at - 1], program.ops[at + 1]
            assert isinstance(before, TernaryMatmul)
            assert isinstance(after, RopeAppend)
            layer = before.weights[0].removesuffix("attn_q")
            expected = np.concatenate([qwen2.tensors[f"{layer}{part}.bias"] for part in PARTS])
            np.testing.assert_array_equal(program.weights[op.bias].load(), expected)
    assert not any(name.endswith(("attn_q.bias", "attn_k.bias", "attn_v.bias")) for name in program.weights)


def test_devices_agree_and_the_biases_count(qwen2: Any) -> None:
    """Log-probabilities of a text: a code on a rounding border moves them a little, a bias that is left out by ones."""
    tokens, scores = np.random.default_rng().integers(0, 256, 60).tolist(), []
    path = qwen2.write()
    for device in ("cpu", "cpu:numpy"):
        with load_model(path, device=device) as model:
            scores.append(model.score(tokens))
    apart = abs(scores[0] - scores[1])
    for name in PARTS:
        qwen2.tensors[f"blk.1.{name}.bias"] *= np.float32(0)
    with load_model(qwen2.write(), device="cpu") as model:
        without = abs(model.score(tokens) - scores[0])
    print(f"medians: devices {np.median(apart):.4f}, without biases {np.median(without):.4f}")
    assert 5 * np.median(apart) < np.median(without)


@pytest.mark.parametrize("wrong", ["missing", "shape", "type", "unknown"])
def test_biases_that_cannot_be(qwen2: Any, wrong: str) -> None:
    name = "blk.1.attn_k.bias"
    if wrong == "missing":
        del qwen2.tensors[name]
    elif wrong == "shape":
        qwen2.tensors[name] = np.zeros(63, np.float32)
    elif wrong == "type":
        qwen2.tensors[name] = TensorSource((64,), GGMLType.I32, np.zeros(64, np.int32))
    else:
        name = "blk.1.attn_output.bias"
        qwen2.tensors[name] = np.zeros(128, np.float32)
    with pytest.raises(ModelFileError) as caught:
        qwen2.open()
    assert caught.value.field == f"tensor {name!r}"


def test_inspect_tells(qwen2: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(qwen2.write())]) == 0
    said = capsys.readouterr().out
    assert "Qwen2 at 1.58 bits" in said
    assert "biases of q, k and v" in said
    assert "blk.1.attn_v.bias" in said
