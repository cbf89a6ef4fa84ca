"""Shapes of the models that ``make_random_model.py`` writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bitnet.core.gguf import GGMLType


@dataclass(frozen=True)
class Shape:
    """A model's shape; ``head_dim`` times ``heads`` is its attention's width.

    ``group`` makes it Qwen3's, with a scale for each group of 64 or 128 columns, embedding and head among them.
    """

    layers: int = 2
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    ffn: int = 512
    vocab: int = 512
    context: int = 512
    rope_theta: float = 500_000.0
    tied: bool = True
    group: int | None = None

    @property
    def architecture(self) -> str:
        """As ``general.architecture`` names it."""
        return "bitnet-b1.58" if self.group is None else "qwen3"


@dataclass(frozen=True)
class HybridShape(Shape):
    """The shape of a Qwen3.5: every ``interval``-th layer attends, the others are recurrent (Gated DeltaNet).

    ``block`` is the size of the Hadamard transforms that are folded into the weights, None without; ``encoding`` is the
    format of ternary matrices, embedding and head among them.
    """

    interval: int = 4
    k_heads: int = 2
    v_heads: int = 6
    state: int = 128
    taps: int = 4
    rotary: int = 32
    block: int | None = None
    encoding: GGMLType = GGMLType.PQ2_0
    tied: bool = False

    @property
    def architecture(self) -> str:
        return "qwen35"

    @property
    def values(self) -> int:
        """Columns of all value heads."""
        return self.v_heads * self.state

    @property
    def mixed(self) -> int:
        """Columns of all query, key and value heads of a recurrent layer."""
        return 2 * self.k_heads * self.state + self.values

    def attends(self, layer: int) -> bool:
        return (layer + 1) % self.interval == 0


@dataclass(frozen=True)
class HunYuanShape(Shape):
    """The shape of a HunYuan, whose norms of heads come after the rotary embedding; ``encoding`` is the format of
    ternary matrices, which have a scale for each block."""

    encoding: GGMLType = GGMLType.TQ2_0

    @property
    def architecture(self) -> str:
        return "hunyuan-dense"


@dataclass(frozen=True)
class ExpertShape(Shape):
    """The shape of a Maple: ``ffn`` is an expert's width; every ``interval``-th layer attends in full.

    ``encoding`` is the format of ternary matrices, which have a scale for each row, ``table`` that of the embedding and
    the head.
    """

    interval: int = 4
    experts: int = 16
    used: int = 4
    window: int = 24
    rotary: int = 32
    clamp: float | None = 7.0
    encoding: GGMLType = GGMLType.TQ2_0
    table: GGMLType = GGMLType.Q4_K
    tied: bool = False

    @property
    def architecture(self) -> str:
        return "maple"

    def slides(self, layer: int) -> bool:
        """Whether a layer attends to a window."""
        return (layer + 1) % self.interval != 0


PRESETS: Mapping[str, Shape] = {
    "small": Shape(),
    "2b4t": Shape(layers=30, hidden=2560, heads=20, kv_heads=5, head_dim=128, ffn=6912, vocab=128_256, context=4096),
    "bonsai-8b": Shape(
        layers=36,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        ffn=12_288,
        vocab=151_936,
        context=65_536,
        rope_theta=1_000_000.0,
        tied=False,
        group=128,
    ),
    "bonsai-27b": HybridShape(
        layers=64,
        hidden=5120,
        heads=24,
        kv_heads=4,
        head_dim=256,
        ffn=17_408,
        vocab=248_320,
        context=262_144,
        rope_theta=10_000_000.0,
        k_heads=16,
        v_heads=48,
        rotary=64,
        block=1024,
    ),
    "maple": ExpertShape(
        layers=24,
        hidden=2048,
        heads=16,
        kv_heads=4,
        head_dim=128,
        ffn=512,
        vocab=151_936,
        context=131_072,
        rope_theta=10_000.0,
        experts=256,
        used=8,
        window=512,
        rotary=64,
    ),
    "maple-small": ExpertShape(layers=4, ffn=256, context=4096, rope_theta=10_000.0),
    "hunyuan-small": HunYuanShape(kv_heads=1, context=4096, rope_theta=11_158_840.0),
    "bonsai-27b-small": HybridShape(
        layers=4, heads=4, head_dim=128, ffn=512, context=4096, rope_theta=10_000_000.0, block=256
    ),
}
