"""Launches of matrix products in CUDA: ternary products for few and for many tokens, and the output head.

Long, because it chooses among all kernels of products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from bitnet.core.gpu import Arg, Bucket, Buffer, Context, DenseBuffer, KernelSpec, Launch, TernaryBuffer
from bitnet.core.gpu.fusions import NormHead
from bitnet.core.gpu.ops import ceil_div, power_of_two
from bitnet.core.gpu.ops.head import unnormed
from bitnet.core.gpu.ops.pairs import Pair
from bitnet.core.gpu.ops.products import ProductInput, product_args, product_defines, quantised, row_sums, tiled_args
from bitnet.core.gpu.ops.scaled import group_product
from bitnet.core.hal import DenseMatmul, TernaryMatmul
from bitnet.cuda.bits import bits_product, bits_shape
from bitnet.cuda.few import FewShape, few_product, few_shape
from bitnet.cuda.groups import few_groups_product, few_groups_shape
from bitnet.cuda.planes import codes_of
from bitnet.cuda.slices import SliceShape, slice_product, slice_shape
from bitnet.cuda.tiles import ALIGNMENT, MANY_TOKENS, PANEL, TILES, ProductTile, TiledMatrix, group_tile, product_tile
from bitnet.cuda.weights import ternary

DECODE_TOKENS = 8
"""Maximum tokens of ternary_decode."""
FEW_TOKENS = range(9, 65)
"""Numbers of tokens for which ternary_slices or ternary_few multiplies weights with one scale. More tokens use a tiled
product."""
FEW_GROUP_TOKENS = range(3, 65)
"""The same for weights with a scale for each group of columns."""
FEW_TILES = 16
"""Maximum tokens of such weights that other kernels multiply where ternary_group_tiles can."""
GEMV_ROWS = 4
LANES, TILE_M, TILE_N, TILE_GROUP = 32, 32, 64, 256
"""Sizes of the tiled product, as in its source."""
SHARED = {(8, 0): 154, (8, 7): 154, (9, 0): 200, (10, 0): 200, (10, 3): 200}
"""KiB of shared memory that a launch may request, by compute capability: the limit of a block, less the 9 KiB that
ternary_decode declares at most."""
MIN_SHARED = 90
"""The same for all other compute capabilities."""
BITS_SHARED = 225 * 1024
"""Bytes of shared memory that a launch of ternary_bits may request: where that runs, a block has 2 KiB more."""
MAX_STEPS = 96
"""Longest K of ternary_decode, in steps of 256: 16 warps with 6 each."""
STAGES, X_PITCH, W_PITCH, TOKEN_TILES = 4, 160, 32, (64, 128)
"""Sizes of ternary_mma, as in its source."""
WGMMA_STAGES = 5
"""Stages of ternary_wgmma, as in its source."""
TILES_STAGES, TILES_SHARED, TILES_DEPTH = 8, 224 * 1024, 4
"""Limits of ternary_tiles: maximum tiles of K in its ring, maximum bytes of the ring, minimum tiles of K."""
MIN_TILES = 4
"""Minimum K tiles (128 wide) per block of ternary_wgmma."""
HEAD_ROWS = 128, 256
"""Weight rows of a block of dense_mma, for up to 8 rows of x and for more."""
HEAD_PITCH = 288, 160
"""Bytes of half a row of x in shared memory of dense_mma, for up to 8 rows of x and for more."""
SPLIT_GROUP = 256
"""Threads of a block of split_rows, as in its source."""
MAX_ONE = 8192
"""Maximum columns of a single row x that dense_mma keeps whole in shared memory."""
WARPS = 8
"""Target number of warps per multiprocessor for a product of several tokens, so that all weight loads are in flight."""
FEW_WARPS = 6
"""The same for one token: fewer, so that blocks of the next kernel fit beside them and fetch their weights early."""
TILE_ROWS = 16
STEP = 256
"""Columns of K that a warp of ternary_decode takes at a time."""
MMA_GROUPS = 64, 128, 256
"""Supported numbers of columns that share a scale, in ternary_decode and ternary_gemm."""
WGMMA_GROUPS = 64, 128
"""The same for ternary_group_tiles."""
BOUNDED_GROUP = 128
"""Columns of a scale whose sums ternary_group_tiles adds faster where activations are known to be small."""
WGMMA = (9, 0)
"""The one compute capability that has wgmma."""
CLUSTERS = (9, 0)
"""Compute capability from which there are thread block clusters."""
MAX_CLUSTER = 8
"""Blocks of a cluster on every device that has clusters."""
MAX_WARPS = 16
"""Maximum warps of a block of ternary_decode."""
ROOMY_WARPS = 10
"""The same for one token and in clusters, where small blocks start sooner."""
TENSOR_CORES = (8, 0)
"""Compute capability from which there is mma of 8-bit integers with 32 of K."""


class Products:
    """Launches for a device with ``multiprocessors`` and a compute capability such as ``(9, 0)``."""

    def __init__(self, multiprocessors: int, capability: tuple[int, int]) -> None:
        self._multiprocessors = multiprocessors
        self._tensor_cores = capability >= TENSOR_CORES
        self._wgmma = capability == WGMMA
        self._clusters = capability >= CLUSTERS
        self._shared = shared_bytes(capability)

    def ternary_matmul(
        self, ctx: Context, op: TernaryMatmul, bucket: Bucket, out: Buffer | None = None
    ) -> list[Launch]:
        """A product, in ``out`` if its results are not to be in the operation's tensor."""
        out = out or ctx.tensors[op.out]
        x, scale = ctx.tensors[op.x], ctx.tensors[op.scale]
        w = ternary(ctx, op.weights)
        if self.decodes(w, bucket):
            return [*self.row_sums(ctx, op, bucket), self.decode(ctx, op, bucket, ProductInput(x, scale=scale), out)]
        if self.tiles(w):
            return [*self.row_sums(ctx, op, bucket), self.tiled(ctx, op, bucket, out)]
        if w.group is not None:  # the core's launch, on codes that `ternary` gave their signs
            return group_product(ctx, op, bucket, out)
        args = (ctx.step, x, scale, w.codes, w.scales, out, np.int32(w.rows))
        shape = (("COLS", w.cols), ("ROW_BYTES", w.row_bytes), ("ADD", int(op.add)))
        defines = (*shape, ("ROWS", GEMV_ROWS), ("TOKENS", min(bucket.tokens, DECODE_TOKENS)), *w.defines.items())
        if bucket.tokens <= DECODE_TOKENS:
            spec, block = KernelSpec("ternary_matmul", "ternary_gemv", defines), (LANES, GEMV_ROWS, 1)
            return [Launch(spec, (ceil_div(w.rows, GEMV_ROWS), 1, 1), block, args)]
        grid = (ceil_div(w.rows, TILE_N), ceil_div(bucket.tokens, TILE_M), 1)
        return [Launch(KernelSpec("ternary_matmul", "ternary_gemm", defines), grid, (TILE_GROUP, 1, 1), args)]

    def dense_matmul(self, ctx: Context, op: DenseMatmul, bucket: Bucket) -> list[Launch]:
        weight = ctx.dense(op.weight)
        rows, cols = weight.shape
        x, out, n = ctx.tensors[op.x], ctx.tensors[op.out], np.int32(rows)
        if weight.dtype == "f16" and cols % 256 == 0 and cols <= 4096 and bucket.rows == 1 and not self._tensor_cores:
            spec = KernelSpec("dense_decode", "dense_decode", (("COLS", cols), ("TOKENS", 1), ("WARPS", WARPS)))
            grid, block = (2 * self._multiprocessors, 1, 1), (32 * WARPS, 1, 1)
            return [Launch(spec, grid, block, (ctx.step, x, weight.data, out, n), overlaps=True)]
        if self._splits(weight):
            return self._split_product(ctx, op, bucket, (x, x, np.float32(0)), norm=False)
        tokens = min(bucket.rows, DECODE_TOKENS)
        defines = (("WEIGHT_F16", int(weight.dtype == "f16")), ("ROWS", GEMV_ROWS), ("TOKENS", tokens))
        args = (ctx.step, x, weight.data, out, np.int32(cols), n)
        grid = (ceil_div(rows, GEMV_ROWS), ceil_div(bucket.rows, tokens), 1)
        return [Launch(KernelSpec("dense_matmul", "dense_matmul", defines), grid, (LANES, GEMV_ROWS, 1), args)]

    def norm_head(self, ctx: Context, group: NormHead, bucket: Bucket) -> list[Launch] | None:
        """A head whose rows are normalised while they are split into halves; None if they are not split."""
        if not self._splits(ctx.dense(group.dense.weight)):
            return None
        return self._split_product(ctx, group.dense, bucket, unnormed(ctx, group), norm=True)

    def _splits(self, weight: DenseBuffer) -> bool:
        return weight.dtype == "f16" and weight.shape[1] % 8 == 0 and self._tensor_cores

    def _split_product(
        self, ctx: Context, op: DenseMatmul, bucket: Bucket, given: tuple[Arg, ...], *, norm: bool
    ) -> list[Launch]:
        """``given`` are the rows, and the norm's weight and epsilon."""
        most, cols = ctx.program.limits.max_rows, ctx.dense(op.weight).shape[1]
        halves, scales = ctx.scratch("row halves", most * cols * 4), ctx.scratch("row scales", most * 4)
        product = self.dense_halves(ctx, op, bucket, halves, scales)
        split = KernelSpec("split_rows", "split_rows", (("COLS", cols), ("NORM", int(norm))))
        args = (ctx.step, ctx.offset("rows"), *given, halves, scales)
        return [Launch(split, (bucket.rows, 1, 1), (SPLIT_GROUP, 1, 1), args, overlaps=True), product]

    def dense_halves(
        self, ctx: Context, op: DenseMatmul, bucket: Bucket, halves: Buffer, scales: Buffer, *gate: Buffer
    ) -> Launch:
        """A product of f16 weights with rows split into two halves. With a gate, only if one of them is undecided."""
        weight, tiles = ctx.dense(op.weight), min(ceil_div(bucket.rows, 8), 8)
        rows, cols = weight.shape
        head_rows = HEAD_ROWS[tiles > 1]
        one = bucket.rows == 1 and cols <= MAX_ONE
        defines = (("COLS", cols), ("NT", tiles), ("GATED", len(gate)), ("ONE", int(one)))
        grid = (ceil_div(rows, head_rows), ceil_div(bucket.rows, 8 * tiles), 1)
        args = (ctx.step, halves, scales, weight.data, ctx.tensors[op.out], *gate, np.int32(rows))
        spec = KernelSpec("dense_mma", "dense_mma", defines)
        shared = 4 * cols if one else 2 * tiles * 16 * HEAD_PITCH[tiles > 1]
        return Launch(spec, grid, (head_rows, 1, 1), args, shared=shared, overlaps=True)

    def bounded(self, ctx: Context, name: str) -> bool:
        """Whether products need the greatest sum of magnitudes in a group of this int8 tensor, not its row sums."""
        products = [op for op in ctx.program.ops if isinstance(op, TernaryMatmul) and op.x == name]
        groups = {ternary(ctx, op.weights).group for op in products}
        return self._wgmma and groups == {BOUNDED_GROUP}

    def codes(self, ctx: Context, name: str, bucket: Bucket) -> Buffer | None:
        """An int8 tensor as :func:`codes_of`, where there are kernels that read it so."""
        able = self._wgmma if bucket.tokens == 1 else self._tensor_cores
        return codes_of(ctx, name, bucket) if able else None

    def row_sums(self, ctx: Context, op: TernaryMatmul, bucket: Bucket) -> list[Launch]:
        """The launch that computes the sums of the activations, if no operation of the program quantises them."""
        bounded = self.bounded(ctx, op.x)
        if quantised(op.x, ctx.program.ops) or (ternary(ctx, op.weights).group is not None and not bounded):
            return []
        defines = (("COLS", ctx.shape(op.x)[1]), ("BOUND", int(bounded)))
        spec = KernelSpec("row_sums", "row_sums", defines)
        args = (ctx.step, ctx.tensors[op.x], row_sums(ctx, op.x))
        return [Launch(spec, (bucket.tokens, 1, 1), (32, 1, 1), args, overlaps=True)]

    def decode(
        self,
        ctx: Context,
        op: TernaryMatmul,
        bucket: Bucket,
        source: ProductInput,
        out: Buffer,
        *,
        activation: str = "",
    ) -> Launch:
        w = ternary(ctx, op.weights)
        tiles, split = self._shape(w.rows, w.row_bytes, bucket.tokens)
        if w.group is not None:
            tiles, split = self._group_shape(w.rows, w.row_bytes)
        if self._wgmma and bucket.tokens == 1:
            ready = source.kind == 0
            codes = self.codes(ctx, op.x, bucket) if ready else None
            if shape := bits_shape(w, self._multiprocessors, BITS_SHARED, ready=ready, sliced=codes is not None):
                return bits_product(ctx, op, source, out, activation, shape, codes)
        cluster = bucket.tokens if source.kind else 1
        if cluster > 1:  # smaller blocks, so that no cluster has to wait for another
            tiles = min(tiles, ROOMY_WARPS // split or 1)
        while tiles > 1 and _decode_shared(w, bucket.tokens, tiles) > self._shared:
            tiles -= 1
        defines = {
            "COLS": w.cols,
            "ROW_BYTES": w.row_bytes,
            "GROUP": w.group or 0,
            "TOKENS": bucket.tokens,
            "TILES": tiles,
            "KSPLIT": split,
            "INPUT": source.kind,
            "CLUSTER": cluster,
            **product_defines(op, activation),
            **w.defines,
        }
        args = product_args(ctx, op, source, out)
        blocks = ceil_div(ceil_div(w.rows, TILE_ROWS), tiles)
        if w.group is not None:  # blocks that process the same number of tiles each
            most = (1 if tiles * split > WARPS else 2) * self._multiprocessors
            blocks = ceil_div(blocks, ceil_div(blocks, most))
        grid = (ceil_div(blocks, cluster) * cluster, 1, 1)
        spec = KernelSpec("ternary_decode", "ternary_decode", tuple(defines.items()))
        shared = _decode_shared(w, bucket.tokens, tiles)
        return Launch(spec, grid, (32 * tiles * split, 1, 1), args, shared=shared, overlaps=True)

    def pair(self, ctx: Context, op: TernaryMatmul, bucket: Bucket, pair: Pair) -> Launch | None:
        """The product ``op`` of few tokens together with another, or None if no kernel takes both."""
        both = replace(pair.first, rows=pair.first.rows + pair.second.rows)
        if self._wgmma and bucket.tokens == 1:
            source = ProductInput(ctx.tensors[op.x], scale=ctx.tensors[op.scale])
            codes = self.codes(ctx, op.x, bucket)
            if bits := bits_shape(both, self._multiprocessors, BITS_SHARED, ready=True, sliced=codes is not None):
                return bits_product(ctx, op, source, pair.convolved, "", bits, codes, pair)
        codes = self.codes(ctx, op.x, bucket)
        if few := self._few(both, bucket.tokens, ordered=codes is not None):
            return few_product(ctx, op, bucket.tokens, pair.convolved, "", few, codes, pair)
        return None

    def decodes(self, w: TernaryBuffer, bucket: Bucket) -> bool:
        """Whether ternary_decode supports a product of so many tokens."""
        few = self._tensor_cores and bucket.tokens <= DECODE_TOKENS
        few = few and not (self._few(w, bucket.tokens) or self._in_tiles(w, bucket.tokens))
        few = few and (w.group is None or (w.group in MMA_GROUPS and w.cols % STEP == 0))
        return few and ceil_div(w.row_bytes, 64) <= MAX_STEPS and _decode_shared(w, bucket.tokens, 1) <= self._shared

    def _few(self, w: TernaryBuffer, tokens: int, *, glu: bool = False, ordered: bool = False) -> FewShape | None:
        """The launch of ternary_few, or None if it does not compute a product of so many tokens."""
        supported = FEW_TOKENS if w.group is None else FEW_GROUP_TOKENS
        if not self._tensor_cores or tokens not in supported or self._in_tiles(w, tokens):
            return None
        return few_shape(w, tokens, self._multiprocessors, self._shared, glu=glu, ordered=ordered)

    def _slices(self, w: TernaryBuffer, tokens: int) -> SliceShape | None:
        """The launch of ternary_slices, or None if it does not compute a product of so many tokens."""
        if not self._wgmma or w.group is not None or tokens not in FEW_TOKENS:
            return None
        return slice_shape(w, tokens, self._multiprocessors)

    def _in_tiles(self, w: TernaryBuffer, tokens: int) -> bool:
        """Whether ternary_group_tiles computes a product of so many tokens."""
        return w.group is not None and tokens > FEW_TILES and self._copied(w)

    def _copied(self, w: TernaryBuffer) -> bool:
        """Whether there is a product of a matrix whose tiles the copy engine fetches."""
        return self._wgmma and (w.group is None or w.group in WGMMA_GROUPS) and w.row_bytes >= TILES_DEPTH * W_PITCH

    def tiles(self, w: TernaryBuffer) -> bool:
        """Whether the tiled products support a matrix."""
        if w.group is not None and (w.group not in MMA_GROUPS or w.cols % PANEL):
            return False
        return self._tensor_cores and w.cols % 16 == 0

    def quantises(self, ctx: Context, op: TernaryMatmul, bucket: Bucket) -> bool:
        """Whether ternary_decode can also normalise and quantise its input."""
        return self.decodes(ternary(ctx, op.weights), bucket) and (bucket.tokens == 1 or self._clusters)

    def tiled(self, ctx: Context, op: TernaryMatmul, bucket: Bucket, out: Buffer, *, activation: str = "") -> Launch:
        w = ternary(ctx, op.weights)
        if slices := self._slices(w, bucket.tokens):
            return slice_product(ctx, op, bucket.tokens, out, activation, slices)
        if self._wgmma and (group := few_groups_shape(w, bucket.tokens, self._multiprocessors)):
            bounded = self.bounded(ctx, op.x)
            return few_groups_product(ctx, op, bucket.tokens, out, activation, group, bounded=bounded)
        codes = self.codes(ctx, op.x, bucket)
        if few := self._few(w, bucket.tokens, glu=bool(activation), ordered=codes is not None):
            return few_product(ctx, op, bucket.tokens, out, activation, few, codes)
        if self._in_tiles(w, bucket.tokens) or (w.group is None and bucket.tokens > MANY_TOKENS and self._copied(w)):
            return self._large(ctx, op, bucket, out, activation)
        token_tile = TOKEN_TILES[bucket.tokens > TOKEN_TILES[0] and w.group is None]
        token_tiles = ceil_div(bucket.tokens, token_tile)
        defines = {
            "COLS": w.cols,
            "ROW_BYTES": w.row_bytes,
            "GROUP": w.group or 0,
            "BN": token_tile,
            **product_defines(op, activation),
            **w.defines,
        }
        args = tiled_args(ctx, op, out)
        if self._wgmma and w.group is None:
            row_tile = 256 if ceil_div(w.rows, 256) * token_tiles >= self._multiprocessors else 128
            row_tiles = ceil_div(w.rows, row_tile)
            blocks, depth = 5 * self._multiprocessors // 2, w.row_bytes // 32

            def fits(n: int) -> bool:
                grid = row_tiles * token_tiles * n
                return grid <= blocks and depth // n >= (MIN_TILES if grid <= self._multiprocessors else 2 * MIN_TILES)

            split = largest(4, fits)
            tiles = ("BM", row_tile), ("KSPLIT", split if row_tile == 128 else 1)
            spec = KernelSpec("ternary_wgmma", "ternary_wgmma", (*defines.items(), *tiles))
            shared = 1024 + WGMMA_STAGES * (token_tile * 128 + row_tile * W_PITCH)
            grid = (row_tiles, token_tiles, tiles[1][1])
            return Launch(spec, grid, (2 * row_tile, 1, 1), args, shared=shared, overlaps=True)
        row_tile = 128 if ceil_div(w.rows, 128) * token_tiles >= self._multiprocessors * 3 // 4 else 64
        spec = KernelSpec("ternary_gemm", "ternary_mma", (*defines.items(), ("BM", row_tile)))
        shared = STAGES * (token_tile * X_PITCH + row_tile * W_PITCH)
        grid = (ceil_div(w.rows, row_tile), token_tiles, 1)
        return Launch(spec, grid, (256, 1, 1), args, shared=shared, overlaps=True)

    def _large(self, ctx: Context, op: TernaryMatmul, bucket: Bucket, out: Buffer, activation: str) -> Launch:
        """By ternary_tiles, or by ternary_group_tiles, which also keeps a tile's results in shared memory."""
        w, glu = ternary(ctx, op.weights), bool(activation)
        tile: ProductTile
        if w.group is None:
            tile = product_tile(TILES, w.rows, bucket.tokens, w.row_bytes // W_PITCH, self._multiprocessors)
            name, results, threads, resident = "ternary_tiles", 0, 2 * tile.rows, 1
            stage = tile.tokens * PANEL + tile.rows * W_PITCH
        else:
            tile = grouped = group_tile(w.rows, bucket.tokens, self._multiprocessors)
            name, threads, resident = "ternary_group_tiles", 2 * tile.rows + 128, grouped.resident
            results = tile.rows // 64 * tile.tokens * ((32 if glu else 64) + 4) * 4
            stage = w.group // 64 * (tile.tokens * PANEL + tile.rows * W_PITCH) + ALIGNMENT  # two groups, and barriers
        stages = min(TILES_STAGES, (TILES_SHARED // resident - ALIGNMENT - results) // stage)
        defines = {
            "COLS": w.cols,
            "ROW_BYTES": w.row_bytes,
            **product_defines(op, activation),
            **w.defines,
            "BM": tile.rows,
            "BN": tile.tokens,
            "STAGES": stages,
        }
        x = TiledMatrix(ctx.tensors[op.x], ctx.shape(op.x)[0], w.cols, tile.tokens, PANEL)
        codes = TiledMatrix(w.codes, w.rows, w.row_bytes, tile.rows // 2 if glu else tile.rows, W_PITCH)
        args = (ctx.step, x, codes, ctx.tensors[op.scale], row_sums(ctx, op.x), w.scales, out, np.int32(w.rows))
        tiles = ceil_div(w.rows, tile.rows) * ceil_div(bucket.tokens, tile.tokens)
        grid, block = (min(tiles, resident * self._multiprocessors), 1, 1), (threads, 1, 1)
        if w.group is not None:
            bounded = bucket.tokens > FEW_GROUP_TOKENS[-1] and self.bounded(ctx, op.x)
            defines |= {"GROUP": w.group, "BOUND": int(bounded), "RESIDENT": resident}
        shared = ALIGNMENT + stages * stage + results
        return Launch(KernelSpec(name, name, tuple(defines.items())), grid, block, args, shared=shared, overlaps=True)

    def _shape(self, rows: int, row_bytes: int, tokens: int) -> tuple[int, int]:
        """Row tiles per block, and warps that share a tile's K: enough warps to have all weight loads in flight."""
        tiles, steps = ceil_div(rows, TILE_ROWS), ceil_div(row_bytes, 64)
        wanted = max(1, round(self._multiprocessors * (WARPS if tokens > 1 else FEW_WARPS) / tiles))
        each = max(1, steps // min(wanted, steps))
        split = min(ceil_div(steps, min(each, 6)), MAX_WARPS)
        least, most = 1, MAX_WARPS if tokens > 1 else ROOMY_WARPS
        if tokens > 2:  # then each block's copy of x costs more than a warp's share of K
            least, split = 2, min(split, max(5, ceil_div(steps, 6)))
        return max(min(least, MAX_WARPS // split), min(round(tiles / self._multiprocessors), most // split), 1), split

    def _group_shape(self, rows: int, row_bytes: int) -> tuple[int, int]:
        """As :meth:`_shape`, for blocks that take tile after tile: 16 warps where there are few tiles, else 8."""
        steps = ceil_div(row_bytes, 64)
        few = ceil_div(rows, TILE_ROWS) <= 2 * self._multiprocessors
        split = min(max(ceil_div(steps, 2 if few else 4), ceil_div(steps, 6)), MAX_WARPS)
        return max((MAX_WARPS if few else WARPS) // split, 1), split


def shared_bytes(capability: tuple[int, int]) -> int:
    """Maximum bytes of shared memory that a launch may request."""
    return 1024 * SHARED.get(capability, MIN_SHARED)


def _decode_shared(w: TernaryBuffer, tokens: int, tiles: int) -> int:
    """Bytes of shared memory of a block of ternary_decode: the activations, and terms of two tiles, used in turn."""
    terms = 0 if w.group is None else 2 * tiles * TILE_ROWS * (w.cols // w.group | 1) * 4
    return tokens * (ceil_div(w.row_bytes // 16, 4) * 256 + 64 + terms)


def largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest power of two up to ``most`` that fits, or 1. Clusters of other sizes were slower."""
    n = power_of_two(most)
    while n > 1 and not fits(n):
        n //= 2
    return n
