"""Model files of OLMo's shape: norms without weights that subtract the mean first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bitnet.core import load_model
from bitnet.core.cli import main
from bitnet.core.errors import ModelFileError
from bitnet.core.hal import CenterRows, Limits, NormQuant, NormRows
from bitnet.core.model.program import build_program


@pytest.fixture
def olmo(tiny: Callable[..., Any]) -> Any:
    model = tiny("olmo")
    for name in [name for name in model.tensors if "norm" in name]:
        del model.tensors[name]
    model.metadata["olmo.attention.layer_norm_epsilon"] = model.metadata.pop("olmo.attention.layer_norm_rms_epsilon")
    model.metadata["tokenizer.ggml.pre"] = "olmo"
    return model


def test_every_norm_of_the_stream_is_centred(olmo: Any) -> None:
    file = olmo.open()
    assert (file.config.rope_style, file.config.activation, file.config.layer_norms) == ("interleaved", "silu", True)
    program = build_program(file.config, file.weights, limits=Limits(4, max_blocks=2), num_blocks=2)
    centred = [op for op in program.ops if isinstance(op, CenterRows)]
    assert [(op.x, op.out) for op in centred] == [("x", "centered")] * 5
    for at, op in enumerate(program.ops):
        if isinstance(op, CenterRows):
            norm = program.ops[at + 1]
            assert isinstance(norm, NormQuant | NormRows)
            assert norm.x == op.out
            assert norm.weight is not None
            np.testing.assert_array_equal(program.weights[norm.weight].load(), np.ones(128, np.float32))


def test_devices_agree_and_an_offset_is_not_seen(olmo: Any) -> None:
    """Log-probabilities of texts; a number added to all of an embedding's columns leaves them as they are.

    The texts are short: a code beside a rounding border may differ, and through attention all that follows in its text.
    """
    texts, scores = np.random.default_rng().integers(0, 256, (15, 6)).tolist(), []
    for name in olmo.codes:
        olmo.scales[name] = 0.1
        olmo.i2s(name)
    table = olmo.tensors["token_embd.weight"].astype(np.float32)
    olmo.tensors["output.weight"] = table
    for offset, device in ((0, "cpu"), (0, "cpu:numpy"), (0.5, "cpu")):
        olmo.tensors["token_embd.weight"] = table + np.float32(offset)
        with load_model(olmo.write(), device=device) as model:
            scores.append(np.concatenate([model.score(text) for text in texts]))
    assert scores[0].std() > 0.5
    for other in scores[1:]:
        assert np.median(abs(other - scores[0])) < 1e-3


def test_limited_projections_are_refused(olmo: Any) -> None:
    olmo.metadata["olmo.attention.clamp_kqv"] = 0.0
    olmo.open()
    olmo.metadata["olmo.attention.clamp_kqv"] = 8.0
    with pytest.raises(ModelFileError, match="bitnet does not clamp") as caught:
        olmo.open()
    assert caught.value.field == "metadata 'olmo.attention.clamp_kqv'"


def test_a_norm_with_weights_is_another_model(olmo: Any) -> None:
    olmo.tensors["output_norm.weight"] = np.ones(128, np.float32)
    with pytest.raises(ModelFileError, match="not part of the architecture olmo"):
        olmo.open()


def test_inspect_tells(olmo: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(olmo.write())]) == 0
    said = capsys.readouterr().out
    assert "OLMo at 1.58 bits" in said
    assert "LayerNorms without weights" in said
