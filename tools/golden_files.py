"""Golden models as GGUF files, with the keys, names and order of rows that llama.cpp's converter gives them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from bitnet.core.gguf import GGMLType, TensorSource, i2s_bytes, write_gguf
from golden_models import Array, GoldenModel, Recurrent

ARCHITECTURES = {"bitnet": "bitnet-b1.58", "hunyuan": "hunyuan-dense"}
"""What files call a family, where that is not its name."""
REORDERED = ("llama", "minicpm", "olmo")
"""Architectures whose files have the rows of q and k in an order that makes a rotated pair neighbours."""
BLOCKS = {64: GGMLType.Q2_0, 128: GGMLType.Q2_0_G128, 256: GGMLType.TQ2_0}
"""Types of blocks with a scale each, by their columns."""


def write_golden(model: GoldenModel, path: Path) -> None:
    """Write a model; tables that are to be scaled are f32, so that nothing is rounded."""
    weights = model.weights()
    tensors: dict[str, Any] = {}
    for name, array in weights.items():
        unit = weights.get(f"{name}.unit")
        if name.endswith(".unit"):
            continue
        if name.endswith(".bias"):
            tensors[name] = array
            continue
        if model.recurrent is not None and (tiled := _tiled(model, name.rpartition(".")[2], array, unit)) is not None:
            whole = name.endswith(".ssm_a")  # this one has no suffix, and a bias has its own
            tensors[name if whole else f"{name}.bias" if name.endswith(".ssm_dt") else f"{name}.weight"] = tiled
            continue
        if unit is None:
            tensors[f"{name}.weight"] = array.astype(np.float32) if model.family == "minicpm" else array
            continue
        heads = {"attn_q": model.heads, "attn_k": model.kv_heads}.get(name.rpartition(".")[2])
        order = _neighbours(len(array), heads) if heads and model.family in REORDERED else np.arange(len(array))
        tensors[f"{name}.weight"] = _ternary(array[order], unit if unit.size == 1 else unit[order])
    keys, factors = _rope(model)
    write_gguf(path, _metadata(model, keys), tensors | factors)


def _tiled(model: GoldenModel, name: str, array: Array, unit: Array | None) -> Any:
    """A tensor of a recurrent layer with its value heads in the order of files; None for other tensors."""
    net = model.recurrent
    assert net is not None
    heads = np.arange(net.v_heads).reshape(net.k_heads, -1).T.reshape(-1)
    values = (heads[:, None] * net.v_dim + np.arange(net.v_dim)).reshape(-1)
    if name in ("ssm_alpha", "ssm_beta", "ssm_dt", "ssm_a"):
        return array[heads]
    if name == "ssm_norm":
        return array
    if name in ("attn_qkv", "ssm_conv1d"):
        values = np.concatenate([np.arange(2 * net.keys), 2 * net.keys + values])
    if name in ("attn_qkv", "ssm_conv1d", "attn_gate"):
        return array[values] if unit is None else _ternary(array[values], unit[values])
    if name != "ssm_out" or model.block is not None:
        return None
    assert unit is not None
    assert net.v_dim % 64 == 0  # columns move with the scales of their groups
    group = array.shape[1] // unit.shape[1]
    return _ternary(array[:, values], unit[:, values[::group] // group])


def _neighbours(rows: int, heads: int) -> Array:
    """Rows in the order of files: row ``i`` of the first half of a head, then row ``i`` of its second half."""
    order: Array = np.arange(rows).reshape(heads, 2, -1).transpose(0, 2, 1).reshape(-1)
    return order


def _ternary(weights: Array, unit: Array) -> TensorSource:
    if unit.shape == (1,):
        return TensorSource(weights.shape, GGMLType.I2_S, i2s_bytes(weights, float(unit[0])))
    group = weights.shape[1] // unit.shape[1]
    codes = (weights + 1).astype(np.uint8)
    scales = unit.reshape(-1, 1).astype("<f2").view(np.uint8)
    # Blocks of 256 have weights i, i + 32, … of a half in one byte, the others four neighbours.
    fields = codes.reshape(-1, 4, 32).transpose(1, 0, 2) if group == 256 else codes.reshape(-1, 4).T
    packed = (fields[0] | fields[1] << 2 | fields[2] << 4 | fields[3] << 6).reshape(unit.size, -1)
    parts = [packed, scales] if group == 256 else [scales, packed]
    return TensorSource(weights.shape, BLOCKS[group], np.concatenate(parts, axis=1).reshape(-1))


def _metadata(model: GoldenModel, rope: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {
        "vocab_size": model.vocab,
        "context_length": model.context,
        "embedding_length": model.hidden,
        "block_count": model.layers,
        "feed_forward_length": model.ffn,
        "attention.head_count": model.heads,
        "attention.head_count_kv": model.kv_heads,
        "attention.key_length": model.head_dim,
        "attention.value_length": model.head_dim,
        f"attention.layer_norm_{'' if model.family == 'olmo' else 'rms_'}epsilon": model.eps,
        "rope.dimension_count": model.head_dim,
        "rope.freq_base": model.rope_theta,
        "hidden_activation": model.activation,
        **rope,
    }
    if model.recurrent is not None:
        values |= _hybrid(model, model.recurrent)
    if model.family == "minicpm":
        embedding, depth, base = model.scales
        values |= {
            "embedding_scale": embedding,
            "residual_scale": depth / math.sqrt(model.layers),
            "logit_scale": model.hidden / base,
        }
    if model.family == "gemma3":  # whose files do not name it
        del values["hidden_activation"]
    architecture = ARCHITECTURES.get(model.family, model.family)
    keys = {f"{architecture}.{key}": value for key, value in values.items()}
    return {"general.architecture": architecture, "general.name": model.name, **keys, **_hadamard(model)}


def _hybrid(model: GoldenModel, net: Recurrent) -> dict[str, Any]:
    return {
        "rope.dimension_count": model.rotated,
        "full_attention_interval": net.interval,
        "ssm.conv_kernel": net.taps,
        "ssm.state_size": net.k_dim,
        "ssm.group_count": net.k_heads,
        "ssm.time_step_rank": net.v_heads,
        "ssm.inner_size": net.values,
    }


def _hadamard(model: GoldenModel) -> dict[str, Any]:
    """The keys of a transform that is folded into all products and the head, and undone after the embedding."""
    if model.block is None or model.recurrent is None:
        return {}
    widths = sorted({model.hidden, model.heads * model.head_dim, model.ffn, model.recurrent.values})
    keys = {
        "version": 1,
        "block_size": model.block,
        "transform": "normalized-sylvester-walsh-hadamard",
        "axis": "input-last-dimension",
        "sign_mode": "explicit",
        "sign_widths": np.array(widths, np.int32),
        "sign_values": np.concatenate([model.signs(width) for width in widths]).astype(np.int32),
        "weight_names": [f"{n.removesuffix('.unit')}.weight" for n in model.weights() if n.endswith(".unit")]
        + ["output.weight"],
        "inverse_weight_names": ["token_embd.weight"],
        "gdn_v_grouped": True,
    }
    return {f"prism.hadamard.{key}": value for key, value in keys.items()}


def _rope(model: GoldenModel) -> tuple[dict[str, Any], dict[str, Array]]:
    """Keys and tensors of a rotary scaling that is given as in a ``config.json``."""
    rope = model.rope or {}
    original = {"rope.scaling.original_context_length": rope.get("original_max_position_embeddings")}
    if rope.get("rope_type") == "longrope":
        factors = {name: np.array(rope[f"{name}_factor"], np.float32) for name in ("short", "long")}
        tensors = {f"rope_factors_{name}.weight": values for name, values in factors.items()}
        return {"rope.scaling.type": "longrope", **original}, tensors
    if rope.get("rope_type") == "yarn":
        keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"], **original}
        for key in {"beta_fast", "beta_slow"} & {*rope}:
            keys[f"rope.scaling.yarn_{key}"] = rope[key]
        if "attention_factor" in rope:  # a GGUF file's multiplies the one that follows from `factor`
            keys["rope.scaling.attn_factor"] = rope["attention_factor"] / (1 + 0.1 * math.log(rope["factor"]))
        return keys, {}
    if "alpha" in rope:  # llama.cpp's converter puts it into the base
        base = model.rope_theta * rope["alpha"] ** (model.head_dim / (model.head_dim - 2))
        return {"rope.freq_base": base, "rope.scaling.type": "none", "rope.scaling.factor": 1.0}, {}
    return {}, {}
