"""The shape of a model, read from the metadata and tensors of its GGUF file."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from bitnet.core.errors import brief
from bitnet.core.gguf import GGUFFile
from bitnet.core.gguf.quants import DECODERS
from bitnet.core.hal.check import MAX_K

Activation = Literal["relu2", "silu"]
RopeStyle = Literal["neox", "interleaved"]

ARCHITECTURES: Mapping[str, RopeStyle] = {
    "bitnet-b1.58": "neox",
    "bitnet-25": "neox",
    "bitnet": "neox",
    "llama": "interleaved",
    "qwen3": "neox",
}
"""Architectures of GGUF files bitnet runs, and how each pairs the elements it rotates. The three BitNet names stand for
one graph (official file, an early converter, llama.cpp); ``llama`` holds Falcon3 and Llama 3 at 1.58 bits, whose
converter reorders the rows of q and k for interleaved pairs; ``qwen3`` holds Ternary-Bonsai."""

MAX_HEAD_DIM = 1024
"""Maximum elements of a head; models have 64 to 256."""
MOST_TIMES_WIDER = 64
"""How much wider than the residual stream all heads together and the feed-forward layer may be; in models it is at most
8 times. A file has this many weights for each of the activations that a step keeps."""

ACTIVATIONS: Mapping[str, Activation] = {"relu2": "relu2", "silu": "silu", "swish": "silu"}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What a program is built from.

    Attributes:
        ffn_size: Width of the feed-forward layer.
        context_length: Positions the model was trained for.
        rope_theta: Base of the rotary frequencies.
        rope_freq_factors: ``f32[head_dim / 2]`` that divide the rotary frequencies, or None.
        sub_norms: Whether there is an RMSNorm before the attention's and the feed-forward's output projections.
        tied_embeddings: Whether the LM head is the embedding table.
        head_norms: Whether each head of q and of k has an RMSNorm before it is rotated.
    """

    architecture: str
    name: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_size: int
    context_length: int
    rms_eps: float
    rope_theta: float
    rope_style: RopeStyle
    rope_freq_factors: npt.NDArray[np.float32] | None
    activation: Activation
    sub_norms: bool
    tied_embeddings: bool
    head_norms: bool = False


_KEYS_OF_SHAPE = {
    "hidden": "embedding_length",
    "heads": "attention.head_count",
    "head_dim": "attention.key_length",
    "ffn": "feed_forward_length",
}


def read_config(file: GGUFFile) -> ModelConfig:
    """The configuration of a model file.

    Raises:
        ModelFileError: The architecture is not supported, or a key is missing, of another type or out of range.
    """
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise file.error(
            f"{brief(architecture)} is not supported; {', '.join(ARCHITECTURES)} are.", key="general.architecture"
        )
    keys = _Keys(file, architecture)
    heads = keys.integer("attention.head_count")
    kv_heads = keys.integer("attention.head_count_kv", heads)
    hidden = keys.integer("embedding_length")
    ffn = keys.integer("feed_forward_length")
    if heads % kv_heads:
        raise keys.error("attention.head_count_kv", f"{kv_heads} does not divide the {heads} heads.")
    if hidden % heads and keys.get("attention.key_length") is None:
        raise keys.error("embedding_length", f"{hidden} is not a multiple of the {heads} heads.")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    for wrong, message in shape_faults(hidden=hidden, heads=heads, head_dim=head_dim, ffn=ffn):
        raise keys.error(_KEYS_OF_SHAPE[wrong], message)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, head_dim) != head_dim:
            raise keys.error(
                key, f"is {brief(keys.get(key))}; other than the head's {head_dim} elements is not supported."
            )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise file.error("is missing or no matrix.", tensor="token_embd.weight")
    name = file.metadata.get("general.name")
    return ModelConfig(
        architecture=architecture,
        name=name if isinstance(name, str) and name else file.path.stem,
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        layers=keys.integer("block_count"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=ffn,
        context_length=keys.integer("context_length"),
        rms_eps=keys.positive("attention.layer_norm_rms_epsilon"),
        rope_theta=keys.positive("rope.freq_base", 10_000.0),
        rope_style=ARCHITECTURES[architecture],
        rope_freq_factors=_freq_factors(keys, head_dim),
        activation=_activation(keys),
        sub_norms="blk.0.attn_sub_norm.weight" in file.tensors,
        tied_embeddings="output.weight" not in file.tensors,
        head_norms="blk.0.attn_q_norm.weight" in file.tensors,
    )


def shape_faults(*, hidden: int, heads: int, head_dim: int, ffn: int) -> Iterator[tuple[str, str]]:
    """The sizes that no model has, and why: anything derived from a size is bounded before it is allocated."""
    if head_dim % 2:
        yield "head_dim", f"heads of {head_dim} elements cannot be rotated in pairs."
    if head_dim > MAX_HEAD_DIM:
        yield "head_dim", f"heads of {head_dim} elements are not supported; {MAX_HEAD_DIM} are the most."
    if hidden > MAX_K:
        yield "hidden", f"{hidden} is more than {MAX_K}, which is not supported."
    for name, width in (("heads", heads * head_dim), ("ffn", ffn)):
        if width > min(MOST_TIMES_WIDER * hidden, MAX_K):
            yield name, f"makes a width of {width}; {min(MOST_TIMES_WIDER * hidden, MAX_K)} is the most for {hidden}."


class _Keys:
    """The keys of one architecture."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def error(self, key: str, message: str) -> Exception:
        return self.file.error(message, key=f"{self.architecture}.{key}")

    def get(self, key: str) -> Any:
        """The value; of an array with one value for each layer, that value if it is the same for all."""
        value = self.file.metadata.get(f"{self.architecture}.{key}")
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            return value[0].item()
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None:
            value = default
        if type(value) is not int or not 0 < value < 2**31:
            raise self.error(key, "is missing." if value is None else f"is {brief(value)}, not a positive integer.")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None:
            value = default
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.error(key, "is missing." if value is None else f"is {brief(value)}, not a positive number.")
        return float(value)

    def choice(self, key: str, known: Collection[str]) -> str | None:
        value = self.get(key)
        if value is not None and not (isinstance(value, str) and value in known):
            raise self.error(key, f"{brief(value)} is not supported; {', '.join(known)} are.")
        return value


def _activation(keys: _Keys) -> Activation:
    """The file's activation; else the one that its architecture is known to use.

    llama.cpp's ``bitnet`` stands for two families, and its files of 2B4T carry no key or ignore it: 1bitLLM's models,
    the only ones with a SentencePiece vocabulary, use SiLU, 2B4T squared ReLU.
    """
    value = keys.choice("hidden_activation", ACTIVATIONS)
    if value is not None:
        return ACTIVATIONS[value]
    tokenizer = keys.file.metadata.get("tokenizer.ggml.model")
    sentencepiece = isinstance(tokenizer, str) and tokenizer == "llama"
    silu = keys.architecture in ("llama", "qwen3") or (keys.architecture == "bitnet" and sentencepiece)
    return "silu" if silu else "relu2"


def _freq_factors(keys: _Keys, head_dim: int) -> npt.NDArray[np.float32] | None:
    """Llama 3.1's factors from their tensor, or a linear scaling as factors that are all the same."""
    scaling = keys.choice("rope.scaling.type", ("none", "linear"))
    factors = np.ones(head_dim // 2, np.float32)
    if scaling == "linear" or keys.get("rope.scale_linear") is not None:
        key = "rope.scaling.factor" if scaling == "linear" else "rope.scale_linear"
        factors *= np.float32(keys.positive(key, 1.0))
    tensor = keys.file.tensors.get("rope_freqs.weight")
    if tensor is not None:
        if tensor.shape != factors.shape or tensor.type.name != "F32":
            raise keys.file.error(
                f"is {tensor.type.name} {tensor.shape}; it must be F32 {factors.shape}.", tensor=tensor.name
            )
        factors *= DECODERS[tensor.type](keys.file.data(tensor))
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise keys.file.error("has factors that are not positive numbers.", tensor="rope_freqs.weight")
    return None if (factors == 1).all() else factors
