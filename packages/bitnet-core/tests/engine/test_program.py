"""The program builder: the program of each architecture, and the rotary tables against float64."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bitnet.core.hal import (
    Attention,
    DenseMatmul,
    Embed,
    GluNormQuant,
    KVSpec,
    Limits,
    NormQuant,
    RopeAppend,
    TernaryMatmul,
)
from bitnet.core.model.rope import ROPE_PIECE, rope_tables


def test_sub_norms_and_activation(make_rig: Callable[..., Any]) -> None:
    for sub_norms, activation in ((True, "relu2"), (True, "silu"), (False, "silu")):
        ops = make_rig(layers=2, sub_norms=sub_norms, activation=activation, tied_embeddings=sub_norms).program.ops
        norms = [op.weight for op in ops if isinstance(op, NormQuant)]
        sub = [None, None] if not sub_norms else ["blk.0.attn_sub_norm", "blk.1.attn_sub_norm"]
        assert norms == ["blk.0.attn_norm", sub[0], "blk.0.ffn_norm", "blk.1.attn_norm", sub[1], "blk.1.ffn_norm"]
        glu = [op for op in ops if isinstance(op, GluNormQuant)]
        assert [op.activation for op in glu] == [activation] * 2
        assert [op.weight for op in glu] == (["blk.0.ffn_sub_norm", "blk.1.ffn_sub_norm"] if sub_norms else [None] * 2)
        assert [op.weights for op in ops if isinstance(op, TernaryMatmul)][:4] == [
            ("blk.0.attn_q", "blk.0.attn_k", "blk.0.attn_v"),
            ("blk.0.attn_output",),
            ("blk.0.ffn_gate", "blk.0.ffn_up"),
            ("blk.0.ffn_down",),
        ]
        assert [op.layer for op in ops if isinstance(op, RopeAppend | Attention)] == [0, 0, 1, 1]
        (embed,) = (op for op in ops if isinstance(op, Embed))
        (head,) = (op for op in ops if isinstance(op, DenseMatmul))
        assert embed.table == "token_embd"
        assert head.weight == ("token_embd" if sub_norms else "output")


def test_a_tied_head_is_loaded_once(make_rig: Callable[..., Any]) -> None:
    assert "output" not in make_rig(tied_embeddings=True).program.weights
    assert "output" in make_rig(tied_embeddings=False).program.weights


@pytest.mark.parametrize("factors", [None, np.linspace(1, 8, 8, dtype=np.float32)])
def test_rope_tables(factors: Any) -> None:
    config: Any = SimpleNamespace(
        rotated=16, rope_theta=500_000.0, rope_freq_factors=factors, rope_scaling=None, rope_attention_factor=1.0
    )
    cos, sin = rope_tables(config, 4096)
    frequencies = 500_000.0 ** (-np.arange(0, 16, 2) / 16) / (1 if factors is None else factors)
    angles = np.arange(4096)[:, None] * frequencies
    assert cos.dtype == sin.dtype == np.float32
    exponents = np.arange(0, 16, 2, dtype=np.float32) / np.float32(16)
    whole = 1 / np.power(np.float64(500_000.0), exponents).astype(np.float32)
    whole = whole if factors is None else whole / factors
    exact = np.outer(np.arange(4096, dtype=np.float32), whole).astype(np.float64)
    np.testing.assert_array_equal(cos, np.cos(exact).astype(np.float32))  # whatever is computed at a time
    odd, _ = rope_tables(config, ROPE_PIECE + 3)
    np.testing.assert_array_equal(odd, cos[: ROPE_PIECE + 3])
    # Frequencies and angles are rounded to f32: an angle of a is off by up to 2.5 half units in its last place.
    bound = 2.5 * 2.0**-24 * np.maximum(angles, 1)
    assert (np.abs(cos - np.cos(angles)) <= bound).all()
    assert (np.abs(sin - np.sin(angles)) <= bound).all()


def test_kv_bytes(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(layers=2, limits=Limits(8, 1, 1, 4), num_blocks=4, block_size=32)
    kv = rig.program.kv
    assert (kv.layers, kv.kv_heads, kv.head_dim, kv.num_blocks, kv.dtype) == (2, 2, 16, 4, "f16")
    assert KVSpec(30, 5, 128, 128, 32, "f16").bytes == 4096 * 76_800  # 2B4T: 75 KiB a token
    assert KVSpec(30, 5, 128, 128, 32, "f32").bytes == 4096 * 153_600
    assert KVSpec(30, 5, 128, 128, 32, "i8").bytes == 4096 * (38_400 + 1_200)  # codes, and a scale for each row
