"""Random models of Qwen3.5's graph (Bonsai 27B): as a GGUF file, and as a folder of Hugging Face's or MLX's.

A GGUF file has value heads tiled by key heads and norms as they multiply; a folder of Hugging Face's has value heads
grouped and norms minus 1; one of MLX's has transforms as a list of modules and signs beside the weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from bitnet.core.gguf import GGMLType, MetadataValue, TensorSource
from bitnet.core.text.words import QWEN35_WORDS
from random_blocks import random_blocks
from random_parts import CHAT_TEMPLATE, SPECIAL, chat_tokenizer, normal, vocabulary
from random_shapes import HybridShape, Shape


class Part(NamedTuple):
    """A weight: its names in GGUF files and in folders, what it is, and its shape in GGUF files."""

    gguf: str
    folder: str
    kind: Literal["ternary", "norm", "plain norm", "conv", "small", "rate", "bias"]
    shape: tuple[int, ...]


def parts(shape: HybridShape) -> Iterator[Part]:
    """Every weight in the order of the forward pass."""
    hidden, queries, keys = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = [
        ("attn_q", "self_attn.q_proj", "ternary", (2 * queries, hidden)),
        ("attn_k", "self_attn.k_proj", "ternary", (keys, hidden)),
        ("attn_v", "self_attn.v_proj", "ternary", (keys, hidden)),
        ("attn_output", "self_attn.o_proj", "ternary", (hidden, queries)),
        ("attn_q_norm", "self_attn.q_norm", "norm", (shape.head_dim,)),
        ("attn_k_norm", "self_attn.k_norm", "norm", (shape.head_dim,)),
    ]
    recurrent = [
        ("attn_qkv", "linear_attn.in_proj_qkv", "ternary", (shape.mixed, hidden)),
        ("attn_gate", "linear_attn.in_proj_z", "ternary", (shape.values, hidden)),
        ("ssm_out", "linear_attn.out_proj", "ternary", (hidden, shape.values)),
        ("ssm_conv1d", "linear_attn.conv1d", "conv", (shape.mixed, shape.taps)),
        ("ssm_alpha", "linear_attn.in_proj_a", "small", (shape.v_heads, hidden)),
        ("ssm_beta", "linear_attn.in_proj_b", "small", (shape.v_heads, hidden)),
        ("ssm_norm", "linear_attn.norm", "plain norm", (shape.state,)),
        ("ssm_dt.bias", "linear_attn.dt_bias", "bias", (shape.v_heads,)),
        ("ssm_a", "linear_attn.A_log", "rate", (shape.v_heads,)),
    ]
    rest = [
        ("attn_norm", "input_layernorm", "norm", (hidden,)),
        ("post_attention_norm", "post_attention_layernorm", "norm", (hidden,)),
        ("ffn_gate", "mlp.gate_proj", "ternary", (shape.ffn, hidden)),
        ("ffn_up", "mlp.up_proj", "ternary", (shape.ffn, hidden)),
        ("ffn_down", "mlp.down_proj", "ternary", (hidden, shape.ffn)),
    ]
    yield Part("token_embd", "model.embed_tokens", "ternary", (shape.vocab, hidden))
    for layer in range(shape.layers):
        for gguf, folder, kind, size in (attention if shape.attends(layer) else recurrent) + rest:
            yield Part(f"blk.{layer}.{gguf}", f"model.layers.{layer}.{folder}", kind, size)  # type: ignore[arg-type]
    yield Part("output_norm", "model.norm", "norm", (hidden,))
    if not shape.tied:
        yield Part("output", "lm_head", "ternary", (shape.vocab, hidden))


def metadata(shape: HybridShape, seed: int) -> dict[str, MetadataValue]:
    """The keys of a GGUF file."""
    keys: dict[str, MetadataValue] = {
        "context_length": shape.context,
        "embedding_length": shape.hidden,
        "block_count": shape.layers,
        "feed_forward_length": shape.ffn,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "full_attention_interval": shape.interval,
        "rope.dimension_count": shape.rotary,
        "rope.dimension_sections": np.array(sections(shape), np.int32),
        "rope.freq_base": shape.rope_theta,
        "ssm.conv_kernel": shape.taps,
        "ssm.state_size": shape.state,
        "ssm.group_count": shape.k_heads,
        "ssm.time_step_rank": shape.v_heads,
        "ssm.inner_size": shape.values,
    }
    return {
        "general.architecture": "qwen35",
        "general.name": f"random-{shape.layers}x{shape.hidden}",
        "general.quantization_version": 2,
        **{f"qwen35.{key}": value for key, value in keys.items()},
        **(transforms(shape, seed) if shape.block else {}),
        **chat_tokenizer(shape.vocab, "qwen35"),
    }


def sections(shape: HybridShape) -> list[int]:
    """How many of the rotated pairs take each coordinate of an image's position; for text all are the same."""
    pairs = shape.rotary // 2
    return [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3, 0]


def signs(shape: HybridShape, seed: int) -> dict[int, npt.NDArray[np.int32]]:
    """The signs of rows of each width that a product has."""
    rng = np.random.default_rng([seed, 1])
    widths = sorted({shape.hidden, shape.heads * shape.head_dim, shape.values, shape.ffn})
    return {width: rng.choice(np.array([-1, 1], np.int32), width) for width in widths}


def transforms(shape: HybridShape, seed: int) -> dict[str, MetadataValue]:
    """The keys of folded transforms."""
    drawn = signs(shape, seed)
    products = [part.gguf for part in parts(shape) if part.kind == "ternary" and part.gguf != "token_embd"]
    values: dict[str, MetadataValue] = {
        "version": 1,
        "block_size": shape.block or 0,
        "transform": "normalized-sylvester-walsh-hadamard",
        "axis": "input-last-dimension",
        "sign_mode": "explicit",
        "sign_widths": np.array(list(drawn), np.int32),
        "sign_values": np.concatenate(list(drawn.values())),
        "weight_names": [f"{name}.weight" for name in products],
        "inverse_weight_names": ["token_embd.weight"],
        "gdn_v_grouped": True,
    }
    return {f"prism.hadamard.{key}": value for key, value in values.items()}


def tensors(shape: HybridShape, seed: int) -> Iterator[tuple[str, TensorSource]]:
    """Every tensor of a GGUF file, each from a random stream of its own."""
    every = list(parts(shape))
    for part, stream in zip(every, np.random.SeedSequence(seed).spawn(len(every)), strict=True):
        rng = np.random.default_rng(stream)
        name = part.gguf if part.kind in ("rate", "bias") else f"{part.gguf}.weight"
        yield name, _tensor(part, rng, shape)


def _tensor(part: Part, rng: np.random.Generator, shape: HybridShape) -> TensorSource:
    if part.kind == "ternary":
        return random_blocks(rng, part.shape[0], part.shape[1], shape.encoding)
    if part.kind == "small":
        values = rng.normal(0, part.shape[1] ** -0.5, part.shape).astype(np.float32)
        return TensorSource(part.shape, GGMLType.BF16, (values.view(np.uint32) >> 16).astype(np.uint16))
    if part.kind == "rate":
        return TensorSource(part.shape, GGMLType.F32, -rng.uniform(0.5, 8, part.shape).astype(np.float32))
    means = {"bias": (-3.0, 1.0), "conv": (0.0, part.shape[-1] ** -0.5)}
    return normal(rng, part.shape, *means.get(part.kind, (1.0, 0.1)), np.float32)


def write_folder(path: Path, shape: HybridShape, seed: int, kind: Literal["hf", "mlx"]) -> None:
    """Write a folder of floats (``hf``) or of codes and scales (``mlx``), in groups of 128; codes have 2 bits, or 1 bit
    if the shape's encoding is Q1_0.

    Folders of Hugging Face's have no transforms, whatever ``shape`` says; those of MLX's have them if it says so.
    """
    path.mkdir(parents=True, exist_ok=True)
    config = _config(shape)
    arrays: dict[str, tuple[str, npt.NDArray[Any]]] = {}
    drawn = signs(shape, seed)
    every = list(parts(shape))
    bits = 1 if shape.encoding is GGMLType.Q1_0 else 2
    prefix = "language_model." if kind == "mlx" else ""
    for part, stream in zip(every, np.random.SeedSequence(seed).spawn(len(every)), strict=True):
        rng = np.random.default_rng(stream)
        name = prefix + part.folder + ("" if part.kind in ("rate", "bias") else ".weight")
        if part.kind != "ternary":
            arrays[name] = ("F32", _folder_floats(part, rng, mlx=kind == "mlx"))
            continue
        n, k = part.shape
        codes = rng.integers(0, 3 if bits == 2 else 2, (n, k), np.uint8)
        scales = ((1.5 / k) ** 0.5 * rng.uniform(0.5, 1.5, (n, k // 128))).astype(np.float16)
        if kind == "hf":
            arrays[name] = ("F16", (codes.astype(np.float16) - 1) * scales.repeat(128, axis=1))
            continue
        words = codes.reshape(n, -1, 32 // bits).astype(np.uint32) << np.arange(0, 32, bits, dtype=np.uint32)
        base = name.removesuffix(".weight")
        arrays[name] = ("U32", np.bitwise_or.reduce(words, axis=2))
        arrays[f"{base}.scales"], arrays[f"{base}.biases"] = ("F16", scales * (3 - bits)), ("F16", -scales)
        if shape.block:
            arrays[f"{base}.signs"] = ("F32", drawn[k].astype(np.float32))
    if kind == "mlx":
        config = {"model_type": "qwen3_5", "text_config": config}
        config["quantization"] = {"bits": bits, "group_size": 128, "mode": "affine"}
        if shape.block:
            module = {"block": shape.block, "dtype": "float16"}
            config |= {
                "model_type": "prism_hadamard_qwen35",
                "schema_version": 2,
                "tensor_namespace": "mlx-vlm-qwen3_5",
                "gdn_activation_layout": "grouped",
                "modules": [
                    {"path": part.folder, "embedding": part.gguf == "token_embd", **module}
                    for part in every
                    if part.kind == "ternary"
                ],
            }
    (path / "config.json").write_text(json.dumps(config))
    write_tokenizer(path, shape, QWEN35_WORDS)
    write_safetensors(path / "model.safetensors", arrays)


def _folder_floats(part: Part, rng: np.random.Generator, *, mlx: bool) -> npt.NDArray[np.float32]:
    if part.kind == "rate":
        return np.log(rng.uniform(0.5, 8, part.shape)).astype(np.float32)
    spread = {"bias": (-3.0, 1.0), "conv": (0.0, part.shape[-1] ** -0.5), "small": (0.0, part.shape[-1] ** -0.5)}
    mean, deviation = spread.get(part.kind, (0.0 if part.kind == "norm" and not mlx else 1.0, 0.1))
    values = rng.normal(mean, deviation, part.shape).astype(np.float32)
    return values[:, :, None] if part.kind == "conv" and mlx else values[:, None] if part.kind == "conv" else values


def _config(shape: HybridShape) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": shape.tied,
        "full_attention_interval": shape.interval,
        "linear_conv_kernel_dim": shape.taps,
        "linear_key_head_dim": shape.state,
        "linear_value_head_dim": shape.state,
        "linear_num_key_heads": shape.k_heads,
        "linear_num_value_heads": shape.v_heads,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": shape.rope_theta,
            "partial_rotary_factor": shape.rotary / shape.head_dim,
            "mrope_section": sections(shape)[:3],
            "mrope_interleaved": True,
        },
    }


def write_tokenizer(path: Path, shape: Shape, words: str) -> None:
    """Write a made-up tokenizer that splits words by the pattern ``words``."""
    tokens, types, merges = vocabulary(shape.vocab, SPECIAL)
    plain = {token: i for i, token in enumerate(tokens) if types[i] == 1}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": t, **flags} for i, t in enumerate(tokens) if types[i] != 1],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": plain, "merges": merges},
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": CHAT_TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def write_safetensors(path: Path, arrays: dict[str, tuple[str, npt.NDArray[Any]]]) -> None:
    """Write arrays by name, with their types as safetensors names them."""
    header, end = {}, 0
    for name, (dtype, array) in arrays.items():
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [end, end := end + array.nbytes]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in arrays.values():
            file.write(np.ascontiguousarray(array).tobytes())
