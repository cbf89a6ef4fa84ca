"""Reads what only Qwen3.5's folders have: nested configurations, recurrent layers, and transforms in MLX's packs.

In these folders value heads are grouped by key heads; GGUF files have them tiled
(:class:`~bitnet.core.model.delta_net.DeltaNet`). Hugging Face's norms are stored minus 1, except those of recurrent
layers' results; MLX's are not. The shape of a convolution tells who wrote a folder: Hugging Face has ``[C, 1, taps]``,
MLX ``[C, taps, 1]``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from bitnet.core.errors import ModelFileError, brief
from bitnet.core.gguf import GGMLType, MetadataValue, TensorSource
from bitnet.core.gguf.ternary import GROUP, pack_codes, unpack_ternary
from bitnet.core.hal import TernaryData, TernaryWeight
from bitnet.core.model.delta_net import INTERVAL, MAX_LAYERS, DeltaNet, delta_faults, recurrent_layers
from bitnet.core.model.hadamard import AXIS, PREFIX, TRANSFORM, VERSION
from bitnet.core.model.safetensors import Stored

LAYER_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
"""GGUF names of tensors that other families do not have, or have by another name."""
PARAMETERS = {"linear_attn.dt_bias": "ssm_dt.bias", "linear_attn.A_log": "ssm_a"}
"""GGUF names of vectors whose names end in no ``.weight``."""
_PREFIXES = (("model.language_model.", "model."), ("language_model.model.", "model."), ("language_model.", ""))
_UNUSED = ("model.visual.", "visual.", "vision_tower.", "mtp.", "model.mtp.")
_KEYS = {
    "k_dim": "linear_key_head_dim",
    "v_dim": "linear_value_head_dim",
    "k_heads": "linear_num_key_heads",
    "v_heads": "linear_num_value_heads",
    "taps": "linear_conv_kernel_dim",
}
_PLUS_ONE = ("attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm", "output_norm")
"""Norms that Hugging Face stores minus 1."""


class Reader(Protocol):
    """The parts of :class:`~bitnet.core.model.hf_config.HFConfig` that are needed here."""

    @property
    def values(self) -> dict[str, Any]: ...
    def error(self, key: str, message: str) -> ModelFileError: ...
    def integer(self, key: str, default: int | None = None) -> int: ...


def flattened(values: dict[str, Any], error: Callable[[str, str], ModelFileError]) -> dict[str, Any]:
    """The configuration of the language model within one of several models."""
    text = values.get("text_config")
    if text is None:
        return values
    if not isinstance(text, dict):
        raise error("text_config", f"is {brief(text)}, not an object.")
    outer = {key: value for key, value in values.items() if key not in ("text_config", "vision_config")}
    inner = {key: value for key, value in text.items() if key not in ("architectures", "model_type")}
    tied = {key: outer[key] for key in ("tie_word_embeddings",) if key in outer}
    return outer | inner | tied


def read_layers(config: Reader, layers: int, width: int) -> DeltaNet:
    """The recurrent layers of a folder; see :func:`~bitnet.core.model.delta_net.delta_faults` for ``width``."""
    if config.values.get("attn_output_gate") is False:
        raise config.error("attn_output_gate", "false is not supported.")
    if layers > MAX_LAYERS:
        raise config.error("num_hidden_layers", f"is {layers}; the limit is {MAX_LAYERS}.")
    which, kinds = "layer_types", config.values.get("layer_types")
    if kinds is None:
        which = "full_attention_interval"
        recurrent = recurrent_layers(layers, config.integer(which, INTERVAL))
    else:
        known = {"linear_attention": True, "full_attention": False}
        if not isinstance(kinds, list) or len(kinds) != layers or not all(str(kind) in known for kind in kinds):
            raise config.error(which, f"is {brief(kinds)}; {layers} of {' or '.join(known)} are expected.")
        recurrent = tuple(known[kind] for kind in kinds)
    net = DeltaNet(recurrent, **{name: config.integer(key) for name, key in _KEYS.items()})
    for wrong, message in delta_faults(net, width):
        raise config.error(_KEYS.get(wrong, which), message)
    return net


def layer_keys(net: DeltaNet) -> dict[str, MetadataValue]:
    """The GGUF keys of recurrent layers, without the architecture's prefix."""
    intervals = [
        n for n in range(2, len(net.recurrent) + 1) if recurrent_layers(len(net.recurrent), n) == net.recurrent
    ]
    which: dict[str, MetadataValue] = (
        {"full_attention_interval": intervals[0]}
        if intervals
        else {"attention.recurrent_layers": np.array(net.recurrent)}
    )
    return which | {
        "ssm.conv_kernel": net.taps,
        "ssm.state_size": net.k_dim,
        "ssm.group_count": net.k_heads,
        "ssm.time_step_rank": net.v_heads,
        "ssm.inner_size": net.value_width,
    }


def plain_name(name: str) -> str | None:
    """A tensor's name as in a model of text alone; None for parts that bitnet does not run (images, further tokens)."""
    for prefix, plain in _PREFIXES:
        if name.startswith(prefix):
            name = plain + name.removeprefix(prefix)
            break
    return None if name.startswith(_UNUSED) else name


def mlx_wrote(stored: Mapping[str, Stored]) -> bool:
    """Whether the convolutions of a folder have MLX's order."""
    shapes = [tensor.shape for name, tensor in stored.items() if name.endswith(".ssm_conv1d.weight")]
    return any(len(shape) == 3 and shape[2] == 1 for shape in shapes)


def in_gguf_order(net: DeltaNet, name: str, weight: TernaryWeight, *, grouped_out: bool) -> TernaryWeight:
    """A ternary matrix with its value heads tiled; ``ssm_out``'s stay if ``grouped_out``.

    Raises:
        ValueError: Groups of ``ssm_out``'s columns that share a scale are wider than a value head, or across two.
    """
    part = name.rpartition(".")[2]
    if net.v_heads == net.k_heads or (part == "ssm_out" and grouped_out):
        return weight
    if part == "ssm_out":
        group = weight.group
        if group is not None and net.v_dim % group:
            raise ValueError(f"has a scale for each {group} columns, so value heads of {net.v_dim} cannot be reordered")

        def columns() -> TernaryData:
            codes, scale = weight.load()
            n, heads = weight.shape[0], net.grouped_heads
            if net.v_dim % GROUP == 0:
                codes = codes.reshape(n, net.v_heads, -1)[:, heads].reshape(n, -1)
            else:
                plain = unpack_ternary(codes, weight.shape[1]).reshape(n, net.v_heads, -1)[:, heads]
                codes = pack_codes((plain.reshape(n, -1) + 1).view(np.uint8))
            if group is not None:
                scale = scale.reshape(n, net.v_heads, -1)[:, heads].reshape(n, -1)
            return TernaryData(codes, scale)

        return replace(weight, load=columns, rows=None)
    order = _row_order(net, part)
    if order is None:
        return weight

    def rows() -> TernaryData:
        codes, scale = weight.load()
        return TernaryData(codes[order], scale if weight.group is None else scale[order])

    return replace(weight, load=rows, rows=None)


def _row_order(net: DeltaNet, part: str) -> npt.NDArray[np.int64] | None:
    """The rows of a tensor in GGUF order; None: as they are."""
    if part in ("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"):
        return net.grouped_heads
    if part not in ("attn_qkv", "attn_gate", "ssm_conv1d"):
        return None
    values = (net.grouped_heads[:, None] * net.v_dim + np.arange(net.v_dim)).reshape(-1)
    keys = 0 if part == "attn_gate" else net.conv_width - net.value_width
    return np.concatenate([np.arange(keys), values + keys])


def floats_in_gguf_order(net: DeltaNet, name: str, source: TensorSource, *, mlx: bool) -> TensorSource:
    """Floats as GGUF files have them: in order, norms plus 1, and decay rates for their logarithms. They become F32."""
    part = name.removesuffix(".bias").rpartition(".")[2]
    shape = source.shape
    if part == "ssm_conv1d" and len(shape) == 3:
        shape = (shape[0], shape[1 if mlx else 2])
    order = _row_order(net, part) if shape and shape[0] in (net.v_heads, net.value_width, net.conv_width) else None
    plus_one = part in _PLUS_ONE and not mlx
    if order is None and not plus_one and part not in ("ssm_a", "ssm_conv1d"):
        return source

    def data() -> tuple[npt.NDArray[np.float32]]:
        pieces = source.data() if callable(source.data) else [source.data]
        values = np.concatenate([np.asarray(piece, np.float32).reshape(-1) for piece in pieces]).reshape(shape)
        if order is not None:
            values = values[order]
        if plus_one:
            values = values + np.float32(1)
        if part == "ssm_a":
            values = -np.exp(values)
        return (np.ascontiguousarray(values, np.float32),)

    return TensorSource(shape, GGMLType.F32, data)


def transforms(config: Reader, stored: dict[str, Stored], names: Callable[[str], str]) -> dict[str, MetadataValue]:
    """The ``prism.hadamard`` keys of an MLX pack with transforms, from its list of modules; takes its signs out of
    ``stored``, whose keys are GGUF names. ``names`` gives a module's GGUF name.

    Raises:
        ModelFileError: The pack's description has a value whose meaning is not known, or signs are missing.
    """
    values = config.values
    for key, known in (("schema_version", (1, 2)), ("gdn_activation_layout", ("grouped", None))):
        if values.get(key) not in known:
            raise config.error(key, f"is {brief(values.get(key))}; supported are {known}.")
    modules = values.get("modules")
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise config.error("modules", f"is {brief(modules)}, not a list of modules with transforms.")
    blocks: set[int] = set()
    signs: dict[int, npt.NDArray[np.float32]] = {}
    weights: list[str] = []
    inverse: list[str] = []
    for module in modules:
        path, block = module.get("path"), module.get("block")
        if not isinstance(path, str) or type(block) is not int or block < 0:
            raise config.error("modules", f"has {brief(module)}, without a path and a block.")
        if not block:
            continue
        blocks.add(block)
        name = names(path)
        (inverse if module.get("embedding") else weights).append(f"{name}.weight")
        tensor = stored.pop(f"{name}.signs", None)
        if tensor is None:
            raise config.error("modules", f"has {brief(path)}, but there is no tensor of its signs.")
        if tensor.dtype != "F32" or len(tensor.shape) != 1:
            raise tensor.error(f"is {tensor.dtype} {tensor.shape}; signs are a vector of F32.")
        found = tensor.bytes().view("<f4")
        if not np.array_equal(signs.setdefault(len(found), found), found):
            raise tensor.error("differs from those of another module of the same width, which is not supported.")
    if len(blocks) != 1:
        raise config.error("modules", f"has blocks of {brief(sorted(blocks))}; one size is supported.")
    return {
        f"{PREFIX}.version": VERSION,
        f"{PREFIX}.block_size": blocks.pop(),
        f"{PREFIX}.transform": TRANSFORM,
        f"{PREFIX}.axis": AXIS,
        f"{PREFIX}.sign_mode": "explicit",
        f"{PREFIX}.sign_widths": np.array(list(signs), np.int32),
        f"{PREFIX}.sign_values": np.concatenate(list(signs.values())).astype(np.int32),
        f"{PREFIX}.weight_names": weights,
        f"{PREFIX}.inverse_weight_names": inverse,
        f"{PREFIX}.gdn_v_grouped": True,
    }
