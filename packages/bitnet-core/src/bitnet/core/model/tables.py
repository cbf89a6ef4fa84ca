"""Embeddings and heads as their file has them: ternary, or in blocks of quantised numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from bitnet.core.gguf import GGMLType, GGUFFile, TensorInfo
from bitnet.core.gguf.blocks import FORMATS, block_scales, code_places
from bitnet.core.gguf.ternary import BLOCK_TYPES, holds_threes, pieces
from bitnet.core.gguf.types import BLOCKS
from bitnet.core.hal import BlockType, BlockWeight, CodeBlocks, TernaryWeight
from bitnet.core.model.config import ModelConfig
from bitnet.core.model.weights import bound_ternary, folded_scales


def ternary_tables(file: GGUFFile, config: ModelConfig) -> Mapping[str, TernaryWeight]:
    """The embedding and the head, if the file stores them in ternary blocks, with the scale of each block.

    For devices with the feature :data:`~bitnet.core.hal.TERNARY_TABLES`. A table with the code 3, as a generic 2-bit
    quantiser may write it, is not ternary and is left out; to find out, its codes are read.
    """
    tables: dict[str, TernaryWeight] = {}
    for name in ("token_embd", "output"):
        tensor = file.tensors.get(f"{name}.weight")
        if tensor is None or tensor.type not in BLOCK_TYPES:
            continue
        threes = holds_threes(tensor.type, file.data(tensor))
        file.release(tensor)
        if not threes:
            factor = folded_scales(config).get(name, 1.0)
            table = bound_ternary(file, config, tensor, None, "official", "block", factor)
            if factor == 1 and code_places(tensor.type) is not None:
                table = replace(table, blocks=partial(_in_place, file, tensor))
            tables[name] = table
    if config.tied_embeddings and "token_embd" in tables:
        tables["output"] = tables["token_embd"]
    return tables


def _in_place(file: GGUFFile, tensor: TensorInfo) -> CodeBlocks:
    """A ternary table as the file has it."""
    places = code_places(tensor.type)
    assert places is not None
    data = file.data(tensor).reshape(tensor.shape[0], -1)
    for begin, end in pieces(tensor.shape[0], tensor.shape[1]):
        if not np.isfinite(block_scales(tensor.type, data[begin:end])).all():
            raise file.error("a scale is not finite.", tensor=tensor.name)
        file.release(tensor)
    return CodeBlocks(data, FORMATS[tensor.type].scale_at, *places)


_BLOCK_SCALES = {GGMLType.Q8_0: (0,), GGMLType.Q4_0: (0,), GGMLType.Q6_K: (208,), GGMLType.Q4_K: (0, 2)}
"""Types whose tables may stay in their blocks, and where f16 numbers are in a block."""


def block_tables(file: GGUFFile, config: ModelConfig) -> Mapping[str, BlockWeight]:
    """The embedding and the head, if the file stores them in blocks of quantised numbers.

    For devices with the feature :data:`~bitnet.core.hal.BLOCK_TABLES`. A table that a scale is folded into is left out.
    """
    factors = folded_scales(config)
    tables: dict[str, BlockWeight] = {}
    for name in ("token_embd", "output"):
        tensor = file.tensors.get(f"{name}.weight")
        if tensor is not None and tensor.type in _BLOCK_SCALES and factors.get(name, 1.0) == 1:
            tables[name] = _blocks(file, tensor)
    if config.tied_embeddings and "token_embd" in tables:
        tables["output"] = tables["token_embd"]
    return tables


def _blocks(file: GGUFFile, tensor: TensorInfo) -> BlockWeight:
    dtype: BlockType = tensor.type.name.lower()  # type: ignore[assignment]

    def load() -> npt.NDArray[np.uint8]:
        blocks = file.data(tensor).reshape(-1, BLOCKS[tensor.type][1])
        for at in _BLOCK_SCALES[tensor.type]:
            exponents = blocks[:, at + 1] & np.uint8(0x7C)  # of little-endian f16: all ones where it is not finite
            if (exponents == 0x7C).any():
                raise file.error("a value is not finite.", tensor=tensor.name)
        return blocks.reshape(tensor.shape[0], -1)

    return BlockWeight((tensor.shape[0], tensor.shape[1]), dtype, load, lambda: file.release(tensor))
