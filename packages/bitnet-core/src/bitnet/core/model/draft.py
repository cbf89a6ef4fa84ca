"""Draft layers: a model's extra layer that predicts the token after the next one ("multi-token prediction"), and its
program (ADR 0123).

From the embedding of the token at position p and the model's last hidden state at p - 1, each normalised, ``eh_proj``
makes the input of one more layer. Its result, normalised and multiplied by the model's own head, predicts the token at
p + 1; it also takes the place of the hidden state for a further prediction. Files have the layer as ``blk.N.*`` with
``blk.N.nextn.*`` beside it, as llama.cpp's converters write them: in the model's file after its last layer, or in a
file of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bitnet.core.errors import InvalidInputError, ModelFileError, brief
from bitnet.core.gguf import GGMLType, GGUFFile, TensorInfo
from bitnet.core.gguf.quants import DECODERS, decode
from bitnet.core.gguf.ternary import TERNARY_TYPES, pack_ternary, unpack_ternary
from bitnet.core.gguf.types import BLOCKS
from bitnet.core.hal import (
    DenseMatmul,
    DenseWeight,
    Embed,
    KVDtype,
    KVSpec,
    Limits,
    NormQuant,
    NormRows,
    Op,
    Program,
    Sample,
    TensorSpec,
    TernaryData,
    TernaryMatmul,
    TernaryWeight,
    Weight,
)
from bitnet.core.model.architectures import BY_GGUF_NAME
from bitnet.core.model.config import ModelConfig
from bitnet.core.model.file import ModelFile
from bitnet.core.model.keys import Keys
from bitnet.core.model.planes import ternary_planes
from bitnet.core.model.program import (
    BLOCK_SIZE,
    attention_ops,
    attention_tensors,
    head_tensors,
    split_queries,
    stacked_biases,
)
from bitnet.core.model.rope import rope_tables
from bitnet.core.model.weights import Expected, bound_dense, bound_ternary, expected_weights, found, scales_of

PROJECTION = "nextn.eh_proj"
_FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
_OWN_TABLES = ("nextn.embed_tokens", "nextn.shared_head_head")


@dataclass(frozen=True, slots=True)
class DraftLayer:
    """A draft layer that fits a model.

    Attributes:
        file: The file that holds it.
        config: The model's shape with this layer as its only one.
        weights: By canonical name: those of ``blk.0``, ``enorm``, ``hnorm``, ``head_norm``, and ``eh_proj`` in two:
            ``embedding`` and ``hidden``, whose inputs are the two norms. With ``planes``, the name of a matrix begins
            with the number of its plane: ``0:blk.0.attn_q``.
        planes: Ternary matrices whose sum a matrix is (:mod:`bitnet.core.model.planes`); 1: it is ternary itself.
    """

    file: GGUFFile
    config: ModelConfig
    weights: Mapping[str, Weight]
    planes: int


def open_draft(path: Path, model: ModelFile) -> DraftLayer:
    """Open a draft layer for a model. Its weights are checked but not read.

    Raises:
        InvalidInputError: Models of this architecture get no draft layers.
        ModelFileError: The file has no draft layer, or one that does not fit the model; names the tensor or key.
    """
    config = model.config
    lacking = next(
        (
            what
            for has, what in (
                (config.experts, "mixtures of experts"),
                (config.layer_norms, "LayerNorms"),
                (config.input_norms or config.family.sandwiched, "more norms than two a layer"),
                (config.hadamard, "folded transforms"),
                (config.family.stream_scales, "scales of the residual stream"),
            )
            if has
        ),
        None,
    )
    if lacking is not None:
        raise InvalidInputError(f"draft layers are not supported for models with {lacking}, such as {config.name}.")
    file = model.gguf if path.absolute() == model.path.absolute() else GGUFFile(path)
    prefix = _prefix(file)
    _check_fits(file, model, prefix)
    config = replace(
        config,
        layers=1,
        delta_net=None,
        sub_norms=f"{prefix}attn_sub_norm.weight" in file.tensors,
        head_norms=config.family.partly_rotated or f"{prefix}attn_q_norm.weight" in file.tensors,
    )
    return _bound(file, config, prefix, model)


def _prefix(file: GGUFFile) -> str:
    """The beginning of the names of the layer's tensors, such as ``blk.64.``."""
    ends = f".{PROJECTION}.weight"
    names = [name for name in file.tensors if name.startswith("blk.") and name.endswith(ends)]
    if not names:
        hint = "A draft layer has tensors such as 'blk.64.nextn.eh_proj.weight'. Without --draft, none is needed."
        raise ModelFileError(f"has no draft layer: no tensor's name ends in {ends!r}.", path=file.path, hint=hint)
    if len(names) > 1:
        raise file.error(f"is one of {len(names)} draft layers; only one is supported.", tensor=names[1])
    return names[0].removesuffix(f"{PROJECTION}.weight")


def _check_fits(file: GGUFFile, model: ModelFile, prefix: str) -> None:
    """Refuse a layer of a model of another architecture, shape or vocabulary, from what the file says of itself."""
    config = model.config
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or BY_GGUF_NAME.get(architecture) is not config.family:
        raise file.error(
            f"is {brief(architecture)}; the model's is {config.architecture!r}.", key="general.architecture"
        )
    keys = Keys(file, architecture)
    for key, size in (
        ("embedding_length", config.hidden_size),
        ("feed_forward_length", config.ffn_size),
        ("attention.head_count", config.heads),
        ("attention.head_count_kv", config.kv_heads),
        ("attention.key_length", config.head_dim),
    ):
        value = keys.integer(key, size)
        if value != size:
            raise keys.error(key, f"is {value}; the model has {size}.")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None and embedding.shape != (config.vocab_size, config.hidden_size):
        wanted = (config.vocab_size, config.hidden_size)
        raise file.error(f"has the shape {embedding.shape}; the model's is {wanted}.", tensor=embedding.name)
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    same = isinstance(tokens, list) and tokens == model.metadata.get("tokenizer.ggml.tokens")
    if file is not model.gguf and tokens is not None and not same:
        raise file.error("is another vocabulary than the model's.", key="tokenizer.ggml.tokens")
    for name in _OWN_TABLES:
        if (tensor := file.tensors.get(f"{prefix}{name}.weight")) is not None:
            rows = tensor.shape[0]
            why = (
                "draft layers with an embedding or a head of their own are not supported"
                if rows == config.vocab_size
                else f"it has {rows} rows, and the model's vocabulary {config.vocab_size} tokens"
            )
            raise file.error(f"does not fit: {why}.", tensor=tensor.name)


def _expected(config: ModelConfig) -> Iterator[tuple[str, Expected]]:
    """Names of the weights after the prefix, with kinds and shapes."""
    hidden = config.hidden_size
    yield PROJECTION, Expected("ternary", (hidden, 2 * hidden))
    for name in ("enorm", "hnorm"):
        yield f"nextn.{name}", Expected("norm", (hidden,))
    for name, expected in expected_weights(config):
        if name.startswith("blk.0."):
            yield name.removeprefix("blk.0."), expected


def _bound(file: GGUFFile, config: ModelConfig, prefix: str, model: ModelFile) -> DraftLayer:
    """Bind every weight of the layer."""
    why = f"for {config.name}"
    tensors = {name: (found(file, prefix + name, expected, why), expected) for name, expected in _expected(config)}
    matrices = {name: tensor for name, (tensor, expected) in tensors.items() if expected.kind == "ternary"}
    floats = any(_is_float(tensor, config) for tensor in matrices.values())
    planes, weights = 1, dict[str, Weight]()
    first = next(name for name in matrices if name != PROJECTION)
    shared = scales_of(file, config, prefix + first, tensors[first][1])
    for name, (tensor, expected) in tensors.items():
        canonical = name.removeprefix("nextn.") if name.startswith("nextn.") else f"blk.0.{name}"
        if expected.kind != "ternary":
            weights[canonical] = bound_dense(file, tensor, expected.kind, 1.0)
            continue
        if floats:
            summed = _planes(file, tensor)
            planes = len(summed)
            bound: dict[str, Weight] = {f"{i}:{canonical}": plane for i, plane in enumerate(summed)}
        else:
            scale = file.tensors.get(f"{prefix}{name}.scale")
            bound = {canonical: bound_ternary(file, config, tensor, scale, model.i2s_layout, shared)}
        for full, weight in bound.items():
            if name == PROJECTION:
                assert isinstance(weight, TernaryWeight)
                start = full.removesuffix("eh_proj")
                weights[f"{start}embedding"] = _columns(weight, 0, config.hidden_size)
                weights[f"{start}hidden"] = _columns(weight, config.hidden_size, 2 * config.hidden_size)
            elif config.output_gate and name == "attn_q":
                weights |= split_queries(config, full, {full: weight})
            else:
                weights[full] = weight
    if config.qkv_biases:
        weights |= stacked_biases(0, weights)
    head_norm = f"{prefix}nextn.shared_head_norm"
    if f"{head_norm}.weight" in file.tensors:
        norm = found(file, head_norm, Expected("norm", (config.hidden_size,)), why)
        weights["head_norm"] = bound_dense(file, norm, "norm", 1.0)
    else:  # as llama.cpp does
        weights["head_norm"] = model.weights["output_norm"]
    return DraftLayer(file, config, weights, planes)


def _is_float(tensor: TensorInfo, config: ModelConfig) -> bool:
    """Whether a matrix holds numbers that are not quantised to ternary ones, as master weights are."""
    if tensor.type in _FLOATS:
        return not config.family.master_weights
    return tensor.type not in TERNARY_TYPES


def _planes(file: GGUFFile, tensor: TensorInfo) -> list[TernaryWeight]:
    """A matrix of any type as a sum of ternary ones."""
    if tensor.type not in DECODERS:
        names = ", ".join(dtype.name for dtype in DECODERS)
        raise file.error(f"{tensor.type.name} cannot be read as numbers; {names} can.", tensor=tensor.name)
    n, k = tensor.shape
    if k % BLOCKS[tensor.type][0]:
        raise file.error(f"has rows of {k}, not whole blocks of {tensor.type.name}.", tensor=tensor.name)

    def rows(first: int, last: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        each = tensor.nbytes // n
        out = np.empty((last - first, k), np.float32)
        try:
            decode(tensor.type, file.data(tensor, first * each, last * each), out)
        except ValueError as error:
            raise file.error(f"{error}.", tensor=tensor.name) from None
        return out

    return ternary_planes((n, k), rows, lambda: file.release(tensor))


def _columns(weight: TernaryWeight, first: int, last: int) -> TernaryWeight:
    """Some columns of a ternary matrix: whole groups of them, or half of those that share a row's scale."""
    n, k = weight.shape
    group = weight.group
    shared = group if group is None or group <= last - first else last - first

    def load() -> TernaryData:
        codes, scale = weight.load()
        if group is not None and shared == group:
            scale = scale[:, first // group : last // group]
        return TernaryData(pack_ternary(unpack_ternary(codes, k)[:, first:last]), scale)

    return TernaryWeight((n, last - first), load, weight.release, shared)


def build_draft_program(
    layer: DraftLayer, weights: Mapping[str, Weight], *, limits: Limits, num_blocks: int, kv_dtype: KVDtype
) -> Program:
    """The program of a draft layer; it ends in ``Sample``.

    The host writes ``state``, ``f32[M, hidden]``, before a step: for each of its tokens, the hidden state of the token
    before it. A pass leaves its rows' own states in the first rows of ``state``, for the next pass.

    Args:
        weights: The model's, of which the embedding and the head are used.
    """
    config = layer.config
    width, eps, cache = config.hidden_size, config.rms_eps, limits.max_blocks * BLOCK_SIZE
    cos, sin = rope_tables(config, cache)
    head = "token_embd" if weights.get("output") is weights["token_embd"] else "output"
    used: dict[str, Weight] = {
        **layer.weights,
        **{name: weights[name] for name in {"token_embd", head}},
        "rope_cos": DenseWeight(cos.shape, "f32", lambda: cos),
        "rope_sin": DenseWeight(sin.shape, "f32", lambda: sin),
    }
    ops: list[Op] = [
        Embed("token_embd", "embedded"),
        NormQuant("embedded", "enorm", eps, "e8", "e8_scale"),
        TernaryMatmul("e8", "e8_scale", ("embedding",), "x"),
        NormQuant("state", "hnorm", eps, "s8", "s8_scale"),
        TernaryMatmul("s8", "s8_scale", ("hidden",), "x", add=True),
        *attention_ops(config, 0, 0, 0),
        NormRows("x", "head_norm", eps, "state"),
        NormRows("x", "head_norm", eps, "last"),
        DenseMatmul("last", head, "logits"),
        Sample("logits", "next"),
    ]
    tensors = [
        TensorSpec("embedded", "f32", ("M", width)),
        TensorSpec("state", "f32", ("M", width)),
        *(TensorSpec(name, "i8", ("M", width)) for name in ("e8", "s8")),
        *(TensorSpec(name, "f32", ("M",)) for name in ("e8_scale", "s8_scale")),
        *attention_tensors(config),
        *head_tensors(config),
    ]
    return Program(
        ops=[part for op in ops for part in _summed(op, layer.planes)],
        tensors={spec.name: spec for spec in tensors},
        weights=used,
        limits=limits,
        kv=KVSpec(1, config.kv_heads, config.head_dim, num_blocks, BLOCK_SIZE, kv_dtype),
        name=f"{config.name or config.architecture} (draft layer)",
    )


def _summed(op: Op, planes: int) -> list[Op]:
    """An operation, with a product by matrices that are sums as products by each part."""
    if planes == 1 or not isinstance(op, TernaryMatmul):
        return [op]
    return [
        replace(op, weights=tuple(f"{i}:{name}" for name in op.weights), add=op.add or i > 0) for i in range(planes)
    ]
