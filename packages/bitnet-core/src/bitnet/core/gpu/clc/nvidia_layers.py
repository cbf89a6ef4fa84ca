"""A whole layer in one launch, for steps of one token on NVIDIA's devices; its work-groups synchronise."""

from __future__ import annotations

import numpy as np

from bitnet.core.gpu.clc.abilities import Abilities
from bitnet.core.gpu.clc.attention import ATTENTION_PART
from bitnet.core.gpu.clc.nvidia_attention import takes_matrix_units
from bitnet.core.gpu.clc.nvidia_products import MMA_STEP, WARP
from bitnet.core.gpu.context import Bucket, Context
from bitnet.core.gpu.drivers.interface import Arg, KernelSpec, Launch
from bitnet.core.gpu.fusions import Layer
from bitnet.core.gpu.ops import ceil_div, kv_defines, positions, power_of_two
from bitnet.core.gpu.ops.products import glu_products
from bitnet.core.hal import Attention

WARPS = 8
"""Warps per work-group. More would leave too few registers for each."""
TILE = 16
"""Positions that a warp processes at a time."""
MAX_STEPS = 10
"""Maximum steps of MMA_STEP bytes for a warp, which holds them in registers; the source has the same number."""
MAX_SPLITS = 8
"""Maximum parts of a sequence's positions. Every work-group merges the results of all parts."""


class NvidiaLayers:
    """Launches for devices with matrix units; none if the number of concurrent work-groups is unknown."""

    def __init__(self, abilities: Abilities) -> None:
        self._groups, self._local = abilities.resident, abilities.local_bytes

    def launch(self, ctx: Context, layer: Layer, bucket: Bucket) -> list[Launch] | None:
        """The single launch of a layer; None if the layer does not fit one launch."""
        if bucket.tokens > 1 or not self._groups or not self._fits(ctx, layer):
            return None
        rope, op = layer.rope, layer.attention
        x, up = ctx.tensors[layer.qkv_norm.x], layer.glu
        splits = power_of_two(max(1, min(MAX_SPLITS, ceil_div(bucket.context, WARPS * TILE))))
        defines = kv_defines(ctx, op) | {
            "HEAD_GROUP": op.heads // op.kv_heads,
            "KV_HEADS": op.kv_heads,
            "NEOX": int(rope.style == "neox"),
            "RELU2": int(up.activation == "relu2"),
            "WIDTH": ctx.ternary(layer.qkv.weights).cols,
            "FFN": ctx.ternary(layer.down.weights).cols,
            "WARPS": WARPS,
            "GROUPS": self._groups,
            "SPLITS": splits,
        }
        defines |= {f"NORM{i}": int(quant.weight is not None) for i, (quant, _) in enumerate(layer.pairs)}
        parts = ctx.scratch("layer parts", op.kv_heads * MAX_SPLITS * _part(op) * 4)
        args: list[Arg] = [
            *positions(ctx, op.table),
            x,
            ctx.tensors[op.qkv],
            ctx.kv("k", op.layer),
            ctx.kv("v", op.layer),
        ]
        args += [ctx.dense(rope.cos).data, ctx.dense(rope.sin).data, parts, glu_products(ctx, up)]
        args.append(ctx.zeroed("layer arrivals", 4 * 4))
        for quant, product in layer.pairs:
            w = ctx.ternary(product.weights)
            norm = ctx.dense(quant.weight).data if quant.weight else x
            args += [norm, np.float32(quant.eps), w.codes, w.scales]
        spec = KernelSpec("nvidia/layer_mma", "layer_mma", tuple(defines.items()))
        return [Launch(spec, (self._groups, 1, 1), (WARP * WARPS, 1, 1), tuple(args))]

    def _fits(self, ctx: Context, layer: Layer) -> bool:
        """Whether a warp's codes fit its registers, and a work-group's data fits local memory."""
        weights = [ctx.ternary(product.weights) for _, product in layer.pairs]
        op = layer.attention
        share = op.heads // op.kv_heads
        attention = WARPS * (share * op.head_dim + 2 * 8)
        products = max(ceil_div(w.row_bytes, MMA_STEP) * MMA_STEP for w in weights) + WARPS * 16
        if layer.rope.q_norm is not None or any(w.group is not None for w in weights):
            return False
        held = all(ceil_div(w.row_bytes, MMA_STEP) <= MAX_STEPS * WARPS for w in weights)
        return takes_matrix_units(ctx, op) and held and 4 * max(attention, products) + WARPS * 12 + 16 <= self._local


def _part(op: Attention) -> int:
    """Floats of the partial result for a part of a key/value head's positions."""
    return op.heads // op.kv_heads * (op.head_dim + ATTENTION_PART)
