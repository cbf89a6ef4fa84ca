"""The weights of a model: the tensors a file must hold, their shapes, and how they are loaded for a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from bitnet.core.errors import brief
from bitnet.core.gguf import GGMLType, GGUFFile, TensorInfo
from bitnet.core.gguf.blocks import block_scales
from bitnet.core.gguf.quants import DECODERS, decode
from bitnet.core.gguf.ternary import (
    BLOCK_TYPES,
    LOOKUP_TYPES,
    I2SLayout,
    check_ternary,
    load_ternary,
)
from bitnet.core.gguf.types import BLOCKS
from bitnet.core.hal import DenseWeight, TernaryData, TernaryWeight, Weight
from bitnet.core.model.config import ModelConfig
from bitnet.core.model.hadamard import PREFIX, Hadamard
from bitnet.core.model.rope import LongRope

FLOATS = (GGMLType.F16, GGMLType.BF16)
"""Unquantised types of half the size of f32."""


Scales: TypeAlias = Literal["tensor", "row", "block"]
"""What shares a scale in a file whose types have one for each block."""


class Expected(NamedTuple):
    """A weight that a model must have: a ternary or dense matrix, a vector or small matrix of floats (``norm``), or a
    vector whose canonical name is the whole name of its tensor (``bias``). The last two become f32. A ternary matrix
    with three dimensions is that of all experts, which are stacked along its rows."""

    kind: Literal["ternary", "dense", "norm", "bias"]
    shape: tuple[int, ...]

    def tensor(self, name: str) -> str:
        """The file's name of the tensor with this canonical name."""
        return name if self.kind == "bias" else f"{name}.weight"


def expected_weights(config: ModelConfig) -> Iterator[tuple[str, Expected]]:
    """Canonical name, kind and shape of every weight of a model, in the order of the forward pass."""
    hidden, ffn, vocab = config.hidden_size, config.ffn_size, config.vocab_size
    yield "token_embd", Expected("dense", (vocab, hidden))
    for layer in range(config.layers):
        block = f"blk.{layer}."
        if not config.layer_norms:
            yield block + "attn_norm", Expected("norm", (hidden,))
        for name, expected in _recurrent(config) if config.recurrent(layer) else _attention(config):
            yield block + name, expected
        if not config.layer_norms:
            yield block + config.family.ffn_norm, Expected("norm", (hidden,))
        if config.experts is not None:
            count = config.experts.count
            yield block + "ffn_gate_inp", Expected("norm", (count, hidden))
            yield block + "ffn_gate_exps", Expected("ternary", (count, ffn, hidden))
            yield block + "ffn_up_exps", Expected("ternary", (count, ffn, hidden))
            yield block + "ffn_down_exps", Expected("ternary", (count, hidden, ffn))
            continue
        yield block + "ffn_gate", Expected("ternary", (ffn, hidden))
        yield block + "ffn_up", Expected("ternary", (ffn, hidden))
        if config.sub_norms:
            yield block + "ffn_sub_norm", Expected("norm", (ffn,))
        if config.input_norms:
            yield block + "ffn_gate_norm_in", Expected("norm", (hidden,))
            yield block + "ffn_up_norm_in", Expected("norm", (hidden,))
            yield block + "ffn_down_norm_in", Expected("norm", (ffn,))
        yield block + "ffn_down", Expected("ternary", (hidden, ffn))
        if config.family.sandwiched:
            yield block + "post_attention_norm", Expected("norm", (hidden,))
            yield block + "post_ffw_norm", Expected("norm", (hidden,))
    if not config.layer_norms:
        yield "output_norm", Expected("norm", (hidden,))
    if not config.tied_embeddings:
        yield "output", Expected("dense", (vocab, hidden))


def _attention(config: ModelConfig) -> Iterator[tuple[str, Expected]]:
    hidden, queries, keys = config.hidden_size, config.heads * config.head_dim, config.kv_heads * config.head_dim
    yield "attn_q", Expected("ternary", (queries * (2 if config.output_gate else 1), hidden))
    yield "attn_k", Expected("ternary", (keys, hidden))
    yield "attn_v", Expected("ternary", (keys, hidden))
    for part, size in (("q", queries), ("k", keys), ("v", keys)) if config.qkv_biases else ():
        yield f"attn_{part}.bias", Expected("bias", (size,))
    if config.head_norms:
        yield "attn_q_norm", Expected("norm", (config.head_dim,))
        yield "attn_k_norm", Expected("norm", (config.head_dim,))
    if config.sub_norms:
        yield "attn_sub_norm", Expected("norm", (queries,))
    if config.input_norms:
        for part in "qkv":
            yield f"attn_{part}_norm_in", Expected("norm", (hidden,))
        yield "attn_output_norm_in", Expected("norm", (queries,))
    yield "attn_output", Expected("ternary", (hidden, queries))


def _recurrent(config: ModelConfig) -> Iterator[tuple[str, Expected]]:
    net, hidden = config.delta_net, config.hidden_size
    assert net is not None
    yield "attn_qkv", Expected("ternary", (net.conv_width, hidden))
    yield "attn_gate", Expected("ternary", (net.value_width, hidden))
    yield "ssm_conv1d", Expected("norm", (net.conv_width, net.taps))
    yield "ssm_alpha", Expected("norm", (net.v_heads, hidden))
    yield "ssm_beta", Expected("norm", (net.v_heads, hidden))
    yield "ssm_dt.bias", Expected("bias", (net.v_heads,))
    yield "ssm_a", Expected("bias", (net.v_heads,))
    yield "ssm_norm", Expected("norm", (net.v_dim,))
    yield "ssm_out", Expected("ternary", (hidden, net.value_width))


def bind_weights(file: GGUFFile, config: ModelConfig, layout: I2SLayout) -> Mapping[str, Weight]:
    """Every weight of the model, checked but not read; devices load them one by one.

    Raises:
        ModelFileError: A tensor is missing, of another shape or of a type that cannot hold such a weight, or the file
            has tensors that this architecture does not know, such as biases of another one.
    """
    if config.hadamard is not None:
        _check_folded(file, config, config.hadamard)
    weights: dict[str, Weight] = {}
    known = {"rope_freqs.weight"}
    if isinstance(config.rope_scaling, LongRope):
        known |= {"rope_factors_short.weight", "rope_factors_long.weight"}
    factors = folded_scales(config)
    shared = scales_of(file, config, *next(one for one in expected_weights(config) if one[1].kind == "ternary"))
    for name, expected in expected_weights(config):
        kind, _ = expected
        tensor = found(file, name, expected, "according to the metadata")
        if kind == "ternary":
            # llama.cpp stores the scale separately for packed weights; bitnet.cpp's converter gives it another name.
            apart = f"{name}.weight_scale" if tensor.type in LOOKUP_TYPES else f"{name}.scale"
            scale = file.tensors.get(apart)
            if scale is None and tensor.type in LOOKUP_TYPES:
                raise file.error("is missing.", tensor=apart)
            weights[name] = bound_ternary(file, config, tensor, scale, layout, shared)
            known.add(apart)
        else:
            weights[name] = bound_dense(file, tensor, kind, factors.get(name, 1.0))
        known.add(tensor.name)
    drafts = config.family.recurrent or file.metadata.get(f"{config.architecture}.nextn_predict_layers") not in (
        None,
        0,
    )
    unknown = next((name for name in file.tensors if name not in known and not _unused(config, name, drafts)), None)
    if unknown is not None:
        raise file.error(f"is not part of the architecture {config.architecture} as bitnet runs it.", tensor=unknown)
    if config.tied_embeddings:
        weights["output"] = weights["token_embd"]
    return weights


def found(file: GGUFFile, name: str, expected: Expected, why: str) -> TensorInfo:
    """The tensor of a weight; ``why`` begins the sentence that says which shape it must have.

    Raises:
        ModelFileError: It is missing, or of another shape.
    """
    tensor = file.tensors.get(expected.tensor(name))
    if tensor is None:
        raise file.error("is missing.", tensor=expected.tensor(name))
    if tensor.shape != expected.shape:
        raise file.error(f"has the shape {tensor.shape}; {why} it must be {expected.shape}.", tensor=tensor.name)
    return tensor


def _unused(config: ModelConfig, name: str, drafts: bool) -> bool:
    """Whether a tensor is a part that the model does not need: a vision tower or, if there may be ``drafts``, layers
    after the last, which predict further tokens (:mod:`bitnet.core.model.draft`)."""
    layer = name.removeprefix("blk.").partition(".")[0]
    further = name.startswith("blk.") and layer.isdecimal() and len(layer) < 9 and int(layer) >= config.layers
    return (drafts and further) or (config.family.recurrent and name.startswith(("v.", "mm.")))


def _check_folded(file: GGUFFile, config: ModelConfig, hadamard: Hadamard) -> None:
    """Check that the transform is folded into the weights whose inputs a program transforms: all ternary products."""
    key = f"{PREFIX}.weight_names"
    if config.tied_embeddings:
        raise file.error("a model whose head is its embedding is not supported with a transform.", key=key)
    products = {f"{name}.weight" for name, expected in expected_weights(config) if expected.kind == "ternary"}
    for names, problem in (
        (products - hadamard.weights, "lacks"),
        (hadamard.weights - products - {"output.weight"}, "has"),
    ):
        if names:
            message = f"{problem} {brief(min(names))}; a transform must be folded into all ternary products."
            raise file.error(message, key=key)


def folded_scales(config: ModelConfig) -> Mapping[str, float]:
    """Factors for weights that fold MiniCPM's and Gemma's scales into them.

    The residual stream is stored divided by ``stream_unit``. In MiniCPM, sub-layers then add their results unscaled,
    and the embedding takes both scales (ADR 0045); in Gemma, norms of the results take the scale of embeddings (ADR
    0125). The last norm takes the rest.
    """
    embedding = config.embedding_scale / config.stream_unit
    factors = {
        "token_embd": embedding,
        "output_norm": config.logit_scale / (embedding if config.tied_embeddings else 1),
    }
    if config.family.sandwiched:
        norms = ("post_attention_norm", "post_ffw_norm")
        factors |= {f"blk.{i}.{name}": 1 / config.stream_unit for i in range(config.layers) for name in norms}
    return factors


def scales_of(file: GGUFFile, config: ModelConfig, name: str, expected: Expected) -> Scales:
    """What shares a scale in the first projection, ``name``, except for blocks of zeros, whose scale means nothing."""
    first = file.tensors.get(f"{name}.weight")
    if first is None or first.type not in BLOCK_TYPES or f"{name}.scale" in file.tensors:
        return "tensor"
    if first.shape != expected.shape:  # which its binding refuses
        return "tensor"
    scales = block_scales(first.type, file.data(first))
    if len(np.unique(scales[scales != 0])) <= 1:
        return "tensor"
    rows = scales.reshape(first.shape[0], -1)
    return "row" if config.experts is not None and ((rows == 0) | (rows == row_scales(rows))).all() else "block"


def row_scales(scales: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The first scale of each row that is not 0, ``[N, 1]``; 0 if all are."""
    return np.take_along_axis(scales, (scales != 0).argmax(axis=1)[:, None], axis=1)


def _one_a_row(scales: npt.NDArray[Any], first: int) -> npt.NDArray[Any]:
    """The scale that all blocks of a row share, ``[N, 1]``, but for blocks of zeros; ``first`` numbers the rows.

    Raises:
        ValueError: Blocks of a row differ.
    """
    shared = row_scales(scales)
    wrong = np.argwhere((scales != 0) & (scales != shared))
    if wrong.size:
        row, at = map(int, wrong[0])
        raise ValueError(
            f"row {first + row} has blocks with the scales {shared[row, 0]} and {scales[row, at]}, but the model's "
            "first projection has one for each row"
        )
    return shared


def bound_ternary(
    file: GGUFFile,
    config: ModelConfig,
    tensor: TensorInfo,
    scale: TensorInfo | None,
    layout: I2SLayout,
    scales: Scales,
    factor: float = 1.0,
) -> TernaryWeight:
    """A ternary weight whose scales are shared as ``scales`` says, where the type has a scale for each block."""
    shape = (prod(tensor.shape[:-1]), tensor.shape[-1])
    master = config.family.master_weights  # elsewhere a file of floats may not be a ternary model at all
    block = BLOCKS[tensor.type][0] if tensor.type in BLOCK_TYPES else 0
    group = {"tensor": None, "row": shape[1], "block": block}[scales] if block else None
    try:
        check_ternary(tensor.type, shape, layout)
    except ValueError as error:
        raise file.error(f"{error}.", tensor=tensor.name) from None
    if scale is not None:
        if scale.type is not GGMLType.F32 or scale.nbytes != 4:
            raise file.error(f"is {scale.type.name} {scale.shape}; it must be a single F32.", tensor=scale.name)
        if group is not None:
            raise file.error("is not allowed, as the blocks have scales of their own.", tensor=scale.name)
        factor = float(file.data(scale).view("<f4")[0])
        if not np.isfinite(factor):
            raise file.error(f"is {factor}.", tensor=scale.name)

    def load() -> TernaryData:
        return rows(0, shape[0])

    def rows(first: int, last: int) -> TernaryData:
        size, each = (last - first, shape[1]), tensor.nbytes // shape[0]
        whole = size == shape  # types that are not stored row by row are read whole only
        raw = file.data(tensor) if whole else file.data(tensor, first * each, last * each)
        try:
            data = load_ternary(tensor.type, size, raw, layout, master=master, grouped=group is not None)
            if scales == "row" and group is not None:
                data = data._replace(scale=_one_a_row(data.scale, first))
        except ValueError as error:
            raise file.error(f"{error}.", tensor=tensor.name) from None
        if factor == 1:
            return data
        with np.errstate(over="ignore"):
            scaled = (data.scale * np.float32(factor)).astype(data.scale.dtype)
        if not np.isfinite(scaled).all():
            raise file.error(f"a scale times {factor:g} is too large for {scaled.dtype}.", tensor=tensor.name)
        return data._replace(scale=scaled)

    some, binary = None if group is None else rows, scales == "block" and tensor.type is GGMLType.Q1_0
    return TernaryWeight(shape, load, lambda: file.release(tensor), group, some, binary=binary)


def bound_dense(
    file: GGUFFile, tensor: TensorInfo, kind: Literal["dense", "norm", "bias"], factor: float
) -> DenseWeight:
    """A dense tensor times ``factor``. Norms, biases, and floats changed by a factor become f32; F32 and F16 stay as
    they are. Other types become f16, which rounds quantised values by up to 2⁻¹¹ (ADR 0034)."""
    if tensor.type not in DECODERS:
        names = ", ".join(dtype.name for dtype in DECODERS)
        raise file.error(f"{tensor.type.name} cannot be read as numbers; {names} can.", tensor=tensor.name)
    floats = tensor.type in (GGMLType.F32, *(FLOATS if factor != 1 else ()))
    dtype: Literal["f32", "f16"] = "f32" if kind != "dense" or floats else "f16"
    as_is = tensor.type.name == dtype.upper() and factor == 1
    numpy_dtype = np.dtype({"f32": "<f4", "f16": "<f2"}[dtype])

    def load() -> npt.NDArray[np.float32] | npt.NDArray[np.float16]:
        data = file.data(tensor)
        if as_is:
            view: npt.NDArray[np.float32] = data.view(numpy_dtype).reshape(tensor.shape)
            return view
        out: npt.NDArray[np.float32] = np.empty(tensor.shape, numpy_dtype)
        try:
            decode(tensor.type, data, out, factor)
        except ValueError as error:
            raise file.error(f"{error}.", tensor=tensor.name) from None
        return out

    return DenseWeight(tensor.shape, dtype, load, lambda: file.release(tensor))
