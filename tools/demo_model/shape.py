"""The shape of the demo model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Sizes, named as in ``bitnet.core.model.config.ModelConfig``. Matrices are a multiple of 128 wide, for I2_S."""

    vocab_size: int = 3072
    hidden_size: int = 384
    layers: int = 10
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    ffn_size: int = 1024
    context_length: int = 1024
    rms_eps: float = 1e-5
    rope_theta: float = 10_000.0
