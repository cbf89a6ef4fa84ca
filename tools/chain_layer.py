"""A random layer of 2B4T's shape for bench_chain.py: as blocks keep it in shared memory, and what it must compute.

Each operation is checked by itself, in float64 or in exact integers, from the inputs that the kernel had for it. So an
error of rounding in one does not move what is right for the next, and bounds are those of kernels/README.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

HIDDEN, FFN, HEADS, KV_HEADS, DIM, CONTEXT = 2560, 6912, 20, 5, 128, 512
GROUP, QKV, EPS, STEP, CLUSTER = HEADS // KV_HEADS, HIDDEN + 2 * KV_HEADS * DIM, 1e-5, 256, 16
K_PITCH, V_PITCH = DIM + 16, DIM + 32
"""Halves from row to row of keys and of values in shared memory."""
TRACE = {"x": HIDDEN, "qkv": QKV, "attended": HIDDEN, "middle": HIDDEN, "gated": FFN, "scales": 4}
"""Floats of a layer's trace, in their order; codes follow, three rows of HIDDEN bytes and one of FFN."""
TRACE_WORDS = sum(TRACE.values()) + (3 * HIDDEN + FFN) // 4

Floats = NDArray[np.float32]
Codes = NDArray[np.int8]
Bytes = NDArray[np.uint8]


@dataclass
class Layer:
    """Weights are -1, 0 and 1. ``gains`` are those of attention's norm, the feed-forward's, o's and down's.

    Attributes:
        units: Scales of q, k, v, o, gate, up and down.
        keys, values: [KV_HEADS, CONTEXT, DIM]; the last position is the token's own, which the layer computes.
        angles: Cosines and sines of the token's position, [2, DIM // 2].
        first: The residual before the first layer.
    """

    qkv: Codes
    o: Codes
    gate: Codes
    up: Codes
    down: Codes
    units: Floats
    gains: Floats
    keys: NDArray[np.float16]
    values: NDArray[np.float16]
    angles: Floats
    first: Floats


def random_layer(rng: np.random.Generator) -> Layer:
    """The row of the cache that the layer has to write is NaN until it does."""

    def weights(n: int, k: int) -> Codes:
        return rng.integers(-1, 2, (n, k), np.int8)

    turns = CONTEXT * 10_000.0 ** -(np.arange(DIM // 2) / (DIM // 2))
    cache = rng.standard_normal((2, KV_HEADS, CONTEXT, DIM)).astype(np.float16)
    cache[:, :, -1] = np.nan
    return Layer(
        weights(QKV, HIDDEN),
        weights(HIDDEN, HIDDEN),
        weights(FFN, HIDDEN),
        weights(FFN, HIDDEN),
        weights(HIDDEN, FFN),
        rng.uniform(0.015, 0.03, 7).astype(np.float32),
        rng.uniform(0.5, 1.5, 3 * HIDDEN + FFN).astype(np.float32),
        cache[0],
        cache[1],
        np.stack([np.cos(turns), np.sin(turns)]).astype(np.float32),
        rng.standard_normal(HIDDEN).astype(np.float32),
    )


def packed(weights: Codes) -> Bytes:
    """Units of 16 rows by 256 columns as bench_chain.cuh describes them: [rows / 16, columns / 256, 1024].

    Columns are filled with zeros to a multiple of 256.
    """
    rows, columns = weights.shape
    steps = -(-columns // STEP)
    codes = np.ones((rows, steps * STEP), np.uint8)
    codes[:, :columns] = weights + 1
    planes = codes.reshape(rows // 16, 2, 8, steps, 4, 4, 16)  # tile, half, row, step, plane, quarter, byte
    one, two, three, four = (planes[:, :, :, :, p] << (6 - 2 * p) for p in range(4))
    units: Bytes = (one | two | three | four).transpose(0, 3, 1, 2, 4, 5).reshape(rows // 16, steps, 1024)
    return units


def per_block(tiles: Bytes, blocks: int, *, dealt: bool) -> Bytes:
    """Tiles of each block, as many for all: dealt out one by one or in runs, with tiles of zeros at the end."""
    count = -(-len(tiles) // blocks)
    full = np.full((count * blocks, tiles[0].size), 0x55, np.uint8)  # the code 1 stands for 0
    full[: len(tiles)] = tiles.reshape(len(tiles), -1)
    if dealt:
        full = full.reshape(count, blocks, -1).transpose(1, 0, 2)
    return full.reshape(blocks, -1)


def images(layer: Layer, *, clusters: bool, blocks: int) -> Bytes:
    """What each block keeps in shared memory, [blocks, bytes]: units of qkv, o, gate and up, and down; keys; values."""
    pairs = np.concatenate([layer.gate.reshape(-1, 8, HIDDEN), layer.up.reshape(-1, 8, HIDDEN)], axis=1)
    gate_up = per_block(packed(pairs.reshape(-1, HIDDEN)), blocks, dealt=not clusters)
    if not clusters:
        products = [per_block(packed(w), blocks, dealt=True) for w in (layer.qkv, layer.o, layer.down)]
        parts = [products[0], products[1], gate_up, products[2]]
        shares = blocks // KV_HEADS
    else:
        shares, heads, count = CLUSTER, np.arange(HEADS + 2 * KV_HEADS), blocks // CLUSTER
        slots = [[*heads[c * GROUP :][:GROUP], HEADS + c, HEADS + KV_HEADS + c] for c in range(KV_HEADS)]
        of_rank = np.arange(4) + 4 * np.arange(CLUSTER)[:, None, None] + 64 * np.arange(2)[:, None]  # rank, half, four
        rows = np.array(slots)[:, None, :, None, None] * DIM + of_rank[:, None]
        o = [packed(layer.o[:, c * GROUP * DIM :][:, : GROUP * DIM]).reshape(CLUSTER, -1) for c in range(KV_HEADS)]
        width = CLUSTER * 8 * (gate_up.shape[1] // (HIDDEN // STEP * 1024))  # gated values of a cluster
        down = [np.zeros((HIDDEN, width), np.int8) for _ in range(count)]
        for c, part in enumerate(down):
            mine = layer.down[:, c * width :][:, :width]
            part[:, : mine.shape[1]] = mine
        parts = [
            packed(layer.qkv[rows.reshape(-1)]).reshape(KV_HEADS * CLUSTER, -1),
            np.concatenate(o),
            gate_up,
            np.concatenate([packed(part).reshape(CLUSTER, -1) for part in down]),
        ]
    span = -(-CONTEXT // shares)
    for cache, pitch in ((layer.keys, K_PITCH), (layer.values, V_PITCH)):
        rows_of = np.zeros((KV_HEADS, shares * span, pitch), np.float16)
        rows_of[:, :CONTEXT, :DIM] = cache
        parts.append(rows_of.reshape(KV_HEADS * shares, -1).view(np.uint8))
    full = [np.concatenate([p, np.zeros((blocks - len(p), p.shape[1]), np.uint8)]) for p in parts]
    return np.ascontiguousarray(np.concatenate(full, axis=1))


def check(layer: Layer, trace: Floats, out: Floats) -> None:
    """Compare every operation of every layer with the exact one.

    Args:
        trace: What each layer computed, [layers, TRACE_WORDS].
        out: The residual behind the last layer.

    Raises:
        ValueError: An operation is further from the exact one than its bound.
    """
    ends = np.cumsum([0, *TRACE.values()])
    of = {name: trace[:, a:b] for name, a, b in zip(TRACE, ends, ends[1:], strict=False)}
    codes = trace[:, ends[-1] :].copy().view(np.int8)
    rows = [codes[:, i * HIDDEN :][:, : FFN if i == 3 else HIDDEN] for i in range(4)]
    units, scales = layer.units, of["scales"]

    def product(row: int, weights: Codes, unit: int) -> Floats:
        sums = rows[row].astype(np.float32) @ weights.T.astype(np.float32)  # exact: below 2^24
        result: Floats = sums * (scales[:, row, None] * units[unit])
        return result

    def bound(name: str, found: NDArray[np.floating], exact: NDArray[np.floating], limit: NDArray[np.floating]) -> None:
        far = ~(np.abs(found - exact) <= limit)
        if far.any():
            at, i = np.argwhere(far)[0]
            what = f"{found[at, i]:.9g} in place of {exact[at, i]:.9g}, in column {i} of layer {at}"
            raise ValueError(f"{name} is wrong in {np.count_nonzero(far)} of {far.size} values: {what}.")

    def quantised(name: str, values: Floats, row: int, gain_at: int) -> None:
        exact = values.astype(np.float64)
        gain = layer.gains[gain_at:][: exact.shape[1]].astype(np.float64)
        exact = exact * gain / np.sqrt((exact**2).mean(axis=1, keepdims=True) + EPS)
        largest = np.maximum(np.abs(exact).max(axis=1, keepdims=True), 1e-5)
        bound(f"the scale of {name}", scales[:, row, None], largest / 127, 1e-5 * largest / 127)
        quotient = exact * 127 / largest
        bound(f"the codes of {name}", rows[row], quotient, np.full_like(quotient, 0.5 + 2e-3))

    def same(name: str, found: Floats, exact: Floats) -> None:
        bound(name, found, exact, np.zeros_like(exact))

    quantised("x", of["x"], 0, 0)
    per_head = [(unit, a, b) for unit, (a, b) in enumerate(((0, HIDDEN), (HIDDEN, HIDDEN + 640), (HIDDEN + 640, QKV)))]
    q, k, v = (product(0, layer.qkv[a:b], unit).astype(np.float64) for unit, a, b in per_head)
    count, cosines, sines = len(trace), *layer.angles.astype(np.float64)
    heads = np.concatenate([q, k], axis=1).reshape(count, HEADS + KV_HEADS, 2, DIM // 2)
    low, high = heads[:, :, 0], heads[:, :, 1]
    turned = np.stack([low * cosines - high * sines, high * cosines + low * sines], axis=2).reshape(count, -1)
    limit = 1e-6 * np.abs(turned).max(axis=1, keepdims=True)
    bound("q or k", of["qkv"][:, : HIDDEN + 640], turned, np.broadcast_to(limit, turned.shape))
    bound("v", of["qkv"][:, HIDDEN + 640 :], v, np.zeros_like(v))

    exact = attention(layer, of["qkv"])
    bound(
        "attention",
        of["attended"],
        exact,
        np.broadcast_to(1e-5 * np.abs(exact).max(axis=1, keepdims=True), exact.shape),
    )
    quantised("attention", of["attended"], 1, 2 * HIDDEN)
    same("the residual after o", of["middle"], of["x"] + product(1, layer.o, 3))
    quantised("the residual after o", of["middle"], 2, HIDDEN)
    gate, up = (product(2, w, i).astype(np.float64) for i, w in ((4, layer.gate), (5, layer.up)))
    gated = np.maximum(gate, 0) ** 2 * up
    bound("the gated values", of["gated"], gated, 3e-7 * np.abs(gated))
    quantised("the gated values", of["gated"], 3, 3 * HIDDEN)
    same("the residual after down", np.vstack([of["x"][1:], out]), of["middle"] + product(3, layer.down, 6))
    same("the first residual", of["x"][:1], layer.first[None])


def attention(layer: Layer, qkv: Floats) -> NDArray[np.float64]:
    """Attention of one token behind the cached positions, whose own k and v are stored as f16: [layers, HIDDEN]."""
    count = len(qkv)
    own = qkv[:, HIDDEN:].reshape(count, 2, KV_HEADS, DIM).astype(np.float16).astype(np.float64)
    q = qkv[:, :HIDDEN].reshape(count, KV_HEADS, GROUP, DIM).astype(np.float64)
    keys, values = (cache[:, :-1].astype(np.float64) for cache in (layer.keys, layer.values))
    scores = np.einsum("lghd,gpd->lghp", q, keys, optimize=True)
    scores = np.concatenate([scores, np.einsum("lghd,lgd->lgh", q, own[:, 0])[..., None]], axis=3) / np.sqrt(DIM)
    weights = np.exp(scores - scores.max(axis=3, keepdims=True))
    weights /= weights.sum(axis=3, keepdims=True)
    sums = np.einsum("lghp,gpd->lghd", weights[..., :-1], values, optimize=True)
    exact: NDArray[np.float64] = (sums + weights[..., -1:] * own[:, 1, :, None]).reshape(count, -1)
    return exact
