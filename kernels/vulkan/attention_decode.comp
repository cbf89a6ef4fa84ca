// Attention of one token: a work-group of 128 for each key/value head and each PART positions of the sequence, for all the
// GROUP query heads that share the keys. What the parts found is merged by the one of them that ends last.
// ROPE: q is rotated here, and the token's own k (rotated) and v are stored by the part that reads them.
layout(constant_id = 1) const int DIM = 64;
layout(constant_id = 2) const int BLOCK = 32;
layout(constant_id = 3) const int KV_F16 = 0;
layout(constant_id = 4) const int GROUP = 1;
layout(constant_id = 5) const int PART = 64;
layout(constant_id = 6) const int MOST = 1;     // parts of the longest sequence that the launch serves
layout(constant_id = 7) const int ROPE = 0;
layout(constant_id = 8) const int NEOX = 1;
layout(constant_id = 9) const int RUNS = 8;     // of values that are summed side by side: a power of two
layout(constant_id = 10) const int LANES = 16;  // invocations of a run: 16 bytes of a value each
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, float, qkv);
BUFFER(2, , uvec4, keys);
BUFFER(3, , uvec4, values);
BUFFER(4, readonly, float, cosines);
BUFFER(5, readonly, float, sines);
BUFFER(6, writeonly, float, result);
BUFFER(7, coherent, float, parts);  // of each token, head and part: the greatest score, the sum of weights, DIM sums
BUFFER(8, coherent, uint, arrivals);
layout(push_constant) uniform Push { int token_seq, seq_begin, seq_len, block_table, max_blocks, kv_heads; };
const int CHUNK = 64, QUADS = DIM / 4;
const int WIDE = KV_F16 != 0 ? 8 : 4;  // dimensions in 16 bytes of the cache
const int LOADS = DIM / WIDE;
shared vec4 query[GROUP * QUADS];
shared float score[GROUP * CHUNK];
shared uint place[CHUNK];
shared float partial[GROUP * 16];
shared float correction[GROUP];
shared vec4 folded[(RUNS + 1) / 2 * GROUP * QUADS];
shared uint last;

vec4 rotated(uint from, uint position, uint i) {  // dimensions 4 i to 4 i + 3 of a head of qkv
    vec4 pair;
    [[unroll]] for (uint j = 0; j < 4; j++) {
        uint d = 4 * i + j, angle, other;
        float sign;
        if (NEOX != 0) {
            bool low = d < DIM / 2;
            angle = low ? d : d - DIM / 2;
            other = low ? d + DIM / 2 : angle;
            sign = low ? -1.0 : 1.0;
        } else {
            angle = d / 2;
            other = d ^ 1u;
            sign = d % 2 == 0 ? -1.0 : 1.0;
        }
        angle += position * (DIM / 2);
        pair[j] = qkv[from + d] * cosines[angle] + sign * qkv[from + other] * sines[angle];
    }
    return pair;
}

vec4 plain(uint from, uint i) {
    uint at = from + 4 * i;
    return vec4(qkv[at], qkv[at + 1], qkv[at + 2], qkv[at + 3]);
}

uvec4 packed(vec4 a, vec4 b) {
    return uvec4(half_pair(a.x, a.y), half_pair(a.z, a.w), half_pair(b.x, b.y), half_pair(b.z, b.w));
}

vec4 halves(uint a, uint b) { return vec4(unpackHalf2x16(a), unpackHalf2x16(b)); }

KERNEL(attention_decode) {
    int lane = int(gl_LocalInvocationID.x), kv_head = int(gl_WorkGroupID.x), m = int(gl_WorkGroupID.y);
    int part = int(gl_WorkGroupID.z), heads = kv_heads * GROUP;
    if (m >= STEP_TOKENS) return;
    int position = TOKEN_POSITION(m), length = position + 1, count = (length + PART - 1) / PART;
    if (part >= count) return;
    int table = block_table + step_data[token_seq + m] * max_blocks;
    uint row = m * uint(heads + 2 * kv_heads) * DIM;
    float unit = 1.0 / sqrt(float(DIM));
    for (uint i = lane; i < GROUP * QUADS; i += WG) {
        uint from = row + (kv_head * GROUP + i / QUADS) * DIM;
        query[i] = (ROPE != 0 ? rotated(from, position, i % QUADS) : plain(from, i % QUADS)) * unit;
    }
    if (ROPE != 0 && part == count - 1) {
        uint block = step_data[table + position / BLOCK];
        uint to = ((block * BLOCK + position % BLOCK) * kv_heads + kv_head) * LOADS;
        uint k = row + (heads + kv_head) * DIM, v = row + (heads + kv_heads + kv_head) * DIM;
        for (uint i = lane; i < LOADS; i += WG) {
            if (KV_F16 != 0) {
                keys[to + i] = packed(rotated(k, position, 2 * i), rotated(k, position, 2 * i + 1));
                values[to + i] = packed(plain(v, 2 * i), plain(v, 2 * i + 1));
            } else {
                keys[to + i] = floatBitsToUint(rotated(k, position, i));
                values[to + i] = floatBitsToUint(plain(v, i));
            }
        }
        memoryBarrierBuffer();
    }
    // The invocations of a head: 16, each with the same greatest score and sum. Those of a run: LANES, with 16 bytes each.
    int head = lane / 16, run = lane / LANES, column = lane % LANES;
    float largest = -INFINITY, total = 0.0;
    vec4 sums[GROUP * 2];
    [[unroll]] for (int i = 0; i < GROUP * 2; i++) sums[i] = vec4(0.0);
    int end = min(length, (part + 1) * PART);
    for (int start = part * PART; start < end; start += CHUNK) {
        barrier();
        int here = min(CHUNK, end - start);
        {   // scores: two invocations a position, each for every second head
            int p = lane % CHUNK, half_ = lane / CHUNK;
            if (p < here) {
                int at_position = start + p;
                uint block = step_data[table + at_position / BLOCK];
                uint at = ((block * BLOCK + at_position % BLOCK) * kv_heads + kv_head) * LOADS;
                if (half_ == 0) place[p] = at;
                float found[(GROUP + 1) / 2];
                [[unroll]] for (int h = 0; h < (GROUP + 1) / 2; h++) found[h] = 0.0;
                for (int i = 0; i < LOADS; i++) {
                    uvec4 words = keys[at + i];
                    vec4 a = KV_F16 != 0 ? halves(words.x, words.y) : uintBitsToFloat(words);
                    vec4 b = KV_F16 != 0 ? halves(words.z, words.w) : vec4(0.0);
                    [[unroll]] for (int h = 0; h < (GROUP + 1) / 2; h++) {
                        int q = min(2 * h + half_, GROUP - 1) * QUADS + i * (WIDE / 4);
                        found[h] += dot(a, query[q]);
                        if (KV_F16 != 0) found[h] += dot(b, query[q + 1]);
                    }
                }
                [[unroll]] for (int h = 0; h < (GROUP + 1) / 2; h++)
                    if (2 * h + half_ < GROUP) score[(2 * h + half_) * CHUNK + p] = found[h];
            }
        }
        barrier();
        int at = head * CHUNK + lane % 16;
        float most = -INFINITY;
        if (head < GROUP) {
            for (int i = 0; i < CHUNK; i += 16)
                if (lane % 16 + i < here) most = max(most, score[at + i]);
            partial[lane] = most;
        }
        barrier();
        float before = largest, sum = 0.0;
        if (head < GROUP) {
            for (int i = 0; i < 16; i++) largest = max(largest, partial[head * 16 + i]);
            for (int i = 0; i < CHUNK; i += 16)
                if (lane % 16 + i < here) {
                    float w = exp(score[at + i] - largest);
                    score[at + i] = w;
                    sum += w;
                }
            if (lane % 16 == 0) correction[head] = exp(before - largest);
        }
        barrier();
        if (head < GROUP) partial[lane] = sum;
        barrier();
        if (head < GROUP) {
            total *= correction[head];
            for (int i = 0; i < 16; i++) total += partial[head * 16 + i];
        }
        if (run < RUNS) {
            [[unroll]] for (int h = 0; h < GROUP; h++) {
                sums[2 * h] *= correction[h];
                sums[2 * h + 1] *= correction[h];
            }
            for (int p = run; p < here; p += RUNS) {
                uvec4 words = values[place[p] + column];
                vec4 a = KV_F16 != 0 ? halves(words.x, words.y) : uintBitsToFloat(words);
                vec4 b = KV_F16 != 0 ? halves(words.z, words.w) : vec4(0.0);
                [[unroll]] for (int h = 0; h < GROUP; h++) {
                    float w = score[h * CHUNK + p];
                    sums[2 * h] += w * a;
                    if (KV_F16 != 0) sums[2 * h + 1] += w * b;
                }
            }
        }
    }
    // Fold the runs: the upper half gives its sums to the lower half, again and again.
    const int STEP = WIDE / 4;
    for (int n = RUNS; n > 1; n /= 2) {
        barrier();
        if (run >= n / 2 && run < n)
            [[unroll]] for (int h = 0; h < GROUP; h++)
                [[unroll]] for (int j = 0; j < STEP; j++)
                    folded[((run - n / 2) * GROUP + h) * QUADS + column * STEP + j] = sums[2 * h + j];
        barrier();
        if (run < n / 2)
            [[unroll]] for (int h = 0; h < GROUP; h++)
                [[unroll]] for (int j = 0; j < STEP; j++)
                    sums[2 * h + j] += folded[(run * GROUP + h) * QUADS + column * STEP + j];
    }
    barrier();
    if (head < GROUP && lane % 16 == 0) {
        partial[2 * head] = largest;
        partial[2 * head + 1] = total;
    }
    if (run == 0)
        [[unroll]] for (int h = 0; h < GROUP; h++)
            [[unroll]] for (int j = 0; j < STEP; j++) folded[h * QUADS + column * STEP + j] = sums[2 * h + j];
    barrier();
    const uint ITEM = DIM + 2;
    uint first_head = m * uint(heads) + kv_head * GROUP;
    if (count == 1) {
        for (uint i = lane; i < GROUP * DIM; i += WG)
            result[first_head * DIM + i] = folded[i / 4][i % 4] / partial[i / DIM * 2 + 1];
        return;
    }
    for (uint h = 0; h < GROUP; h++) {
        uint to = ((first_head + h) * MOST + part) * ITEM;
        for (uint i = lane; i < DIM; i += WG) parts[to + 2 + i] = folded[h * QUADS + i / 4][i % 4];
        if (lane < 2) parts[to + lane] = partial[2 * h + lane];
    }
    memoryBarrierBuffer();
    barrier();
    if (lane == 0) last = atomicAdd(arrivals[m * kv_heads + kv_head], 1);
    barrier();
    if (last != count - 1) return;
    memoryBarrierBuffer();
    for (uint i = lane; i < GROUP * DIM; i += WG) {
        uint from = (first_head + i / DIM) * MOST * ITEM;
        float most = -INFINITY, weights = 0.0, sum = 0.0;
        for (uint p = 0; p < count; p++) most = max(most, parts[from + p * ITEM]);
        for (uint p = 0; p < count; p++) {
            float factor = exp(parts[from + p * ITEM] - most);
            weights += factor * parts[from + p * ITEM + 1];
            sum += factor * parts[from + p * ITEM + 2 + i % DIM];
        }
        result[first_head * DIM + i] = sum / weights;
    }
    if (lane == 0) arrivals[m * kv_heads + kv_head] = 0;
}
