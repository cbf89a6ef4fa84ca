// A layer of a step of one token in a single launch, since a launch costs the host more than most of these products take.
//
// GROUPS work-groups, all of which must run at once, go through five phases: the products q, k and v; attention, with the rotation
// and the cache's new entry; the product o; gates and ups; down. Each group computes norms and quantisation for itself. Between
// phases all groups wait for one another, and each fetches its codes for the next phase first.
#include "nvidia/warps.clh"

#pragma OPENCL FP_CONTRACT OFF  // the contract rounds each product and the sum of `add` separately

#define THREADS (WARPS * WARP)
#define ROPE 1
#include "nvidia/attention_split.clh"
#include "nvidia/ternary_tile.clh"

#define ATTENTION (HEAD_GROUP * KV_HEADS * DIM)
#define QKV (ATTENTION + 2 * KV_HEADS * DIM)
#define CHUNKS(cols) (((cols) + 127) / 128 * 2)
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
// Tiles of W that a group takes at a time, the warps that share one (enough for its codes to fit their registers), and how often.
#define MAX_STEPS 10
#define TILES(rows) (((rows) + 15) / 16)
#define SLOTS(rows, cols) MIN((TILES(rows) + GROUPS - 1) / GROUPS, WARPS / ((TILE_ITERS(CHUNKS(cols), 1) + MAX_STEPS - 1) / MAX_STEPS))
#define SPLIT(rows, cols) (WARPS / SLOTS(rows, cols))
#define ROUNDS(rows, cols) ((TILES(rows) + SLOTS(rows, cols) * GROUPS - 1) / (SLOTS(rows, cols) * GROUPS))
#define ITERS(rows, cols) TILE_ITERS(CHUNKS(cols), SPLIT(rows, cols))
#define MAX_ITERS MAX(MAX(ITERS(QKV, WIDTH), ITERS(WIDTH, ATTENTION)), MAX(ITERS(2 * FFN, WIDTH), ITERS(WIDTH, FFN)))
#define MAX_VECTORS MAX(VECTORS_OF(WIDTH), MAX(VECTORS_OF(ATTENTION), VECTORS_OF(FFN)))
// Attention and the products use the same local memory.
#define ATTENTION_FLOATS (WARPS * HEAD_GROUP * DIM + 2 * WARPS * 8)
#define X_FLOATS MAX(X_WORDS(CHUNKS(WIDTH)), MAX(X_WORDS(CHUNKS(ATTENTION)), X_WORDS(CHUNKS(FFN))))
#define SPACE MAX(ATTENTION_FLOATS, X_FLOATS + WARPS * 16)

// Waits until every group is here. `count` begins at zero.
inline void wait_for_all(volatile global int *count) {
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    if (get_local_id(0) == 0) {
        arrive(count);
        while (arrived(count) < GROUPS) {}
    }
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
}

// This work-item's rows of the tile that its warp takes in a round.
INLINED int2 my_rows(int round, const int rows, const int cols, const int glu) {
    int slot = get_local_id(0) / WARP / SPLIT(rows, cols);
    return tile_rows(get_group_id(0) + (round * SLOTS(rows, cols) + slot) * GROUPS, rows, glu);
}

INLINED void fetch(uint4 *low, uint4 *high, float *scales, int2 at, global const uint4 *codes, global const float *w_scale, const int rows, const int cols) {
    fetch_tile(low, high, codes, at, rows, get_local_id(0) / WARP % SPLIT(rows, cols), CHUNKS(cols), SPLIT(rows, cols));
    scales[0] = w_scale[min(at.x, rows - 1)];
    scales[1] = w_scale[min(at.y, rows - 1)];
}

// The product of a quantised row, in local memory, with scale and sum `made`; the codes of the first round are there.
INLINED void product(uint4 *low, uint4 *high, float *scales, float2 made, global const uint4 *codes, global const float *w_scale,
                     local const uint4 *x, local int2 *parts, global float *out, const int rows, const int cols, const int glu, const int add) {
    int item = get_local_id(0), warp = item / WARP, lane = item % WARP, slot = warp / SPLIT(rows, cols), part = warp % SPLIT(rows, cols);
    for (int round = 0; round < ROUNDS(rows, cols); round++) {
        int2 at = my_rows(round, rows, cols, glu);
        if (round > 0) fetch(low, high, scales, at, codes, w_scale, rows, cols);
        int mine = slot < SLOTS(rows, cols) && part == 0 && lane % 4 == 0 && at.x < (glu ? rows / 2 : rows), both = glu || at.y < rows;
        float old_low = add && mine ? fresh(out + at.x) : 0.0f, old_high = add && mine && both ? fresh(out + at.y) : 0.0f;
        int4 total = multiply_tile(low, high, x, part, CHUNKS(cols), SPLIT(rows, cols));
        int2 sum = total.xz;
        if (SPLIT(rows, cols) > 1) {
            if (lane % 4 == 0) parts[warp * 8 + lane / 4] = sum;
            barrier(CLK_LOCAL_MEM_FENCE);
            if (mine) {
                UNROLL
                for (int i = 1; i < SPLIT(rows, cols); i++) sum += parts[(warp + i) * 8 + lane / 4];
            }
            if (ROUNDS(rows, cols) > 1) barrier(CLK_LOCAL_MEM_FENCE);
        }
        if (mine) {
            float value_low = (float)(sum.x - (int)made.y) * (made.x * scales[0]), value_high = (float)(sum.y - (int)made.y) * (made.x * scales[1]);
            if (glu) {
                out[at.x] = act(value_low) * value_high;
            } else {
                out[at.x] = add ? old_low + value_low : value_low;
                if (both) out[at.y] = add ? old_high + value_high : value_high;
            }
        }
    }
}

kernel __attribute__((reqd_work_group_size(THREADS, 1, 1))) OF_WARPS void layer_mma(
    global const int *step, int token_seq, int seq_begin, int seq_len, int block_table, int max_blocks, global float *x, global float *qkv,
    global KV *keys, global KV *values, global const float *cosines, global const float *sines, global float *parts,
    global float *products, volatile global int *counts, global const float4 *norm0, float eps0, global const uint4 *codes0,
    global const float *scale0, global const float4 *norm1, float eps1, global const uint4 *codes1, global const float *scale1,
    global const float4 *norm2, float eps2, global const uint4 *codes2, global const float *scale2, global const float4 *norm3, float eps3,
    global const uint4 *codes3, global const float *scale3) {
    local uint4 space[(SPACE + 3) / 4];
    local float2 found[WARPS];
    local int found_sums[WARPS];
    local int2 *tile_parts = (local int2 *)((local float *)space + X_FLOATS);
    int item = get_local_id(0), id = get_group_id(0);
    uint4 low[MAX_ITERS], high[MAX_ITERS];
    float scales[2];
    float4 v[MAX_VECTORS], gain[MAX_VECTORS];
    uint4 key[2][DIM_CHUNKS], value[4][HALVES];
    if (id == 0 && item == 0) counts[3] = 0;  // no group is there yet, nor of the launch before any more

    FETCH_ROW(v, x, 1, WIDTH)
    FETCH_ROW(gain, norm0, NORM0, WIDTH)
    fetch(low, high, scales, my_rows(0, QKV, WIDTH, 0), codes0, scale0, QKV, WIDTH);
    float2 made = quantise_row(v, gain, eps0, NORM0, WIDTH, X_WORDS(CHUNKS(WIDTH)), (local uint *)space, found, found_sums);
    product(low, high, scales, made, codes0, scale0, space, tile_parts, qkv, QKV, WIDTH, 0, 0);
    int length = token_position(step, token_seq, seq_begin, seq_len, 0) + 1;
    global const int *table = step + block_table + step[token_seq] * max_blocks;
    int span = ((length + TILE - 1) / TILE + SPLITS - 1) / SPLITS * TILE;
#define FETCH_CACHED(task)                                                                                                            \
    fetch_cached(key, value, table, (task) / KV_HEADS * span + item / WARP * TILE, STORED(min(length, ((task) / KV_HEADS + 1) * span)), \
                 (global const ushort *)keys, (global const ushort *)values, KV_HEADS, (task) % KV_HEADS)
    if (id < KV_HEADS * SPLITS) FETCH_CACHED(id);  // left there by an earlier step
    fetch(low, high, scales, my_rows(0, WIDTH, ATTENTION, 0), codes1, scale1, WIDTH, ATTENTION);
    FETCH_ROW(gain, norm1, NORM1, ATTENTION)
    wait_for_all(counts);

    for (int task = id; task < KV_HEADS * SPLITS; task += GROUPS) {
        local float(*warp_sums)[HEAD_GROUP][DIM] = (local float(*)[HEAD_GROUP][DIM])space;
        local float(*warp_max)[8] = (local float(*)[8])((local float *)space + WARPS * HEAD_GROUP * DIM), (*warp_total)[8] = warp_max + WARPS;
        int kv_head = task % KV_HEADS, begin = task / KV_HEADS * span, end = min(length, begin + span);
        if (task != id) FETCH_CACHED(task);
        attend(key, value, table, length, begin, end, qkv, (global ushort *)keys, (global ushort *)values, cosines, sines,
               HEAD_GROUP * KV_HEADS, KV_HEADS, kv_head, warp_sums, warp_max, warp_total);
        barrier(CLK_LOCAL_MEM_FENCE);
        merge_warps(parts + (kv_head * SPLITS + task / KV_HEADS) * PART, 0, warp_sums, warp_max, warp_total);
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    wait_for_all(counts + 1);

    UNROLL
    for (int i = 0; i < VECTORS_OF(ATTENTION); i++) {
        int k = item + i * THREADS, head = min(k, ATTENTION / 4 - 1) * 4 / DIM, h = head % HEAD_GROUP;
        global const float *part = parts + head / HEAD_GROUP * SPLITS * PART;
        float4 sums[SPLITS];
        float tops[SPLITS], totals[SPLITS], top = LOWEST, total = 0.0f;
        UNROLL
        for (int s = 0; s < SPLITS; s++) {
            sums[s] = fresh4((global const float4 *)(part + s * PART + h * DIM) + k % (DIM / 4));
            tops[s] = fresh(part + s * PART + HEAD_GROUP * DIM + h);
            totals[s] = fresh(part + s * PART + HEAD_GROUP * (DIM + 1) + h);
            top = fmax(top, tops[s]);
        }
        v[i] = (float4)(0.0f);
        UNROLL
        for (int s = 0; s < SPLITS; s++) {
            float scale = power(tops[s] - top);
            v[i] += sums[s] * scale;
            total += totals[s] * scale;
        }
        v[i] = k < ATTENTION / 4 ? v[i] / total : (float4)(0.0f);
    }
    made = quantise_row(v, gain, eps1, NORM1, ATTENTION, X_WORDS(CHUNKS(ATTENTION)), (local uint *)space, found, found_sums);
    product(low, high, scales, made, codes1, scale1, space, tile_parts, x, WIDTH, ATTENTION, 0, 1);
    fetch(low, high, scales, my_rows(0, 2 * FFN, WIDTH, 1), codes2, scale2, 2 * FFN, WIDTH);
    FETCH_ROW(gain, norm2, NORM2, WIDTH)
    wait_for_all(counts + 2);

    UNROLL
    for (int i = 0; i < VECTORS_OF(WIDTH); i++) {
        int k = item + i * THREADS;
        v[i] = k < WIDTH / 4 ? fresh4((global const float4 *)x + k) : (float4)(0.0f);
    }
    made = quantise_row(v, gain, eps2, NORM2, WIDTH, X_WORDS(CHUNKS(WIDTH)), (local uint *)space, found, found_sums);
    product(low, high, scales, made, codes2, scale2, space, tile_parts, products, 2 * FFN, WIDTH, 1, 0);
    fetch(low, high, scales, my_rows(0, WIDTH, FFN, 0), codes3, scale3, WIDTH, FFN);
    FETCH_ROW(gain, norm3, NORM3, FFN)
    wait_for_all(counts + 3);

    if (id == 0 && item < 3) counts[item] = 0;  // all groups have passed them
    UNROLL
    for (int i = 0; i < VECTORS_OF(FFN); i++) {
        int k = item + i * THREADS;
        v[i] = k < FFN / 4 ? fresh4((global const float4 *)products + k) : (float4)(0.0f);
    }
    made = quantise_row(v, gain, eps3, NORM3, FFN, X_WORDS(CHUNKS(FFN)), (local uint *)space, found, found_sums);
    product(low, high, scales, made, codes3, scale3, space, tile_parts, x, WIDTH, FFN, 0, 1);
}
