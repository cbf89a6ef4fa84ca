"""Matrices with scales are decoded and packed a few rows at a time, so that loading needs no second copy of one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet.core import load_model
from bitnet.core.cpu import lowering
from bitnet.core.gguf import GGMLType
from bitnet.core.gguf.ternary import load_ternary
from bitnet.core.model import weights
from bitnet.core.reference import ReferenceDevice
from make_random_model import make_model
from random_shapes import PRESETS, HybridShape

_PRESET = PRESETS["bonsai-27b-small"]
assert isinstance(_PRESET, HybridShape)
HYBRID = _PRESET
SHAPES = {
    "tables and layers": replace(HYBRID, encoding=GGMLType.PTQ1_0, vocab=700),
    "one bit": replace(HYBRID, encoding=GGMLType.Q1_0, vocab=700),
    "experts": replace(PRESETS["maple-small"], layers=2),
}


@pytest.mark.parametrize("encoding", [GGMLType.Q1_0, GGMLType.PQ2_0])
def test_binary_weights_take_one_bit(encoding: GGMLType, tmp_path: Path) -> None:
    make_model(tmp_path / "m.gguf", replace(HYBRID, encoding=encoding))
    with load_model(tmp_path / "m.gguf", device="cpu", context=64, threads=1) as model:
        model.generate([5, 6], max_tokens=1)
        (executable,) = (replica.executable for replica in model._replicas)
        kernels = executable.kernels
    products = {name for name in kernels if name.startswith(("binary_matmul_", "group_matmul_"))}
    one_bit = encoding is GGMLType.Q1_0 and model.device.details["level"] not in ("avx2", "scalar", "simd128")
    assert {name.partition("_")[0] for name in products} == {"binary" if one_bit else "group"}


@pytest.mark.parametrize("name", SHAPES)
def test_a_matrix_is_never_decoded_whole(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path / "m.gguf", SHAPES[name])
    decoded: list[int] = []

    def counted(dtype: GGMLType, shape: tuple[int, int], *args: Any, **options: Any) -> Any:
        decoded.append(shape[0] * shape[1])
        return load_ternary(dtype, shape, *args, **options)

    def answer() -> list[tuple[int, float]]:
        with load_model(tmp_path / "m.gguf", device="cpu", context=64, threads=1) as model:
            rows = model.generate([5, 6, 7], max_tokens=12, ignore_eos=True, logprobs=1).logprobs
            assert rows is not None
            return [(row.token, row.logprob) for row in rows]

    monkeypatch.setattr(weights, "load_ternary", counted)
    whole = answer()
    largest = max(decoded)
    decoded.clear()
    monkeypatch.setattr(lowering, "PACKED_AT_A_TIME", largest // 4)
    assert answer() == whole
    assert max(decoded) < largest  # only queries with gates are, to be taken apart
    assert sum(decoded) >= largest
    with load_model(tmp_path / "m.gguf", device=ReferenceDevice(), context=64) as model:
        scores = model.score([5, 6, 7, *(token for token, _ in whole)], start=3)
    np.testing.assert_allclose([logprob for _, logprob in whole], scores, atol=0.05)
