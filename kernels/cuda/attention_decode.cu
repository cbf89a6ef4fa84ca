// Attention of few tokens over long caches of f16 or int8, on the tensor cores: the positions of a sequence are split over blocks
// (flash decoding), and those of a block over its warps, 16 at a time.
//
// Grid: [KV_HEADS, tokens, SPLITS]. Keys are the rows of one product, S = K Qt, and values of the other, O = Vt Pt, so that the
// GROUP query heads of a key/value head are the 8 columns of both. All comes 16 bytes a thread as it lies in the cache: of keys
// in an order of dimensions that q follows, of values with neighbouring positions paired in registers. q is the sum of two halves.
// Codes of int8 become halves in registers, exactly; the scales of keys are part of the scores, those of values of the weights.
//
// CLUSTER: the number of splits that form a thread block cluster. Each block sends its results to the others' shared memory, a share of the
// dimensions to each, which merges it when all has arrived: no cluster barrier is needed. The shares of several clusters, or of
// blocks that are in none, are merged through memory by the block that finishes last.
//
// ROPE: each token is a sequence of its own, and none reads what another writes; rotates q and k here, and stores k and v in the
// cache (rope_append's work). Entries that were in the cache before the step may be fetched before this kernel waits for the
// kernel that computes q, k and v. HEAD_NORMS: q and the new k get their RMSNorm before they are rotated.
//
// Of heads wider than 128, the SHARERS warps of a team share a tile, each with a part of the dimensions, and add up their scores: what a
// warp of 256 holds does not fit its registers.
//
// DEPTH tiles of a warp are fetched ahead: into registers or, where RING, to a ring in shared memory that each warp has for itself. The
// latter takes rows of 128 or 256 bytes, and blocks of the cache that are whole tiles.
//
// Long, because it is one kernel: fetching, products, softmax and merging share its registers and shared memory. Its
// constants and single steps are in attention_split.cuh.
#include "attention_split.cuh"

extern "C" __global__ void IN_CLUSTER __launch_bounds__(THREADS, BLOCKS)
attention_decode(const int *step, int token_seq, int seq_begin, int seq_len, int block_table, int max_blocks,
                 const float *qkv, kv_t *keys, kv_t *values, const float *cosines, const float *sines, float *out, float *parts,
                 unsigned *arrivals, const float *q_norm, const float *k_norm, float eps) {
#if RING
    extern __shared__ uint4 ring[];                    // [WARPS][DEPTH][PLACE]
    auto warp_sums = (float(*)[GROUP][DIM])ring;       // [TEAMS], once all tiles are done
#else
    __shared__ __align__(16) float warp_sums[TEAMS][GROUP][DIM];
#endif
    __shared__ float warp_max[TEAMS][8], warp_total[TEAMS][8];
    int kv_head = blockIdx.x, m = blockIdx.y, split = blockIdx.z;
    int warp = RING ? __shfl_sync(FULL, threadIdx.x / WARP, 0) : threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, quarter = lane % 4;
    int team = warp / SHARERS, part = warp % SHARERS * OWN;  // and the warp's first dimension
    if (m >= STEP_TOKENS(step)) return;
#if CLUSTER
    __shared__ unsigned long long all_here;
    __shared__ __align__(16) float sums_of[CLUSTER][SHARE];
    __shared__ __align__(8) float2 weights_of[CLUSTER][GROUP];  // the maximum, and the total
    if (threadIdx.x == 0) init_barrier(&all_here), expect_bytes(&all_here, sizeof(sums_of) + sizeof(weights_of));
    cluster_arrive();
#endif
    int length = token_position(step, token_seq, seq_begin, seq_len, m) + 1;
    const int *table = step + block_table + step[token_seq + m] * max_blocks;
    int origin = window_begin(length) / TILE * TILE;
    int span = ((length - origin + TILE - 1) / TILE + SPLITS - 1) / SPLITS * TILE;
    int begin = origin + split * span, end = min(length, begin + span), stored = ROPE ? min(end, length - 1) : end;

    // What is behind the window may be NaN.
    auto held = [&](int p) { return p < stored && !behind_window(p, length); };
    auto place = [&](int p) { return row_of(table[p / BLOCK], p % BLOCK, kv_head, KV_HEADS); };
#if RING
    // Tile `turn` of this warp. The number of its block is in a lane: that of turn i, 32 + i, … in lane i.
    int turns = max(0, (end - begin + TILE - 1) / TILE - warp + WARPS - 1) / WARPS, blocks = 0;
    uint4 *places = ring + warp * DEPTH * PLACE;
    auto start_of = [&](int turn) { return begin + (warp + turn * WARPS) * TILE; };
    auto fetch = [&](int turn) {
        if (turn % WARP == 0) blocks = start_of(turn + lane) < stored ? table[start_of(turn + lane) / BLOCK] : 0;
        int block = __shfl_sync(FULL, blocks, turn % WARP), start = start_of(turn);
        size_t from = row_of(block, start % BLOCK, kv_head, KV_HEADS);
        uint4 *to = places + turn % DEPTH * PLACE;
        const uint4 *key = (const uint4 *)(keys + from) + lane, *value = (const uint4 *)(values + from) + lane;
        int mine = lane % PIECES ^ TURNED(lane / PIECES);
#pragma unroll
        for (int i = 0; i < SIDE / WARP; i++) {
            int above = i * WARP / PIECES, at = lane / PIECES * PIECES + i * WARP + (mine ^ TURNED(above));
            bool there = held(start + above + lane / PIECES);
            copy_async(to + at, key + i * WARP, there), copy_async(to + SIDE + at, value + i * WARP, there);
        }
#if KV_I8
        if (lane < 8) {  // four scales each, of keys and then of values; those past the last position are not used
            copy_async(to + 2 * SIDE + lane, scale_of(lane < 4 ? keys : values, block, start % BLOCK + lane % 4 * 4, kv_head, KV_HEADS),
                       start + lane % 4 * 4 < stored);
        }
#endif
    };
    auto fetched = [] { asm volatile("cp.async.commit_group;" ::: "memory"); };
    auto fetch_first = [&] {
#pragma unroll
        for (int turn = 0; turn < DEPTH; turn++) {
            if (turn < turns) fetch(turn);
            fetched();
        }
    };
#else
    uint4 keys_of[DEPTH][2][KEY_LOADS], values_of[DEPTH][4][VALUE_LOADS];
#if KV_I8
    float scales_of[DEPTH][2][2];  // of keys and of values, at positions group and group + 8
#endif
    auto fetch_keys = [&](int slot, int start) {
        auto &key = keys_of[slot];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int p = start + group + 8 * h;
            size_t at = (held(p) ? place(p) : 0) + part + quarter * KEY_EACH;
#pragma unroll
            for (int c = 0; c < KEY_LOADS; c++) key[h][c] = held(p) ? load(keys + at + 4 * KEY_EACH * c) : make_uint4(0, 0, 0, 0);
#if KV_I8
            int block = held(p) ? table[p / BLOCK] : 0;
            scales_of[slot][0][h] = held(p) ? load_scale(scale_of(keys, block, p % BLOCK, kv_head, KV_HEADS)) : 0.0f;
            scales_of[slot][1][h] = held(p) ? load_scale(scale_of(values, block, p % BLOCK, kv_head, KV_HEADS)) : 0.0f;
#endif
        }
    };
    auto fetch_values = [&](int slot, int start) {
        auto &value = values_of[slot];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int p = start + 2 * quarter + i % 2 + i / 2 * 8;
            size_t at = (held(p) ? place(p) : 0) + part + group * VALUE_EACH;
#pragma unroll
            for (int c = 0; c < VALUE_LOADS; c++) {
                value[i][c] = held(p) ? load<VALUE_EACH * sizeof(kv_t)>(values + at + 8 * VALUE_EACH * c) : make_uint4(0, 0, 0, 0);
            }
        }
    };
    auto fetch_first = [&] {
#pragma unroll
        for (int slot = 0; slot < DEPTH; slot++) {
            int start = begin + (team + slot * TEAMS) * TILE;
            fetch_keys(slot, start), fetch_values(slot, start);
        }
    };
#endif
#if ROPE
    fetch_first();
    // The pairs that are rotated come first; the others are two halves of the rest of a head.
    int pair = threadIdx.x % PAIRS;
    float cosine = 1.0f, sine = 0.0f;
    if (pair < ROTATED) cosine = cosines[(size_t)(length - 1) * ROTATED + pair], sine = sines[(size_t)(length - 1) * ROTATED + pair];
    bool has_new = stored < end;
#endif
    int a = ROPE && !NEOX ? threadIdx.x % PAIRS * 2 : threadIdx.x % PAIRS, b = ROPE && !NEOX ? a + 1 : a + ROTATED;
#if ROPE
    if (ROTATED < PAIRS && pair >= ROTATED) a = pair + ROTATED, b = a + PAIRS - ROTATED;
#endif
#if HEAD_NORMS
    float2 q_gain = make_float2(q_norm[a], q_norm[b]), k_gain = make_float2(k_norm[a], k_norm[b]);
#endif
    wait_for_before();
    start_dependents();
#if !ROPE
    fetch_first();
#endif

    // Each thread prepares two dimensions of some heads, for all warps: q as the sum of two halves; the new k, rotated, and v.
    __shared__ __align__(16) f16 q_shared[2][GROUP][Q_PITCH];
    const float *row = qkv + (size_t)m * (HEADS + 2 * KV_HEADS) * DIM;
#if ROPE
    __shared__ __align__(16) kv_t new_rows[2][DIM];  // of k and of v
#if KV_I8
    __shared__ __align__(16) float exact_rows[2][DIM], new_scales[2];
#else
    auto &exact_rows = new_rows;
#endif
    int heads = GROUP + 2 * has_new;
#else
    int heads = GROUP;
#endif
    float2 of[(GROUP + 2 * ROPE + THREADS / PAIRS - 1) / (THREADS / PAIRS)];
#pragma unroll
    for (int i = 0; i < sizeof(of) / sizeof(of[0]); i++) {
        int h = min((int)threadIdx.x / PAIRS + i * (THREADS / PAIRS), heads - 1);
        int from = h < GROUP ? kv_head * GROUP + h : HEADS + (h - GROUP) * KV_HEADS + kv_head;
        of[i] = make_float2(row[from * DIM + a], row[from * DIM + b]);
    }
#if HEAD_NORMS
    __shared__ float roots[GROUP + 1];
    for (int h = warp; h < GROUP + has_new; h += WARPS) {
        const float2 *head = (const float2 *)(row + (h < GROUP ? kv_head * GROUP + h : HEADS + kv_head) * DIM);
        float sum = 0.0f;
#pragma unroll
        for (int i = lane; i < DIM / 2; i += WARP) sum += head[i].x * head[i].x + head[i].y * head[i].y;
        sum = warp_reduce<Sum>(sum);
        if (lane == 0) roots[h] = sqrtf(sum / DIM + eps);
    }
    __syncthreads();
#endif
#pragma unroll
    for (int i = 0; i < sizeof(of) / sizeof(of[0]); i++) {
        int h = threadIdx.x / PAIRS + i * (THREADS / PAIRS);
        if (h >= heads) break;
        float x = of[i].x, y = of[i].y;
#if ROPE
        if (h <= GROUP) {
#if HEAD_NORMS
            float2 gain = h < GROUP ? q_gain : k_gain;
            x = x * gain.x / roots[h], y = y * gain.y / roots[h];
#endif
            float old = x;
            x = old * cosine - y * sine;
            y = y * cosine + old * sine;
        }
        if (h >= GROUP) {
            put(&exact_rows[h - GROUP][a], x), put(&exact_rows[h - GROUP][b], y);
            continue;
        }
#endif
        x *= rsqrtf(DIM) * (LOG2_E * Q_UNIT), y *= rsqrtf(DIM) * (LOG2_E * Q_UNIT);
        f16 high_x, high_y;
        put(&high_x, x), put(&high_y, y);
        q_shared[0][h][a] = high_x, q_shared[0][h][b] = high_y;
        put(&q_shared[1][h][a], x - to_float(high_x)), put(&q_shared[1][h][b], y - to_float(high_y));
    }
    __syncthreads();
#if ROPE
    if (has_new) {
#if KV_I8
        if (warp < 2) {
            const int turns = (DIM + 4 * WARP - 1) / (4 * WARP);
            float v[turns][4] = {};
#pragma unroll
            for (int i = 0; i < 4 * turns; i++) {
                if (i * WARP < DIM) v[i / 4][i % 4] = exact_rows[warp][i * WARP + lane];
            }
            RowUnit unit = row_unit(v);
#pragma unroll
            for (int i = 0; i < DIM / WARP; i++) put(&new_rows[warp][i * WARP + lane], v[i / 4][i % 4] * unit.factor);
            if (lane == 0) {
                int p = length - 1;
                new_scales[warp] = unit.scale;
                *scale_of(warp ? values : keys, table[p / BLOCK], p % BLOCK, kv_head, KV_HEADS) = unit.scale;
            }
        }
        __syncthreads();
#endif
        const int words = DIM * sizeof(kv_t) / 16;  // of 16 bytes
        if (threadIdx.x < 2 * words) {
            int which = threadIdx.x / words, word = threadIdx.x % words;
            ((uint4 *)((which ? values : keys) + place(length - 1)))[word] = ((const uint4 *)new_rows[which])[word];
        }
    }
#endif
    uint4 q_high[CHUNKS], q_low[CHUNKS];  // columns past GROUP belong to no head
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        const int in_load = KEY_EACH / 8, at = (4 * (c / in_load) + quarter) * KEY_EACH + c % in_load * 8;
        q_high[c] = *(const uint4 *)&q_shared[0][min(group, GROUP - 1)][part + at];
        q_low[c] = *(const uint4 *)&q_shared[1][min(group, GROUP - 1)][part + at];
    }

    float sums[HALVES * 4][4] = {}, largest[2] = {LOWEST, LOWEST}, total[2] = {};  // for heads 2 quarter + 0, 1
#if SHARERS > 1
    __shared__ __align__(16) float4 products[2][WARPS][WARP];
    int turn = 0;
#endif
    auto attend = [&](int slot, int start, int next = 0) {
#if RING
        const uint4 *from = places + slot * PLACE;
        uint4 key[2][KEY_LOADS], value[4][VALUE_LOADS];
        int key_piece = quarter ^ TURNED(group);
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int c = 0; c < KEY_LOADS; c++) key[h][c] = from[(group + 8 * h) * PIECES + (key_piece ^ 4 * c)];
        }
#if KV_I8
        const float *scale_at = (const float *)(from + 2 * SIDE);
        float scales[2][2];
#pragma unroll
        for (int i = 0; i < 4; i++) {  // those past the last position may be of rows that nobody has written
            scales[i / 2][i % 2] = held(start + group + i % 2 * 8) ? scale_at[i / 2 * TILE + i % 2 * 8 + group] : 0.0f;
        }
#endif
#else
        auto &key = keys_of[slot];
        auto &value = values_of[slot];
#if KV_I8
        auto &scales = scales_of[slot];
#endif
#endif
#if ROPE
        int fresh = length - 1 - start;  // the new position's place in this tile
        if (fresh < TILE) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                if (fresh != group + 8 * h) continue;
#pragma unroll
                for (int c = 0; c < KEY_LOADS; c++) key[h][c] = *(const uint4 *)&new_rows[0][part + (4 * c + quarter) * KEY_EACH];
#if KV_I8
                scales[0][h] = new_scales[0], scales[1][h] = new_scales[1];
#endif
            }
        }
#endif
        float score[4] = {}, rest[3][4] = {};  // for positions group and group + 8, each with the two heads
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
#if KV_I8
            uint4 a = code_halves(word(key[0][c / 2], c % 2 * 2), word(key[0][c / 2], c % 2 * 2 + 1));
            uint4 b = code_halves(word(key[1][c / 2], c % 2 * 2), word(key[1][c / 2], c % 2 * 2 + 1));
#else
            uint4 a = key[0][c], b = key[1][c];
#endif
            mma(score, a.x, b.x, a.y, b.y, q_high[c].x, q_high[c].y);
            mma(rest[0], a.x, b.x, a.y, b.y, q_low[c].x, q_low[c].y);
            mma(rest[1], a.z, b.z, a.w, b.w, q_high[c].z, q_high[c].w);
            mma(rest[2], a.z, b.z, a.w, b.w, q_low[c].z, q_low[c].w);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) score[i] = (score[i] + rest[1][i]) + (rest[0][i] + rest[2][i]);
#if KV_I8
        float factor[2] = {scales[0][0] * (1.0f / Q_UNIT), scales[0][1] * (1.0f / Q_UNIT)};
        float unit[2] = {exponent(scales[1][0]), exponent(scales[1][1])};
#endif
#if !RING
        if (next < end) fetch_keys(slot, next);
#endif
#if SHARERS > 1  // a score is the sum of what the warps of a team have found
        products[turn][warp][lane] = make_float4(score[0], score[1], score[2], score[3]);
        asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(SHARERS * WARP) : "memory");
        float4 others = products[turn][warp ^ 1][lane];
        score[0] += others.x, score[1] += others.y, score[2] += others.z, score[3] += others.w;
        turn ^= 1;
#endif
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float sum = score[i];
#if KV_I8
            sum = sum * factor[i / 2] + unit[i / 2];
#endif
            int p = start + group + i / 2 * 8;
            score[i] = p < end && !behind_window(p, length) ? sum : -INFINITY_F;
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float top = fmaxf(largest[h], over_groups<Max>(fmaxf(score[h], score[2 + h])));
            if (RING ? __any_sync(FULL, top > largest[h]) : start >= begin + TEAMS * TILE) {  // or not the first
                float correction = power(largest[h] - top);
                total[h] *= correction;
#pragma unroll
                for (int t = 0; t < HALVES * 4; t++) sums[t][h] *= correction, sums[t][2 + h] *= correction;
            }
            largest[h] = top;
            score[h] = power(score[h] - top), score[2 + h] = power(score[2 + h] - top);
#if KV_I8
            total[h] += score[h] * power(-unit[0]) + score[2 + h] * power(-unit[1]);
#else
            total[h] += score[h] + score[2 + h];
#endif
        }
        unsigned b0 = transposed(halves(score[0], score[1])), b1 = transposed(halves(score[2], score[3]));
#if RING
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int row = 2 * quarter + i % 2 + i / 2 * 8, piece = group ^ TURNED(2 * quarter) ^ TURNED(i % 2);
#pragma unroll
            for (int c = 0; c < VALUE_LOADS; c++) value[i][c] = from[SIDE + row * PIECES + piece + 8 * c];
        }
#endif
#if ROPE
        if (fresh < TILE) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (fresh != 2 * quarter + i % 2 + i / 2 * 8) continue;
#pragma unroll
                for (int c = 0; c < VALUE_LOADS; c++) {
                    const kv_t *from = &new_rows[1][part + (8 * c + group) * VALUE_EACH];
                    if (VALUE_EACH * sizeof(kv_t) == 16) value[i][c] = *(const uint4 *)from;
                    else value[i][c].x = ((const unsigned *)from)[0], value[i][c].y = ((const unsigned *)from)[1];
                }
            }
        }
#endif
#pragma unroll
        for (int t = 0; t < HALVES * 4; t++) {
#if KV_I8
            const int load = t * 2 / VALUE_EACH, i = t * 2 % VALUE_EACH / 4, pair = t % 2 ? 0x7362 : 0x5140;
            unsigned low = __byte_perm(word(value[0][load], i), word(value[1][load], i), pair);
            unsigned high = __byte_perm(word(value[2][load], i), word(value[3][load], i), pair);
            mma(sums[t], code_halves<0>(low), code_halves<2>(low), code_halves<0>(high), code_halves<2>(high), b0, b1);
#else
            unsigned v0 = word(value[0][t / 4], t % 4), v1 = word(value[1][t / 4], t % 4);
            unsigned v2 = word(value[2][t / 4], t % 4), v3 = word(value[3][t / 4], t % 4);
            mma(sums[t], __byte_perm(v0, v1, 0x5410), __byte_perm(v0, v1, 0x7632), __byte_perm(v2, v3, 0x5410),
                __byte_perm(v2, v3, 0x7632), b0, b1);
#endif
        }
#if !RING
        if (next < end) fetch_values(slot, next);
#endif
    };
#if RING
#pragma unroll 1
    for (int turn = 0; turn < turns; turn++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 1) : "memory");
        __syncwarp();  // what the other lanes copied is here, too
        attend(turn % DEPTH, start_of(turn));
        __syncwarp();
        if (turn + DEPTH < turns) fetch(turn + DEPTH);
        fetched();
    }
    __syncthreads();
#else
    for (int start = begin + team * TILE; start < end; start += DEPTH * TEAMS * TILE) {
#pragma unroll
        for (int slot = 0; slot < DEPTH; slot++) {
            int here = start + slot * TEAMS * TILE;
            if (here >= end) break;
            attend(slot, here, here + DEPTH * TEAMS * TILE);
        }
    }
#endif

    // Merges the teams of the block. Columns past GROUP belong to no head.
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int head = quarter * 2 + h;
        total[h] = over_groups<Sum>(total[h]);
        if (group == 0 && part == 0) warp_max[team][head] = largest[h], warp_total[team][head] = total[h];
        if (head >= GROUP) continue;
#pragma unroll
        for (int t = 0; t < HALVES * 4; t++) {
            const int load = t * 2 / VALUE_EACH, at = (8 * load + group) * VALUE_EACH + t * 2 % VALUE_EACH;
            *(float2 *)&warp_sums[team][head][part + at] = make_float2(sums[t][h], sums[t][2 + h]);
        }
    }
    __syncthreads();
    float *result = out + ((size_t)m * HEADS + kv_head * GROUP) * DIM;
#if CLUSTER
    cluster_wait();  // all blocks expect their bytes
#endif
#if SPLITS > 1 && !CLUSTER
    // Each split: sums, then maxima with totals.
    float *first = parts + ((size_t)m * KV_HEADS + kv_head) * SPLITS * (SUMS + 2 * GROUP);
    float *mine = first + split * (SUMS + 2 * GROUP);
#endif
    for (int i = threadIdx.x; i < SUMS / 4; i += THREADS) {
        int h = i / (DIM / 4), d = i % (DIM / 4);
        float top = LOWEST, weight = 0.0f;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < TEAMS; w++) top = fmaxf(top, warp_max[w][h]);
#pragma unroll
        for (int w = 0; w < TEAMS; w++) {
            float scale = power(warp_max[w][h] - top);
            sum = sum + times(((const float4 *)warp_sums[w][h])[d], scale);
            weight += warp_total[w][h] * scale;
        }
#if SPLITS == 1
        ((float4 *)result)[i] = times(sum, reciprocal(weight));
#elif CLUSTER
        int to = i / (SHARE / 4), rank = split % CLUSTER;
        send(in_block(&sums_of[rank][i % (SHARE / 4) * 4], to), in_block(&all_here, to), sum);
        if (d < CLUSTER) send(in_block(&weights_of[rank][h], d), in_block(&all_here, d), make_float2(top, weight));
#else
        ((float4 *)mine)[i] = sum;
        if (d == 0) ((float2 *)(mine + SUMS))[h] = make_float2(top, weight);
#endif
    }
#if SPLITS > 1
#if CLUSTER
    wait_for_bytes(&all_here);
    auto sum_of = [&](int s, int i) { return sums_of[s][i]; };
    auto weight_of = [&](int s, int h) { return weights_of[s][h]; };
    int begin_share = split % CLUSTER * SHARE;
#else
    auto sum_of = [&](int s, int i) { return ((const volatile float *)first)[s * (SUMS + 2 * GROUP) + i]; };
    auto weight_of = [&](int s, int h) {
        const volatile float *at = first + s * (SUMS + 2 * GROUP) + SUMS + 2 * h;
        return make_float2(at[0], at[1]);
    };
    const int begin_share = 0;
#endif
#if CLUSTER && PARTS > 1
    float4 *shares = (float4 *)parts + ((size_t)m * KV_HEADS + kv_head) * PARTS * SUMS + begin_share;
    for (int i = threadIdx.x; i < SHARE; i += THREADS) {
        shares[split / CLUSTER * SUMS + i] = merged(CLUSTER, sum_of, weight_of, i, (begin_share + i) / DIM);
    }
#endif
#if PARTS > 1
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicInc(arrivals + (m * KV_HEADS + kv_head) * RANKS + split % RANKS, PARTS - 1) == PARTS - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
#endif
    for (int i = threadIdx.x; i < SHARE; i += THREADS) {
#if CLUSTER && PARTS > 1
        auto share_of = [&](int s, int i) { return ((const volatile float *)(shares + s * SUMS + i))[0]; };
        auto whole_of = [&](int s, int) {
            const volatile float *at = (const volatile float *)(shares + s * SUMS + i);
            return make_float2(at[1], at[2]);
        };
        float4 all = merged(PARTS, share_of, whole_of, i, 0);
#else
        float4 all = merged(SPLITS, sum_of, weight_of, i, (begin_share + i) / DIM);
#endif
        result[begin_share + i] = all.x * reciprocal(all.z);
    }
#endif
}
