"""The speed with a draft layer, from a layer of random weights for the demo model: the answers do not change."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import bench_draft
from bitnet.core.engine.pacing import DraftCosts, DraftOption
from bitnet.core.gguf import GGMLType, TensorSource, i2s_bytes, write_gguf
from bitnet.core.gguf.writer import Tensor
from bitnet.core.model.default import default_model_path
from bitnet.core.model.file import open_model


def write_layer(path: Path) -> None:
    """A draft layer that fits the demo model, and predicts nothing."""
    file, rng = open_model(default_model_path()), np.random.default_rng()
    config, tensors = file.config, dict[str, Tensor]()
    prefix = f"blk.{config.layers}."
    for name, weight in file.weights.items():
        if name.startswith("blk.0."):
            tensors[f"{prefix}{name.removeprefix('blk.0.')}.weight"] = _like(rng, weight.shape)
    width = config.hidden_size
    tensors[f"{prefix}nextn.eh_proj.weight"] = _like(rng, (width, 2 * width))
    for name in ("enorm", "hnorm", "shared_head_norm"):
        tensors[f"{prefix}nextn.{name}.weight"] = _like(rng, (width,))
    write_gguf(path, {"general.architecture": config.architecture}, tensors)


def _like(rng: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    if len(shape) == 1:
        return rng.uniform(0.5, 1.5, shape).astype(np.float32)
    return TensorSource(shape, GGMLType.I2_S, i2s_bytes(rng.integers(-1, 2, shape).astype(np.int8), 0.05))


def test_answers_with_and_without_drafts_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_layer(tmp_path / "draft.gguf")

    def always(costs: DraftCosts, options: Sequence[DraftOption], budget: int) -> tuple[int, int]:
        return (1, 3) if len(options) > 1 and costs.token else (0, 0)

    monkeypatch.setattr(DraftCosts, "choose_from", always)  # else a layer that is never right soon drafts no more
    command = ["bench_draft", str(tmp_path / "draft.gguf"), "cpu", "--threads", "1", "--pairs", "1"]
    monkeypatch.setattr(sys, "argv", command)
    bench_draft.main()
    said = capsys.readouterr().out
    print(said)
    assert "OTHER TOKENS" not in said
    found = re.findall(r"drafts of (\d): (\d+) µs, verified in (\d+) µs", said)
    assert [size for size, _, _ in found] == ["1", "3", "7"]
    assert int(found[0][1]) < int(found[2][1]), "seven tokens are drafted in no more time than one"
    for kind in ("stories", "problems"):
        for how in ("greedy", "drawn"):
            assert re.search(rf"{kind}, {how} +\d+\.\d\d x \(least \d+\.\d\d, 1 pairs\); of \d+ tokens", said)
    assert min(map(int, re.findall(r", (\d+) drafted", said))) > 100
