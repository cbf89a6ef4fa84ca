"""Small random models whose weights depend only on a seed, so that golden files need to hold only logits.

Needs numpy only. The numbers are drawn as integers from numpy's frozen legacy generator and scaled by powers of two, so
every platform and every numpy makes the same ones.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

FOLDER = Path(__file__).parents[1] / "tests" / "oracle" / "golden"
PROMPTS = (1, 7, 40, 129, 600)
"""Tokens of the prompts of each model."""

CONTINUED = 8
"""Greedy tokens after each prompt."""


@dataclass(frozen=True)
class Recurrent:
    """Layers of Gated DeltaNet, all but each ``interval``-th, with ``k_heads`` of q and k, and ``v_heads`` of v."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    taps: int = 4
    interval: int = 4

    @property
    def keys(self) -> int:
        return self.k_heads * self.k_dim

    @property
    def values(self) -> int:
        return self.v_heads * self.v_dim

    def at(self, layer: int) -> bool:
        """Whether a layer is recurrent."""
        return (layer + 1) % self.interval != 0


@dataclass(frozen=True)
class GoldenModel:
    """A model's shape and the seed of its weights.

    Attributes:
        family: ``bitnet`` has sub-norms (BitNet b1.58 2B4T with ``relu2``, the 1bitLLM models with ``silu``); ``llama``
            has none (Falcon3 and Llama 3 at 1.58 bits); ``qwen3`` has norms of q's and k's heads instead, ``qwen2``
            biases of q, k and v, ``olmo`` LayerNorms without weights; ``minicpm`` has ``scales`` (BitCPM4).
            ``qwen35`` has ``recurrent`` layers, gates of the attention's result, and heads of which the first
            ``rotated`` elements turn; a ``block`` means that inputs of products are transformed (Bonsai 2). ``gemma3``
            has norms of sub-layers' results, and scaled embeddings (BitNet-embedding 270M). ``hunyuan`` has norms of
            q's and k's heads after their rotation (Hy-MT).
        group: Columns of a weight that share a scale (64 or 128 in Ternary-Bonsai, 256 in BitCPM4); None: all of it.
        width: Width of the residual stream; None: that of all heads together.
        linear: Which of transformers' quantised layers computes it: ``bitlinear`` multiplies int8 codes by unpacked
            ternary ones, ``autobitlinear`` multiplies their float forms.
        rope: ``rope_parameters`` besides the base, as in a ``config.json``.
        scales: ``scale_emb``, ``scale_depth`` and ``dim_model_base`` of MiniCPM.
        input_norms: Whether each product has a norm of its own before it (BitNet-embedding).
    """

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    layers: int
    vocab: int = 400
    family: Literal["bitnet", "llama", "qwen3", "qwen2", "olmo", "minicpm", "qwen35", "gemma3", "hunyuan"] = "bitnet"
    activation: Literal["relu2", "silu", "gelu_pytorch_tanh"] = "relu2"
    linear: Literal["bitlinear", "autobitlinear"] = "bitlinear"
    tied: bool = True
    rope_theta: float = 500_000.0
    eps: float = 1e-5
    context: int = 704
    seed: int = 0
    group: int | None = None
    width: int | None = None
    rope: dict[str, Any] | None = None
    scales: tuple[float, float, float] = (1.0, 1.0, 1.0)
    recurrent: Recurrent | None = None
    rotated: int | None = None
    block: int | None = None
    input_norms: bool = False

    @property
    def hidden(self) -> int:
        return self.width or self.heads * self.head_dim

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.npz"

    def weights(self) -> dict[str, Array]:
        """By canonical name: the embedding (and head) in f16, norms and biases in f32, each linear as int8 in
        {-1, 0, 1} with what a weight of +1 stands for at ``<name>.unit``: one f32, or f16 ``[rows, groups]``.

        Value heads of recurrent layers are grouped, as in Hugging Face folders."""
        random = np.random.RandomState(zlib.crc32(self.name.encode()) ^ self.seed)

        def table(*shape: int) -> Array:
            # Small beside what the layers add to it: a tied head would else repeat the last token for ever.
            return (random.randint(-2048, 2049, shape) / 2**14).astype(np.float16)

        def norm(size: int) -> Array:
            return (random.randint(128, 384, size) / 256).astype(np.float32)

        hidden, queries, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        made = {"token_embd": table(self.vocab, hidden)}
        if not self.tied:
            made["output"] = table(self.vocab, hidden)
        if self.family != "olmo":
            made["output_norm"] = norm(hidden)
        shapes = {
            "attn_q": (queries, hidden),
            "attn_k": (kv, hidden),
            "attn_v": (kv, hidden),
            "attn_output": (hidden, queries),
            "ffn_gate": (self.ffn, hidden),
            "ffn_up": (self.ffn, hidden),
            "ffn_down": (hidden, self.ffn),
        }
        norms = {"attn_norm": hidden, "ffn_norm": hidden} if self.family != "olmo" else {}
        if self.family == "bitnet":
            norms |= {"attn_sub_norm": hidden, "ffn_sub_norm": self.ffn}
        if self.family in ("qwen3", "gemma3", "hunyuan"):
            norms |= {"attn_q_norm": self.head_dim, "attn_k_norm": self.head_dim}
        if self.family == "gemma3":
            norms |= {"post_attention_norm": hidden, "post_ffw_norm": hidden}
        if self.input_norms:
            norms |= {f"{name}_norm_in": columns for name, (_, columns) in shapes.items()}
        for layer in range(self.layers):
            if self.family == "qwen35":
                norms, shapes = self._hybrid(layer)
            for name, size in norms.items():
                made[f"blk.{layer}.{name}"] = norm(size)
            if self.recurrent is not None and self.recurrent.at(layer):
                heads, width = self.recurrent.v_heads, 2 * self.recurrent.keys + self.recurrent.values
                floats = {"ssm_conv1d": (width, self.recurrent.taps), "ssm_dt": (heads,), "ssm_a": (heads,)}
                floats |= {"ssm_alpha": (heads, hidden), "ssm_beta": (heads, hidden)}
                for name, shape in floats.items():
                    made[f"blk.{layer}.{name}"] = (random.randint(-1024, 1025, shape) / 2048).astype(np.float32)
                made[f"blk.{layer}.ssm_a"] = -0.03125 - abs(made[f"blk.{layer}.ssm_a"])
            for name, (rows, columns) in shapes.items():
                made[f"blk.{layer}.{name}"] = random.randint(-1, 2, (rows, columns), dtype=np.int8)
                # About 1 / sqrt(columns): outputs keep the size of their inputs.
                size = 2 ** np.ceil(np.log2(columns) / 2)
                if self.group is None:
                    unit = np.array([(1 + random.randint(0, 1024) / 1024) / size], np.float32)
                else:
                    unit = ((1 + random.randint(0, 1024, (rows, columns // self.group)) / 1024) / size).astype(
                        np.float16
                    )
                made[f"blk.{layer}.{name}.unit"] = unit
                if self.family == "qwen2" and name in ("attn_q", "attn_k", "attn_v"):
                    made[f"blk.{layer}.{name}.bias"] = (random.randint(-1024, 1025, rows) / 1024).astype(np.float32)
        return made

    def _hybrid(self, layer: int) -> tuple[dict[str, int], dict[str, tuple[int, int]]]:
        """Sizes of the norms, and shapes of the products, of a layer of ``qwen35``."""
        hidden, queries, kv, net = (
            self.hidden,
            self.heads * self.head_dim,
            self.kv_heads * self.head_dim,
            self.recurrent,
        )
        assert net is not None
        norms = {"attn_norm": hidden, "post_attention_norm": hidden}
        if net.at(layer):
            norms |= {"ssm_norm": net.v_dim}
            shapes = {"attn_qkv": (2 * net.keys + net.values, hidden), "attn_gate": (net.values, hidden)}
            shapes |= {"ssm_out": (hidden, net.values)}
        else:
            norms |= {"attn_q_norm": self.head_dim, "attn_k_norm": self.head_dim}
            shapes = {"attn_q": (2 * queries, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden)}
            shapes |= {"attn_output": (hidden, queries)}
        shapes |= {"ffn_gate": (self.ffn, hidden), "ffn_up": (self.ffn, hidden), "ffn_down": (hidden, self.ffn)}
        return norms, shapes

    def signs(self, width: int) -> Array:
        """The signs of transformed rows of this width, 1 and -1."""
        random = np.random.RandomState(width + (self.block or 0))
        signs: Array = (2 * random.randint(0, 2, width) - 1).astype(np.float32)
        return signs

    def prompt(self, length: int, among: Array, attempt: int) -> Array:
        """A prompt of tokens ``among`` some; ``attempt`` numbers different ones of the same length."""
        random = np.random.RandomState(7919 * length + attempt)
        return among[random.randint(0, len(among), length)].astype(np.int32)


def _bonsai(name: str, **shape: Any) -> GoldenModel:
    return GoldenModel(name, family="qwen3", activation="silu", rope_theta=1e6, eps=1e-6, **shape)


def _qwen2(name: str, **shape: Any) -> GoldenModel:
    return GoldenModel(name, family="qwen2", activation="silu", rope_theta=1e6, eps=1e-6, vocab=160, **shape)


def _olmo(name: str, **shape: Any) -> GoldenModel:
    return GoldenModel(name, family="olmo", activation="silu", rope_theta=1e4, vocab=160, **shape)


def _minicpm(name: str, **shape: Any) -> GoldenModel:
    return GoldenModel(
        name, family="minicpm", activation="silu", rope_theta=1e4, scales=(12.0, 1.4, 64.0), vocab=160, **shape
    )


def _embedding(name: str, **shape: Any) -> GoldenModel:
    return _bonsai(name, input_norms=True, vocab=160, **shape)


def _gemma(name: str, **shape: Any) -> GoldenModel:
    return GoldenModel(
        name,
        family="gemma3",
        activation="gelu_pytorch_tanh",
        rope_theta=1e6,
        eps=1e-6,
        vocab=160,
        input_norms=True,
        **shape,
    )


def _hunyuan(name: str, **shape: Any) -> GoldenModel:
    return GoldenModel(name, family="hunyuan", activation="silu", rope_theta=1e4, vocab=160, **shape)


def _bonsai_2(name: str, **shape: Any) -> GoldenModel:
    given: dict[str, Any] = {
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
        "ffn": 384,
        "layers": 3,
        "width": 128,
        "rotated": 16,
    }
    given |= {"rope_theta": 1e7, "eps": 1e-6, "vocab": 160, "tied": False, "group": 128}
    return GoldenModel(name, family="qwen35", activation="silu", **(given | shape))


def _longrope(pairs: int, original: int) -> dict[str, Any]:
    """Factors that grow from pair to pair."""
    short, long = (np.linspace(1, most, pairs, dtype=np.float32).tolist() for most in (2, 30))
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
    }


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}

_NTK = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0}

MODELS = (
    GoldenModel("bitnet-gqa1", heads=4, kv_heads=4, head_dim=64, ffn=324, layers=2),
    GoldenModel("bitnet-gqa4", heads=8, kv_heads=2, head_dim=32, ffn=384, layers=2, linear="autobitlinear"),
    GoldenModel("bitnet-gqa8", heads=8, kv_heads=1, head_dim=32, ffn=256, layers=3, vocab=331),
    GoldenModel("bitnet-silu", heads=3, kv_heads=3, head_dim=80, ffn=320, layers=2, activation="silu", rope_theta=1e4),
    GoldenModel(
        "llama", heads=4, kv_heads=2, head_dim=64, ffn=384, layers=2, family="llama", activation="silu", tied=False
    ),
    GoldenModel("one-layer-gqa1", heads=4, kv_heads=4, head_dim=128, ffn=640, layers=1),
    GoldenModel("one-layer-gqa4", heads=12, kv_heads=3, head_dim=64, ffn=1024, layers=1),
    GoldenModel("one-layer-gqa8", heads=8, kv_heads=1, head_dim=96, ffn=772, layers=1, linear="autobitlinear"),
    GoldenModel(
        "one-layer-llama", heads=6, kv_heads=2, head_dim=64, ffn=512, layers=1, family="llama", activation="silu"
    ),
    _bonsai("qwen3-g64", heads=4, kv_heads=2, head_dim=64, ffn=448, layers=2, group=64, width=192, tied=False, seed=2),
    _bonsai("qwen3-g128", heads=4, kv_heads=1, head_dim=64, ffn=640, layers=2, group=128, width=384),
    _bonsai("one-layer-qwen3", heads=8, kv_heads=2, head_dim=32, ffn=512, layers=1, group=128, width=128),
    _bonsai(
        "qwen3-yarn",
        heads=4,
        kv_heads=2,
        head_dim=64,
        ffn=320,
        layers=2,
        group=64,
        width=192,
        vocab=160,
        seed=1,
        rope=_YARN,
    ),
    GoldenModel(
        "one-layer-llama-yarn",
        heads=6,
        kv_heads=2,
        head_dim=64,
        ffn=512,
        layers=1,
        vocab=160,
        family="llama",
        activation="silu",
        rope=_YARN | {"factor": 11.0, "beta_fast": 24.0, "beta_slow": 2.0, "attention_factor": 1.5},
    ),
    _minicpm("minicpm", heads=6, kv_heads=2, head_dim=32, ffn=320, layers=3, rope=_longrope(16, 256)),
    _minicpm(
        "minicpm-g256",
        heads=4,
        kv_heads=2,
        head_dim=64,
        ffn=512,
        layers=2,
        group=256,
        tied=False,
        seed=5,
        rope=_longrope(32, 1024),
    ),
    _qwen2("qwen2", heads=6, kv_heads=2, head_dim=32, ffn=320, layers=2),
    _qwen2("qwen2-g64", heads=4, kv_heads=4, head_dim=64, ffn=448, layers=2, group=64, tied=False, seed=4),
    _qwen2("one-layer-qwen2", heads=7, kv_heads=1, head_dim=64, ffn=512, layers=1),
    _olmo("olmo", heads=4, kv_heads=4, head_dim=48, ffn=320, layers=2),
    _olmo("olmo-g128", heads=4, kv_heads=2, head_dim=64, ffn=512, layers=2, group=128, tied=False),
    _olmo("one-layer-olmo", heads=6, kv_heads=6, head_dim=64, ffn=640, layers=1, linear="autobitlinear"),
    _bonsai_2("qwen35", recurrent=Recurrent(2, 4, 32, 64, interval=3), group=64),
    _bonsai_2(
        "qwen35-odd", recurrent=Recurrent(1, 3, 68, 64, 3, interval=2), head_dim=32, rotated=20, heads=12, group=64
    ),
    _bonsai_2("qwen35-even-heads", recurrent=Recurrent(3, 3, 20, 128, 5, interval=3), kv_heads=4, width=192, group=64),
    _bonsai_2("qwen35-hadamard", recurrent=Recurrent(2, 6, 64, 64, interval=3), block=128),
    _bonsai_2(
        "qwen35-two-layers",
        recurrent=Recurrent(2, 6, 16, 128, interval=2),
        block=32,
        layers=2,
        head_dim=128,
        rotated=64,
    ),
    _embedding("embedding-qwen3", heads=6, kv_heads=2, head_dim=48, ffn=416, layers=2, width=164),
    _embedding("one-layer-embedding-qwen3", heads=4, kv_heads=1, head_dim=64, ffn=640, layers=1, width=192),
    _gemma("embedding-gemma3", heads=4, kv_heads=1, head_dim=64, ffn=420, layers=2, width=160),
    _gemma("one-layer-embedding-gemma3", heads=3, kv_heads=3, head_dim=96, ffn=512, layers=1, width=132),
    _hunyuan("hunyuan", heads=4, kv_heads=1, head_dim=64, ffn=416, layers=2, width=192, rope=_NTK),
    _hunyuan("hunyuan-g64", heads=6, kv_heads=2, head_dim=64, ffn=448, layers=2, group=64, width=192, tied=False),
    _hunyuan("hunyuan-odd", heads=3, kv_heads=3, head_dim=80, ffn=320, layers=2, linear="autobitlinear"),
    _minicpm("one-layer-minicpm", heads=8, kv_heads=1, head_dim=64, ffn=768, layers=1, group=256),
)


def checksum(weights: dict[str, Array]) -> int:
    """CRC-32 over all weights, so that a golden file made from others is noticed as such."""
    total = 0
    for name in sorted(weights):
        total = zlib.crc32(np.ascontiguousarray(weights[name]).tobytes(), zlib.crc32(name.encode(), total))
    return total
