"""A whole layer in one dispatch, for steps of one token: its work-groups synchronise between the layer's parts.

Vulkan guarantees no forward progress between work-groups, so only NVIDIA's own driver gets this (decision 0070).
"""

from __future__ import annotations

import numpy as np

from bitnet.core.gpu import Arg, Bucket, Context, Launch, launch
from bitnet.core.gpu.fusions import Layer
from bitnet.core.gpu.ops import ceil_div, kv_defines, next_power_of_two, part_defines, positions
from bitnet.core.gpu.ops.products import glu_products
from bitnet.vulkan.hardware import Hardware

GROUP = 256
"""Invocations of a work-group."""
MIN_LANES, MAX_LANES = 8, 32
"""Minimum and maximum invocations that share a row of codes."""
HELD = 8
"""Maximum pieces of 16 bytes of a row that an invocation holds in registers."""
MIN_CHUNK = 64
"""Minimum positions that a work-group processes at a time."""
MAX_PARTS = 16
"""Maximum parts of a sequence's positions. Every work-group merges the results of all parts."""
BUFFERS = 22
"""Storage buffers that the kernel binds."""


def one_launch(hardware: Hardware, ctx: Context, layer: Layer, bucket: Bucket) -> list[Launch] | None:
    """The single launch of a layer; None if it does not fit one launch, or the device has no ``processors``."""
    groups = hardware.processors
    able = groups and hardware.macros["DOT"] and hardware.group >= GROUP and hardware.buffers >= BUFFERS
    plain = (
        layer.rope.q_norm is None
        and not part_defines(ctx, layer.rope)
        and layer.attention.window is None
        and all(ctx.ternary(op.weights).group is None for _, op in layer.pairs)
    )
    able = able and plain and hardware.subgroup >= MIN_LANES and bucket.tokens == 1 and ctx.cache.dtype != "i8"
    sizes = _sizes(hardware, ctx, layer) if able else None
    if sizes is None:
        return None
    rope, op, up, x = layer.rope, layer.attention, layer.glu, ctx.tensors[layer.qkv_norm.x]
    chunk = sizes["CHUNK"]
    part = chunk * ceil_div(bucket.context, chunk * MAX_PARTS)
    most = ceil_div(bucket.context, part)
    defines = sizes | {"PART": part, "MAX_PARTS": most, "NEOX": int(rope.style == "neox")}
    defines |= {"RELU2": int(up.activation == "relu2"), "GROUPS": groups}
    defines["NORMS"] = sum(1 << i for i, (quant, _) in enumerate(layer.pairs) if quant.weight)
    parts = ctx.scratch("layer parts", most * op.kv_heads * (sizes["GROUP"] * (op.head_dim + 2) + 4) * 4)
    step, _, _, *place = positions(ctx, op.table)
    args: list[Arg] = [step, x, ctx.tensors[op.qkv], ctx.kv("k", op.layer), ctx.kv("v", op.layer)]
    args += [ctx.dense(rope.cos).data, ctx.dense(rope.sin).data, parts, glu_products(ctx, up)]
    args.append(ctx.zeroed("layer arrivals", 4 * 4))
    for quant, product in layer.pairs:
        w = ctx.ternary(product.weights)
        args += [ctx.dense(quant.weight).data if quant.weight else x, w.codes, w.scales]
    args += [*place, *(np.float32(quant.eps) for quant, _ in layer.pairs)]
    return [launch("decode_layer", (groups, 1, 1), GROUP, tuple(args), defines)]


def _sizes(hardware: Hardware, ctx: Context, layer: Layer) -> dict[str, int] | None:
    """The kernel's constants, except those that depend on the context; None if it does not support the layer."""
    op = layer.attention
    weights = [ctx.ternary(product.weights) for _, product in layer.pairs]
    width, ffn, share = weights[0].cols, weights[3].cols, op.heads // op.kv_heads
    chunks = [w.row_bytes // 16 for w in weights]
    shared_by = [max(MIN_LANES, next_power_of_two(ceil_div(n, HELD))) for n in (max(chunks[:3]), chunks[3])]
    lanes, down_lanes = shared_by
    size = hardware.subgroup
    loads, space = max(op.head_dim // wide(ctx), 1), 4 * max(map(pitch, chunks))
    runs = GROUP // loads
    chunk = max(MIN_CHUNK, runs)
    if (
        op.head_dim % wide(ctx)
        or size % loads
        or chunk > HELD * runs
        or share > HELD
        or max(lanes, down_lanes) > min(MAX_LANES, size)
        or max(w.cols for w in weights) > 4 * HELD * GROUP
        or 16 * space + 4 * share * op.head_dim * (GROUP // size + 1) + 12 * MAX_PARTS * op.heads + 4096
        > hardware.shared
    ):
        return None
    sizes = {"GROUP": share, "RUNS": runs, "CHUNK": chunk, "WIDTH": width, "FFN": ffn}
    sizes |= {"KV_HEADS": op.kv_heads, "LANES": lanes, "DOWN_LANES": down_lanes, "X_SPACE": space}
    return {**kv_defines(ctx, op), **sizes}


def pitch(chunks: int) -> int:
    """Between planes of activations: a quarter of the 32 banks past a multiple of them."""
    return chunks + (2 - chunks) % 8


def wide(ctx: Context) -> int:
    """Dimensions of the cache in 16 bytes of an invocation."""
    return 4 if ctx.cache.dtype == "f32" else 8
