// ternary_matmul of weights with a scale for each GROUP of columns (32, 64, 128 or 256), for up to 8 tokens, on the matrix units. GLU,
// TILES and KSPLIT as in ternary_decode_mma, and INPUT for one token: several are int8.
//
// A warp's step is 256 columns of a tile of 16 rows: two blocks of 128, each of them two of four work-items' 16 bytes of codes. A
// token has two columns of the product, one for each block: in each, the other block's activations are zeros. So four tokens fill
// the columns, and more take a second pass. Codes and scales of DEPTH steps are on their way at a time.
//
// TABLE: dense_matmul of a ternary table for up to TOKENS rows, whose elements are three digits each, from table_digits: a row takes a
// pass, its digits take the places of tokens, and `scale` has the value of a unit for each row and group. KSPLIT is 1.
//
// PAIR: the tiles of the second matrix are behind those of the first, whose rows are a multiple of 16.
//
// KSPLIT warps take the steps of a tile by turns. With one, a work-item adds the terms of its rows and tokens as they come. With
// more, the terms of SPAN steps of each warp go through local memory, where one work-item adds those of two rows and a token.
#include "nvidia/warps.clh"

#pragma OPENCL FP_CONTRACT OFF  // the contract rounds each product and each sum separately

#define WARPS (TILES * KSPLIT)
#define THREADS (WARP * WARPS)
#define CHUNKS (ROW_BYTES / 16)
#include "groups.clh"
#include "group_terms.clh"
#include "nvidia/ternary_tile.clh"
#include "pair.clh"

#define STEPS ((CHUNKS + 3) / 4)
#define ITERS ((STEPS + KSPLIT - 1) / KSPLIT)
#define PER (256 / GROUP)                     /* groups of a step */
#define SETS (GROUP < 128 ? 128 / GROUP : 1) /* groups of a block, or the one of two */
#if TABLE
#define PASSES TOKENS
#else
#define PASSES ((TOKENS + 3) / 4)
#endif
#define BUFFERS (SPAN < ITERS ? 2 : 1)
#define PITCH (SPAN * KSPLIT * PER | 1) /* of the terms of a row and token, odd so that neighbours fall into different banks */
#define RESULTS (KSPLIT > 1 ? 1 : PASSES) /* pairs of rows with a token, of a work-item */

#if PER == 1
typedef ushort Units;
#elif PER == 2
typedef ushort2 Units;
#elif PER == 4
typedef ushort4 Units;
#else
typedef ushort8 Units;
#endif

// The scales of a step of a row, whose first has the number `from`.
INLINED Units units_at(global const ushort *w_scale, size_t from, int step) {
#if COUNT % PER == 0
    return ((global const Units *)w_scale)[from / PER + min(step, COUNT / PER - 1)];
#else
    Units units;
    UNROLL
    for (int g = 0; g < PER; g++) ((ushort *)&units)[g] = w_scale[from + min(step * PER + g, COUNT - 1)];
    return units;
#endif
}

inline int4 add_block(int4 sums, uint4 low, uint4 high, uint4 x, int plane) {
    uint a0 = TOP_PAIRS(low.x, plane), a1 = TOP_PAIRS(high.x, plane), a2 = TOP_PAIRS(low.y, plane), a3 = TOP_PAIRS(high.y, plane);
    sums = mma_signed(sums, a0, a1, a2, a3, x.x, x.y);
    a0 = TOP_PAIRS(low.z, plane), a1 = TOP_PAIRS(high.z, plane), a2 = TOP_PAIRS(low.w, plane), a3 = TOP_PAIRS(high.w, plane);
    return mma_signed(sums, a0, a1, a2, a3, x.z, x.w);
}


// The sum of group g of a step in one row, from what the product has of the row's two columns.
inline int sum_of(int first, int second, int g) {
#if GROUP == 256
    return first + second - START;
#else
    return g < SETS ? first : second;
#endif
}

kernel __attribute__((reqd_work_group_size(THREADS, 1, 1))) OF_WARPS void ternary_groups_mma(
    global const int *step, global const void *input, global const float *scale, global const int *x_sums,
    global const float *norm, float eps, global const uint4 *codes, global const ushort *w_scale, global float *out, int rows
        PAIR_ARGS(uint4, ushort)) {
    int item = get_local_id(0), warp = item / WARP, lane = item % WARP, group = lane / 4, quarter = lane % 4;
    int slot = warp / KSPLIT, part = warp % KSPLIT, tile = get_group_id(0) * TILES + slot;
#if TABLE
    int first_row = get_group_id(1) * TOKENS, tokens = STEP_ROWS(step) - first_row;
    if (tokens <= 0) return;
#else
    int tokens = STEP_TOKENS(step);
#endif
#if PAIR
    int first_tiles = rows / 16, convolves = tile < first_tiles;
    if (!convolves) tile -= first_tiles, codes = codes2, w_scale = w_scale2, out = out2, rows = rows2;
#endif
    int2 at = min(tile_rows(tile, rows, GLU), rows - 1);
    global const uint4 *codes_low = codes + (size_t)at.x * CHUNKS, *codes_high = codes + (size_t)at.y * CHUNKS;
    uint4 low[DEPTH], high[DEPTH];
    Units units_low[DEPTH], units_high[DEPTH];
#define FETCH(place, i)                                                                                \
    {                                                                                                  \
        int next = part + (i) * KSPLIT, chunk = min(next * 4 + quarter, CHUNKS - 1);                   \
        low[place] = stream(codes_low + chunk), high[place] = stream(codes_high + chunk);              \
        units_low[place] = units_at(w_scale, (size_t)at.x * COUNT, next);                              \
        units_high[place] = units_at(w_scale, (size_t)at.y * COUNT, next);                             \
    }
    UNROLL
    for (int i = 0; i < DEPTH && i < ITERS; i++) FETCH(i, i)

    // The pairs of rows and the tokens whose terms this work-item adds.
#if KSPLIT > 1
    local float terms[BUFFERS][TILES][2][8 * TOKENS][PITCH];
    int pair = part * WARP + lane, holds = pair < 8 * TOKENS;
    int2 to = tile_pair(tile, min(pair / TOKENS, 7), rows, GLU);
#define TOKEN(n) (pair % TOKENS)
#else
    int holds = 1;
    int2 to = tile_pair(tile, group, rows, GLU);
#if TABLE
#define TOKEN(n) (n)
#else
#define TOKEN(n) (quarter + 4 * (n))
#endif
#endif
#define STORES(n) (holds && TOKEN(n) < TOKENS && TOKEN(n) < tokens)
    float total[RESULTS][2], old[RESULTS][2];
    UNROLL
    for (int n = 0; n < RESULTS; n++) {
        total[n][0] = total[n][1] = 0.0f;
#if ADD
        old[n][0] = STORES(n) && to.x < rows ? out[(size_t)TOKEN(n) * rows + to.x] : 0.0f;
        old[n][1] = STORES(n) && to.y < rows ? out[(size_t)TOKEN(n) * rows + to.y] : 0.0f;
#endif
    }
#if PAIR
    float before[RESULTS][2][TAPS - 1], weights[RESULTS][2][TAPS];
    UNROLL
    for (int n = 0; n < RESULTS; n++) {
        if (!STORES(n) || !convolves) continue;
        UNROLL
        for (int h = 0; h < 2; h++)
            fetch_column(before[n][h], weights[n][h], step, token_seq, state_from, state_to, TOKEN(n), h ? to.y : to.x, conv_weight,
                         conv_state, rows);
    }
#endif

#if INPUT
    local uint4 x[X_WORDS(CHUNKS) / 4];
    local float2 found[WARPS];
    local int found_sums[WARPS];
    float4 v[VECTORS_OF(COLS)], gain[VECTORS_OF(COLS)];
    FETCH_ROW(gain, norm, INPUT == 2, COLS)
    FETCH_ROW(v, input, 1, COLS)
    float x_scale = quantise_row(v, gain, eps, INPUT == 2, COLS, X_WORDS(CHUNKS), (local uint *)x, found, found_sums).x;
#define X_SCALE(n) x_scale
#define X_AT(m, now, plane) x[(now) * 16 + quarter / 2 * 8 + quarter % 2 + 2 * (plane)]
#else
#if TABLE
#define X_SCALE(n) 1.0f
#else
#define X_SCALE(n) scale[TOKEN(n)]
#endif
#define X_AT(m, now, plane) load_x(input, m, (now) * 256 + quarter / 2 * 128 + quarter % 2 * 16 + 32 * (plane))
#endif

    for (int first = 0; first < ITERS; first += DEPTH) {
        UNROLL
        for (int j = 0; j < DEPTH; j++) {
            int i = first + j, now = part + i * KSPLIT;
            if (ITERS % DEPTH && i >= ITERS) break;
            uint4 a = SIGNED_CODES(low[j]), b = SIGNED_CODES(high[j]);
            Units scales[2] = {units_low[j], units_high[j]};
            if (i + DEPTH < ITERS) FETCH(j, i + DEPTH)
            int4 sums[PASSES][SETS];
            UNROLL
            for (int n = 0; n < PASSES * SETS; n++) sums[n / SETS][n % SETS] = (int4)(START);
            UNROLL
            for (int plane = 0; plane < 4; plane++) {
                UNROLL
                for (int n = 0; n < PASSES; n++) {
#if TABLE
                    int m = (first_row + n) * 3 + group / 2, there = group / 2 < 3 && n < tokens;
#else
                    int m = group / 2 + 4 * n, there = m < TOKENS && m < tokens;
#endif
                    uint4 v = there && quarter / 2 == group % 2 && now * 4 + quarter < CHUNKS ? X_AT(m, now, plane) : (uint4)(0);
                    sums[n][plane * SETS / 4] = add_block(sums[n][plane * SETS / 4], a, b, v, plane);
                }
            }
            UNROLL
            for (int n = 0; n < PASSES; n++) {
                UNROLL
                for (int g = 0; g < PER; g++) {
                    int4 sum = sums[n][g % SETS];
                    float unit_low = half_of(((const ushort *)&scales[0])[g]), unit_high = half_of(((const ushort *)&scales[1])[g]);
                    int sum_low = sum_of(sum.x, sum.y, g), sum_high = sum_of(sum.z, sum.w, g);
#if KSPLIT > 1
                    if (quarter + 4 * n >= TOKENS) continue;
                    local float(*to)[8 * TOKENS][PITCH] = terms[BUFFERS > 1 ? i / SPAN % 2 : 0][slot];
                    int pair_of = group * TOKENS + quarter + 4 * n, place = (i % SPAN * KSPLIT + part) * PER + g;
                    to[0][pair_of][place] = AS_FLOAT(sum_low) * unit_low, to[1][pair_of][place] = AS_FLOAT(sum_high) * unit_high;
#else
                    if (now * PER + g >= COUNT) continue;
#if TABLE
                    float unit = n < tokens ? scale[(size_t)(first_row + n) * COUNT + now * PER + g] : 0.0f;
                    unit_low *= unit, unit_high *= unit;
#endif
                    total[n][0] = add_term(total[n][0], sum_low, unit_low), total[n][1] = add_term(total[n][1], sum_high, unit_high);
#endif
                }
            }
#if KSPLIT > 1
            if ((i + 1) % SPAN && i + 1 < ITERS) continue;
            barrier(CLK_LOCAL_MEM_FENCE);
            if (!holds) continue;
            local const float *from_low = terms[BUFFERS > 1 ? i / SPAN % 2 : 0][slot][0][pair], *from_high = from_low + 8 * TOKENS * PITCH;
            int before = i / SPAN * SPAN * KSPLIT * PER;
            UNROLL_BY_8
            for (int g = 0; g < SPAN * KSPLIT * PER; g++) {
                if (before + g >= COUNT) break;
                total[0][0] += from_low[g], total[0][1] += from_high[g];
            }
#endif
        }
    }
    UNROLL
    for (int n = 0; n < RESULTS; n++) {
#if TABLE
        float digit = quarter == 0 ? 16384.0f : quarter == 1 ? 128.0f : quarter == 2 ? 1.0f : 0.0f;
        UNROLL
        for (int h = 0; h < 2; h++) {
            total[n][h] *= digit;
            total[n][h] += shuffle_xor(total[n][h], 1);
            total[n][h] += shuffle_xor(total[n][h], 2);
        }
        if (quarter) continue;
#endif
        if (!STORES(n)) continue;
        float factor = X_SCALE(n) * UNFOLD, value_low = total[n][0] * factor, value_high = total[n][1] * factor;
#if GLU
        if (to.x < rows / 2) out[(size_t)TOKEN(n) * (rows / 2) + to.x] = act(value_low) * value_high;
#elif ADD
        if (to.x < rows) out[(size_t)TOKEN(n) * rows + to.x] = old[n][0] + value_low;
        if (to.y < rows) out[(size_t)TOKEN(n) * rows + to.y] = old[n][1] + value_high;
#else
#if PAIR
        if (convolves) {
            value_low = convolved(before[n][0], weights[n][0], step, token_seq, state_to, TOKEN(n), to.x, conv_state, rows, value_low);
            value_high = convolved(before[n][1], weights[n][1], step, token_seq, state_to, TOKEN(n), to.y, conv_state, rows, value_high);
        }
#endif
#if TABLE
        global float *row = out + (size_t)(first_row + n) * rows;
#else
        global float *row = out + (size_t)TOKEN(n) * rows;
#endif
        if (to.x < rows) row[to.x] = value_low;
        if (to.y < rows) row[to.y] = value_high;
#endif
    }
}
