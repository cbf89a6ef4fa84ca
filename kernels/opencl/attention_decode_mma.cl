// attention_decode over an f16 cache on the matrix units: a warp takes 16 positions at a time. Keys are the rows of one product,
// S = K Qt, and values of the other, O = Vt Pt, so that the HEAD_GROUP query heads of a key/value head are the 8 columns of both.
// All comes 16 bytes a work-item as it lies in the cache: of keys in an order of dimensions that q follows, of values with
// neighbouring positions paired in registers. q is the sum of two halves.
//
// Grid: [key/value heads, tokens, SPLITS]. The work-group that finishes last for a token and key/value head merges the splits.
#define CHUNKS (DIM / 32)
#define HALVES (DIM / 64)
#define TILE 16
#define THREADS (WARPS * WARP)
#define AT_ONCE (SPLITS < 8 ? SPLITS : 8) /* of the splits, whose number is a power of two */

inline uint4 eight(const float *v) { return (uint4)(halves(v[0], v[1]), halves(v[2], v[3]), halves(v[4], v[5]), halves(v[6], v[7])); }

inline void load_eight(float *v, global const float *from) {
    float4 low = ((global const float4 *)from)[0], high = ((global const float4 *)from)[1];
    v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w, v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
}

inline uint word(uint4 v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
inline uint low_halves(uint a, uint b) { return (a & 0xFFFFu) | b << 16; }
inline uint high_halves(uint a, uint b) { return a >> 16 | (b & 0xFFFF0000u); }

// A work-item's dimensions of a head, 32 c + 8 quarter + 0 ... 7, rotated by the angles of the same.
inline void rotate(float *v, const float *cosine, const float *sine) {
    UNROLL
    for (int i = 0; i < CHUNKS * 4; i++) {
        int a = NEOX ? i : i * 2, b = NEOX ? i + CHUNKS * 4 : i * 2 + 1;
        float old = v[a];
        v[a] = old * cosine[i] - v[b] * sine[i];
        v[b] = v[b] * cosine[i] + old * sine[i];
    }
}

kernel __attribute__((reqd_work_group_size(THREADS, 1, 1))) OF_WARPS void attention_decode_mma(
    global const int *step, int token_seq, int seq_begin, int seq_len, int block_table, int max_blocks, global const float *qkv,
    global KV *cached_keys, global KV *cached_values, global const float *cosines, global const float *sines, global float *out,
    volatile global float *parts, volatile global int *arrivals, int heads, int kv_heads) {
    local float warp_sums[WARPS][HEAD_GROUP][DIM];
    local float warp_max[WARPS][8], warp_total[WARPS][8];
    local int last;
    global ushort *keys = (global ushort *)cached_keys, *values = (global ushort *)cached_values;
    int kv_head = get_group_id(0), m = get_group_id(1), split = get_group_id(2), item = get_local_id(0);
    int warp = item / WARP, lane = item % WARP, group = lane / 4, quarter = lane % 4;
    if (m >= STEP_TOKENS(step)) return;
    int length = token_position(step, token_seq, seq_begin, seq_len, m) + 1;
    global const int *table = step + block_table + step[token_seq + m] * max_blocks;
    int span = ((length + TILE - 1) / TILE + SPLITS - 1) / SPLITS * TILE;
    int begin = split * span, end = min(length, begin + span), stored = ROPE ? min(end, length - 1) : end;
#define PLACE(p) ((((size_t)table[(p) / BLOCK] * BLOCK + (p) % BLOCK) * kv_heads + kv_head) * DIM)

    global const float *row = qkv + (size_t)m * (heads + 2 * kv_heads) * DIM;
    float q[CHUNKS * 8];
    UNROLL
    for (int c = 0; c < CHUNKS; c++)
        load_eight(q + 8 * c, row + (kv_head * HEAD_GROUP + min(group, HEAD_GROUP - 1)) * DIM + quarter * 8 + 32 * c);
#if ROPE
    float cosine[CHUNKS * 4], sine[CHUNKS * 4];
    UNROLL
    for (int i = 0; i < CHUNKS * 4; i++) {
        int pair = NEOX ? i / 8 * 32 + quarter * 8 + i % 8 : i / 4 * 16 + quarter * 4 + i % 4;
        cosine[i] = cosines[(size_t)(length - 1) * (DIM / 2) + pair];
        sine[i] = sines[(size_t)(length - 1) * (DIM / 2) + pair];
    }
    rotate(q, cosine, sine);
#endif
    float q_scale = group < HEAD_GROUP ? LOG2_E / sqrt((float)DIM) : 0.0f;
    uint4 q_high[CHUNKS], q_low[CHUNKS];
    UNROLL
    for (int c = 0; c < CHUNKS; c++) {
        float rest[8];
        UNROLL
        for (int d = 0; d < 8; d++) q[8 * c + d] *= q_scale;
        q_high[c] = eight(q + 8 * c);
        UNROLL
        for (int d = 0; d < 8; d++) rest[d] = q[8 * c + d] - half_of(word(q_high[c], d / 2) >> d % 2 * 16);
        q_low[c] = eight(rest);
    }

    float4 sums[HALVES * 4];
    float largest[2] = {LOWEST, LOWEST}, total[2] = {0.0f, 0.0f};  // of heads 2 quarter + 0, 1
    UNROLL
    for (int t = 0; t < HALVES * 4; t++) sums[t] = (float4)(0.0f);
    for (int start = begin + warp * TILE; start < end; start += WARPS * TILE) {
        uint4 key[2][CHUNKS], value[4][HALVES];
        UNROLL
        for (int h = 0; h < 2; h++) {
            int p = start + group + 8 * h;
            size_t at = (p < stored ? PLACE(p) : 0) + quarter * 8;
            UNROLL
            for (int c = 0; c < CHUNKS; c++) key[h][c] = p < stored ? *(global const uint4 *)(keys + at + 32 * c) : (uint4)(0);
        }
        UNROLL
        for (int i = 0; i < 4; i++) {
            int p = start + 2 * quarter + i % 2 + i / 2 * 8;
            size_t at = (p < stored ? PLACE(p) : 0) + group * 8;
            UNROLL
            for (int h = 0; h < HALVES; h++) value[i][h] = p < stored ? *(global const uint4 *)(values + at + 64 * h) : (uint4)(0);
        }
#if ROPE
        int fresh = length - 1 - start;  // the new position's place in this tile
        UNROLL
        for (int h = 0; h < 2; h++) {
            if (fresh != group + 8 * h) continue;
            float k[CHUNKS * 8];
            size_t to = PLACE(length - 1) + quarter * 8;
            UNROLL
            for (int c = 0; c < CHUNKS; c++) load_eight(k + 8 * c, row + (heads + kv_head) * DIM + quarter * 8 + 32 * c);
            rotate(k, cosine, sine);
            UNROLL
            for (int c = 0; c < CHUNKS; c++) *(global uint4 *)(keys + to + 32 * c) = key[h][c] = eight(k + 8 * c);
        }
        UNROLL
        for (int i = 0; i < 4; i++) {
            if (fresh != 2 * quarter + i % 2 + i / 2 * 8) continue;
            size_t to = PLACE(length - 1) + group * 8;
            UNROLL
            for (int h = 0; h < HALVES; h++) {
                float v[8];
                load_eight(v, row + (heads + kv_heads + kv_head) * DIM + group * 8 + 64 * h);
                *(global uint4 *)(values + to + 64 * h) = value[i][h] = eight(v);
            }
        }
#endif
        float4 found = (float4)(0.0f), rest = (float4)(0.0f);  // of positions group and group + 8, each with the two heads
        UNROLL
        for (int c = 0; c < CHUNKS; c++) {
            uint4 a = key[0][c], b = key[1][c];
            found = mma_f16(found, a.x, b.x, a.y, b.y, q_high[c].x, q_high[c].y);
            rest = mma_f16(rest, a.x, b.x, a.y, b.y, q_low[c].x, q_low[c].y);
            found = mma_f16(found, a.z, b.z, a.w, b.w, q_high[c].z, q_high[c].w);
            rest = mma_f16(rest, a.z, b.z, a.w, b.w, q_low[c].z, q_low[c].w);
        }
        found += rest;
        float score[4] = {found.x, found.y, found.z, found.w}, correction[2];
        UNROLL
        for (int i = 0; i < 4; i++) {
            if (start + group + i / 2 * 8 >= end) score[i] = -INFINITY;
        }
        UNROLL
        for (int h = 0; h < 2; h++) {
            float top = fmax(largest[h], columns_max(fmax(score[h], score[2 + h])));
            correction[h] = power(largest[h] - top);
            largest[h] = top;
            score[h] = power(score[h] - top);
            score[2 + h] = power(score[2 + h] - top);
            total[h] = total[h] * correction[h] + score[h] + score[2 + h];
        }
        uint b0 = transposed(halves(score[0], score[1])), b1 = transposed(halves(score[2], score[3]));
        UNROLL
        for (int t = 0; t < HALVES * 4; t++) {
            uint v0 = word(value[0][t / 4], t % 4), v1 = word(value[1][t / 4], t % 4);
            uint v2 = word(value[2][t / 4], t % 4), v3 = word(value[3][t / 4], t % 4);
            sums[t] *= (float4)(correction[0], correction[1], correction[0], correction[1]);
            sums[t] = mma_f16(sums[t], low_halves(v0, v1), high_halves(v0, v1), low_halves(v2, v3), high_halves(v2, v3), b0, b1);
        }
    }

    // The warps of the group. Columns past HEAD_GROUP are of no head.
    UNROLL
    for (int h = 0; h < 2; h++) {
        int head = quarter * 2 + h;
        total[h] = columns_add(total[h]);
        if (group == 0) {
            warp_max[warp][head] = largest[h];
            warp_total[warp][head] = total[h];
        }
        UNROLL
        for (int t = 0; t < HALVES * 4; t++) {
            if (head < HEAD_GROUP)
                vstore2(h ? sums[t].yw : sums[t].xz, 0, &warp_sums[warp][head][t / 4 * 64 + group * 8 + t % 4 * 2]);
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    global float *result = out + ((size_t)m * heads + kv_head * HEAD_GROUP) * DIM;
    volatile global float *first = parts + ((size_t)m * kv_heads + kv_head) * SPLITS * HEAD_GROUP * (DIM + 2);
    volatile global float *mine = first + split * HEAD_GROUP * (DIM + 2);  // sums, then maxima, then totals
    for (int i = item; i < HEAD_GROUP * DIM; i += THREADS) {
        int h = i / DIM, d = i % DIM;
        float top = LOWEST, sum = 0.0f, weight = 0.0f;
        UNROLL
        for (int w = 0; w < WARPS; w++) top = fmax(top, warp_max[w][h]);
        UNROLL
        for (int w = 0; w < WARPS; w++) {
            float scale = power(warp_max[w][h] - top);
            sum += warp_sums[w][h][d] * scale;
            weight += warp_total[w][h] * scale;
        }
#if SPLITS == 1
        result[i] = sum / weight;
#else
        mine[i] = sum;
        if (d == 0) {
            mine[HEAD_GROUP * DIM + h] = top;
            mine[HEAD_GROUP * (DIM + 1) + h] = weight;
        }
#endif
    }
#if SPLITS > 1
    fence();
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    if (item == 0) {
        volatile global int *arrived = arrivals + m * kv_heads + kv_head;
        last = atomic_inc(arrived) == SPLITS - 1;
        if (last) *arrived = 0;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (!last) return;
    fence();
    for (int i = item; i < HEAD_GROUP * DIM; i += THREADS) {
        float sum = 0.0f, weight = 0.0f, top = LOWEST;
        for (int s = 0; s < SPLITS; s += AT_ONCE) {
            float before = top, found[AT_ONCE], tops[AT_ONCE], weights[AT_ONCE];
            UNROLL
            for (int j = 0; j < AT_ONCE; j++) {
                volatile global float *part = first + (s + j) * HEAD_GROUP * (DIM + 2);
                found[j] = part[i];
                tops[j] = part[HEAD_GROUP * DIM + i / DIM];
                weights[j] = part[HEAD_GROUP * (DIM + 1) + i / DIM];
            }
            UNROLL
            for (int j = 0; j < AT_ONCE; j++) top = fmax(top, tops[j]);
            sum *= power(before - top);
            weight *= power(before - top);
            UNROLL
            for (int j = 0; j < AT_ONCE; j++) {
                float scale = power(tops[j] - top);
                sum += found[j] * scale;
                weight += weights[j] * scale;
            }
        }
        result[i] = sum / weight;
    }
#endif
}
