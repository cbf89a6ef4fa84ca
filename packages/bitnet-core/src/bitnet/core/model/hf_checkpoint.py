"""Reads a Hugging Face model folder as the metadata and tensors of a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from bitnet.core.errors import InvalidInputError, ModelFileError
from bitnet.core.gguf import GGMLType, MetadataValue, TensorSource, pack_ternary
from bitnet.core.gguf.quants import CHUNK, decode
from bitnet.core.gguf.ternary import load_ternary, pack_codes, transcode
from bitnet.core.gguf.writer import Tensor
from bitnet.core.hal import TernaryData, TernaryWeight
from bitnet.core.model import hf_delta_net, hf_experts, mlx
from bitnet.core.model.delta_net import DeltaNet
from bitnet.core.model.hf_config import HFConfig
from bitnet.core.model.hf_vocabulary import read_vocabulary
from bitnet.core.model.mlx import FLOATS
from bitnet.core.model.recode import TernarySource
from bitnet.core.model.safetensors import Stored, open_checkpoint, read_bytes, read_json
from bitnet.core.model.weights import Expected, expected_weights
from bitnet.core.text.chat import MAX_SOURCE, ChatTemplate

NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "self_attn.attn_sub_norm": "attn_sub_norm",
    "self_attn.inner_attn_ln": "attn_sub_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.ffn_sub_norm": "ffn_sub_norm",
    "mlp.ffn_layernorm": "ffn_sub_norm",
    "mlp.down_proj": "ffn_down",
}
"""GGUF names of a checkpoint's tensors. The alternative names of the sub-norms are from 1bitLLM's code, those of the
norms of heads from HunYuan's."""
Array = TypeVar("Array", bound=npt.NDArray[Any])


def read_folder(folder: Path) -> tuple[dict[str, MetadataValue], dict[str, Tensor | TernarySource]]:
    """Metadata and tensors of a model folder; weights are read only when a tensor is written.

    Raises:
        ModelFileError: The folder is not a model of 1.58 bits, or a tensor is missing or does not fit.
    """
    config = HFConfig(folder)
    recurrent = config.model.delta_net is not None
    stored: dict[str, Stored] = {}
    for tensor in open_checkpoint(folder).values():
        name = hf_delta_net.plain_name(tensor.name) if recurrent else tensor.name
        if name is not None:
            stored[_name(name, recurrent=recurrent)] = tensor
    if config.model.tied_embeddings:
        for part in ("weight", "scales", "biases"):
            stored.pop(f"output.{part}", None)
    transforms: dict[str, MetadataValue] = {}
    if recurrent and "modules" in config.values:
        transforms = hf_delta_net.transforms(config, stored, lambda path: _module(path, recurrent=True))
    sources = _sources(config, stored, folder, grouped_out=bool(transforms))
    # Tensors have confirmed the shape, so from here on its sizes may be allocated.
    keys, factors = config.rope()
    tensors: dict[str, Tensor | TernarySource] = {**factors}
    rope: dict[str, MetadataValue] = {f"{config.model.architecture}.{key}": value for key, value in keys.items()}
    metadata = (
        config.metadata() | rope | transforms | read_vocabulary(folder, config.values, config.default_ids).metadata()
    )
    template = _chat_template(folder)
    if template is not None:
        metadata["tokenizer.chat_template"] = template
    return metadata, tensors | sources


def _sources(
    config: HFConfig, stored: dict[str, Stored], folder: Path, *, grouped_out: bool
) -> dict[str, Tensor | TernarySource]:
    """The source of each weight of the model; ``stored`` holds the checkpoint's tensors by their GGUF names.

    Args:
        grouped_out: Whether recurrent layers' ``ssm_out`` keeps the order of its columns.
    """
    net, mlx_folder = config.model.delta_net, hf_delta_net.mlx_wrote(stored)
    tensors: dict[str, Tensor | TernarySource] = {}
    units = {} if config.divides else {n: t for n, t in stored.items() if n.endswith(".weight_scale")}
    for name, expected in expected_weights(config.model):
        tensor = stored.pop(expected.tensor(name), None)
        if tensor is None and len(expected.shape) == 3 and f"{name}.0.weight" in stored:
            tensors[f"{name}.weight"] = hf_experts.stacked_experts(
                name, expected.shape, stored, partial(_matrix_of_rows, config), folder
            )
            continue
        if tensor is None:
            raise ModelFileError("is missing.", path=folder, field=f"tensor {name!r} (GGUF name)")
        scale = stored.pop(f"{name}.weight_scale", None)
        source: TensorSource | TernarySource
        if tensor.dtype == "U32" and len(expected.shape) > 1:
            parts = tuple(stored.pop(f"{name}.{part}", None) for part in ("scales", "biases", "row_alpha"))
            source = _packed(config, name, tensor, parts, expected)
        elif expected.kind == "ternary":
            source = _ternary(config, name, tensor, scale)
        else:
            # AutoBitLinear adds the bias before it multiplies by the scale, if it has one.
            source = _dense(tensor, expected, units.get(f"{name.removesuffix('.bias')}.weight_scale"))
        if net is not None:
            source = _tiled(net, name, source, mlx=mlx_folder, grouped_out=grouped_out)
        shape = source.shape if isinstance(source, TensorSource) else source.stacked or source.weight.shape
        if shape != expected.shape:
            raise tensor.error(f"has the shape {shape}; according to config.json it must be {expected.shape}.")
        tensors[expected.tensor(name)] = source
    for name, tensor in stored.items():
        if not name.endswith("inv_freq"):  # rotary frequencies that old versions stored
            raise tensor.error(f"is not part of the architecture {config.model.architecture} as bitnet runs it.")
    return tensors


def _packed(
    config: HFConfig, name: str, words: Stored, parts: tuple[Stored | None, ...], expected: Expected
) -> TensorSource | TernarySource:
    """A matrix of MLX's, or the matrices of all experts, whose scales and biases, or scales of rows, are ``parts``."""
    scales, biases, alphas = parts
    columns = expected.shape[-1]
    if len(words.shape) != len(expected.shape):
        raise words.error(f"U32 {words.shape} is no matrix; according to config.json it must hold {expected.shape}.")
    if expected.kind == "dense" and not mlx.is_ternary(words, columns):
        return mlx.table(words, scales, biases, columns)
    if alphas is None:
        weight = mlx.ternary_matrix(words, scales, biases, columns)
    else:
        weight = mlx.ternary_rows(words, alphas, columns)
    stacked = (*words.shape[:-1], columns) if len(expected.shape) == 3 else None
    return TernarySource(_reordered(config, name, weight), words.error, stacked)


def _matrix_of_rows(config: HFConfig, tensor: Stored) -> TernaryWeight:
    """One expert's matrix of floats."""
    if config.group != "row" or tensor.dtype not in FLOATS:
        raise tensor.error(f"is {tensor.dtype}; experts' matrices are floats, ternary with a scale for each row.")
    return grouped_floats(tensor, tensor.shape[1])


def _tiled(
    net: DeltaNet, name: str, source: TensorSource | TernarySource, *, mlx: bool, grouped_out: bool
) -> TensorSource | TernarySource:
    if isinstance(source, TensorSource):
        return hf_delta_net.floats_in_gguf_order(net, name, source, mlx=mlx)
    try:
        return source._replace(weight=hf_delta_net.in_gguf_order(net, name, source.weight, grouped_out=grouped_out))
    except ValueError as error:
        raise source.error(f"{error}.") from None


def _name(name: str, *, recurrent: bool) -> str:
    """The GGUF name of a checkpoint's tensor; its own name if it has none."""
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    if recurrent and layer.isdecimal() and rest in hf_delta_net.PARAMETERS:
        return f"blk.{layer}.{hf_delta_net.PARAMETERS[rest]}"
    base, _, end = name.rpartition(".")
    return f"{_module(base, recurrent=recurrent)}.{end}"


def _module(name: str, *, recurrent: bool) -> str:
    """The GGUF name of a module."""
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    names = LAYER_NAMES | (hf_delta_net.LAYER_NAMES if recurrent else hf_experts.LAYER_NAMES)
    if not layer.isdecimal():
        return (NAMES | hf_experts.NAMES).get(name, name)
    known = names.get(rest) or hf_experts.expert_name(rest)
    return name if known is None else f"blk.{layer}.{known}"


def _dense(tensor: Stored, expected: Expected, scale: Stored | None) -> TensorSource:
    """Norms and biases as f32, embeddings as f16, times the scale if there is one."""
    if tensor.dtype not in FLOATS:
        raise tensor.error(f"is {tensor.dtype}; it must be {', '.join(FLOATS)}.")
    kind = GGMLType.F16 if expected.kind == "dense" else GGMLType.F32
    dtype = np.dtype(np.float16 if expected.kind == "dense" else np.float32)
    size = {"F32": 4}.get(tensor.dtype, 2)

    def data() -> Iterator[npt.NDArray[Any]]:
        raw, factor = tensor.bytes(), 1.0 if scale is None else _scale(scale, divides=False)
        for begin in range(0, raw.size, CHUNK * size):
            piece = raw[begin : begin + CHUNK * size]
            out: npt.NDArray[np.float32] = np.empty(piece.size // size, dtype)
            try:
                decode(FLOATS[tensor.dtype], piece, out, factor)
            except ValueError as error:
                raise tensor.error(f"{error}.") from None
            yield out
        tensor.release()

    return TensorSource(tensor.shape, kind, data)


def _ternary(config: HFConfig, name: str, tensor: Stored, scale: Stored | None) -> TernarySource:
    """A ternary matrix from packed codes or from floats."""
    packed = tensor.dtype == "U8"
    if len(tensor.shape) != 2 or (packed and scale is None) or (not packed and tensor.dtype not in FLOATS):
        raise tensor.error(f"{tensor.dtype} {tensor.shape} is not a ternary matrix with a scale.")
    shape = (tensor.shape[0] * (4 if packed else 1), tensor.shape[1])
    if config.group is not None and not packed:
        group = shape[1] if config.group == "row" else config.group
        return TernarySource(grouped_floats(tensor, group), tensor.error)

    def load() -> TernaryData:
        factor = 1.0 if scale is None else _scale(scale, divides=config.divides)
        try:
            if packed:
                codes = pack_ternary(unpack_huggingface(tensor.bytes().reshape(tensor.shape)))
            else:
                floats = load_ternary(FLOATS[tensor.dtype], shape, tensor.bytes(), "official", master=config.online)
                codes, factor = floats.codes, factor * float(floats.scale[0])
        except ValueError as error:
            raise tensor.error(f"{error}.") from None
        if abs(factor) > float(np.finfo(np.float32).max):
            raise tensor.error(f"its scale is {factor}, which float32 cannot represent.")
        return TernaryData(codes, np.array([factor], np.float32))

    return TernarySource(_reordered(config, name, TernaryWeight(shape, load, tensor.release)), tensor.error)


def grouped_floats(tensor: Stored, group: int) -> TernaryWeight:
    """A matrix of floats that are ternary, with a scale for each ``group`` columns that float16 represents."""
    n, k = tensor.shape
    if k % group:
        raise tensor.error(f"has {k} columns; a multiple of {group} is expected.")

    def load() -> TernaryData:
        scales = np.empty((n, k // group), np.float16)
        data = tensor.bytes().reshape(n, -1)

        def rows(begin: int, end: int) -> npt.NDArray[np.uint8]:
            values = np.empty((end - begin, k // group, group), np.float32)
            try:
                decode(FLOATS[tensor.dtype], data[begin:end].reshape(-1), values)
            except ValueError as error:
                raise tensor.error(f"{error}.") from None
            units = np.abs(values).max(axis=2, keepdims=True)
            with np.errstate(over="ignore"):  # refused in the next lines
                scales[begin:end] = units[..., 0]
            wrong = np.argwhere(
                ((values != 0) & (np.abs(values) != units)).any(axis=2) | (scales[begin:end] != units[..., 0])
            )
            if wrong.size:
                row, at = map(int, wrong[0])
                place = f"columns {at * group} to {at * group + group - 1} of row {begin + row}"
                raise tensor.error(
                    f"{place} are not ternary, or float16 cannot represent their scale, {units[row, at, 0]:g}."
                )
            return pack_codes((np.sign(values).astype(np.int8) + 1).view(np.uint8).reshape(end - begin, k))

        return TernaryData(transcode((n, k), rows), scales)

    return TernaryWeight((n, k), load, tensor.release, group)


def _reordered(config: HFConfig, name: str, weight: TernaryWeight) -> TernaryWeight:
    """A matrix with its rows in GGUF order."""
    heads = {"attn_q": config.model.heads, "attn_k": config.model.kv_heads}.get(name.rpartition(".")[2])
    if heads is None or config.model.rope_style != "interleaved":
        return weight

    def load() -> TernaryData:
        codes, scale = weight.load()
        return TernaryData(interleave(codes, heads), scale if weight.group is None else interleave(scale, heads))

    return replace(weight, load=load, rows=None)


def _scale(tensor: Stored, *, divides: bool) -> float:
    """The value of a code of 1."""
    if tensor.dtype not in FLOATS or math.prod(tensor.shape) != 1:
        raise tensor.error(f"{tensor.dtype} {tensor.shape} is not a scale.")
    out = np.empty(1, np.float32)
    try:
        decode(FLOATS[tensor.dtype], tensor.bytes(), out)
    except ValueError as error:
        raise tensor.error(f"{error}.") from None
    scale = float(out[0])
    if divides and scale == 0:
        raise tensor.error("is 0, but the weights are divided by it.")
    return 1 / scale if divides else scale


def unpack_huggingface(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.int8]:
    """Unpack transformers' ``uint8[N, K]`` to weights ``int8[4 N, K]``: bits 2 k and 2 k + 1 of row r hold row r + k N,
    plus 1.

    Raises:
        ValueError: The unused code 3 occurs.
    """
    quarters = np.empty((4, *packed.shape), np.uint8)
    for k, quarter in enumerate(quarters):
        np.right_shift(packed, 2 * k, out=quarter)
    quarters &= 3
    codes = quarters.reshape(-1, packed.shape[1]).view(np.int8)
    codes -= 1
    if codes.max() > 1:
        raise ValueError("it holds the unused code 3")
    return codes


def interleave(rows: Array, heads: int) -> Array:
    """Reorder the rows of q or k so that rotated pairs are adjacent, as in GGUF files of ``llama``.

    Hugging Face pairs row ``i`` of a head with row ``i + head_dim / 2``.
    """
    order = np.arange(len(rows)).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)
    ordered: Array = rows[order]
    return ordered


def _chat_template(folder: Path) -> str | None:
    """The folder's chat template; of several, the one named ``default``."""
    path = folder / "chat_template.jinja"
    found: Any
    if path.is_file():
        found = read_bytes(path, 4 * MAX_SOURCE).decode(errors="replace")  # a character has at most four bytes
    else:
        path = folder / "tokenizer_config.json"
        found = read_json(path).get("chat_template") if path.is_file() else None
    if isinstance(found, list):
        found = next((t.get("template") for t in found if isinstance(t, dict) and t.get("name") == "default"), None)
    if not isinstance(found, str) or not found.strip():
        return None
    try:
        ChatTemplate(found)
    except InvalidInputError as error:
        raise ModelFileError(error.message, path=path, field="chat_template") from error
    return found
