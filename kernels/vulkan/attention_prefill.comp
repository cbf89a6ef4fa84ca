// variants: KV_I8
// Attention of many tokens over a cache of f16 or int8: a work-group of 128 takes one head of TILE tokens of a sequence, and the cache in
// chunks of CHUNK positions through shared memory, with a running maximum (Dao et al. 2022).
layout(constant_id = 1) const int DIM = 64;  // a multiple of 8, at most 128
layout(constant_id = 2) const int BLOCK = 32;
layout(constant_id = 3) const int KV_F16 = 1;
layout(constant_id = 4) const int WINDOW = 0;
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, vec4, qkv);
#if KV_I8
BUFFER(2, readonly, uint, keys);
BUFFER(3, readonly, uint, values);
#else
BUFFER(2, readonly, uvec4, keys);
BUFFER(3, readonly, uvec4, values);
#endif
BUFFER(4, writeonly, vec4, result);
layout(push_constant) uniform Push { int token_seq, seq_begin, seq_len, block_table, max_blocks, heads, kv_heads; };
const int TILE = 32, CHUNK = 32, QUADS = DIM / 4, LOADS = DIM / 8;
const int EACH = (QUADS + 15) / 16;  // quads of dimensions that an invocation sums for each of its four tokens
shared vec4 query[TILE * (QUADS + 1)];  // one more a row, so that rows fall into different banks
shared uvec2 cached[CHUNK * (QUADS + 1)];
shared float score[TILE * (CHUNK + 1)];
shared float partial[128];
shared float correction[TILE];

#include "cache.glsl"
#include "window.glsl"
#if KV_I8
shared float key_scale[CHUNK];
shared float value_scale[CHUNK];
#define KEY_SCALE(p) key_scale[p]
#define WEIGHT(w, p) (w == 0.0 ? 0.0 : w * value_scale[p])  // a position that is not seen may have any scale
// Eight codes as f16, which holds them exactly, and their row's scale.
#define LOAD(cache, scales, block, p, column) \
    uvec2 at = row_of(block, p, kv_head, kv_heads); \
    vec4 low = coded(cache[at.x + 2 * (column)]), high = coded(cache[at.x + 2 * (column) + 1]); \
    words = uvec4(packHalf2x16(low.xy), packHalf2x16(low.zw), packHalf2x16(high.xy), packHalf2x16(high.zw)); \
    scales[p - from] = uintBitsToFloat(cache[at.y])
#else
#define KEY_SCALE(p) 1.0
#define WEIGHT(w, p) w
#define LOAD(cache, scales, block, p, column) words = cache[((block * BLOCK + p % BLOCK) * kv_heads + kv_head) * LOADS + column]
#endif

vec4 halves(uvec2 words) { return vec4(unpackHalf2x16(words.x), unpackHalf2x16(words.y)); }

KERNEL(attention_prefill) {
    int lane = int(gl_LocalInvocationID.x), head = int(gl_WorkGroupID.x), tile = int(gl_WorkGroupID.y);
    int s = 0, seqs = STEP_SEQS, first = 0, tokens = 0;
    for (; s < seqs; s++) {
        first = step_data[seq_begin + s];
        tokens = step_data[seq_begin + s + 1] - first;
        int tiles = (tokens + TILE - 1) / TILE;
        if (tile < tiles) break;
        tile -= tiles;
    }
    if (s == seqs) return;
    int start = step_data[seq_len + s] - tokens + tile * TILE;  // position of the tile's first token
    first += tile * TILE;
    tokens = min(tokens - tile * TILE, TILE);
    int table = block_table + s * max_blocks;
    uint kv_head = head / (heads / kv_heads), row_quads = uint(heads + 2 * kv_heads) * QUADS;
    float unit = 1.0 / sqrt(float(DIM));
    for (uint i = lane; i < TILE * QUADS; i += 128) {
        uint m = i / QUADS;
        vec4 q = m < tokens ? qkv[(first + m) * row_quads + head * QUADS + i % QUADS] * unit : vec4(0.0);
        query[m * (QUADS + 1) + i % QUADS] = q;
    }
    // Scores and values: four tokens from 4 * band on. Maxima and sums: a quarter of the scores of one token.
    int band = lane / 16, column = lane % 16, row = lane / 4, quarter = lane % 4;
    float largest = -INFINITY, total = 0.0;
    vec4 sums[4 * EACH];
    [[unroll]] for (int i = 0; i < 4 * EACH; i++) sums[i] = vec4(0.0);
    int end = start + tokens;
    for (int from = WINDOW_BEGIN(start + 1); from < end; from += CHUNK) {
        barrier();
        for (uint i = lane; i < CHUNK * LOADS; i += 128) {
            int p = from + int(i / LOADS);
            uvec4 words = uvec4(0);  // beyond the end: not to be read
            if (p < end) {
                uint block = step_data[table + p / BLOCK];
                LOAD(keys, key_scale, block, p, i % LOADS);
            }
            uint at = i / LOADS * (QUADS + 1) + i % LOADS * 2;
            cached[at] = words.xy;
            cached[at + 1] = words.zw;
        }
        barrier();
        float found[8];
        [[unroll]] for (int i = 0; i < 8; i++) found[i] = 0.0;
        for (int i = 0; i < QUADS; i++) {
            vec4 a = halves(cached[column * (QUADS + 1) + i]), b = halves(cached[(column + 16) * (QUADS + 1) + i]);
            [[unroll]] for (int t = 0; t < 4; t++) {
                vec4 q = query[(4 * band + t) * (QUADS + 1) + i];
                found[2 * t] += dot(q, a);
                found[2 * t + 1] += dot(q, b);
            }
        }
        [[unroll]] for (int t = 0; t < 4; t++)
            [[unroll]] for (int j = 0; j < 2; j++) {
                int p = column + 16 * j;
                bool seen = from + p <= start + 4 * band + t && from + p < end && from + p >= WINDOW_BEGIN(start + 4 * band + t + 1);
                score[(4 * band + t) * (CHUNK + 1) + p] = seen ? found[2 * t + j] * KEY_SCALE(p) : -INFINITY;
            }
        barrier();
        for (uint i = lane; i < CHUNK * LOADS; i += 128) {
            int p = from + int(i / LOADS);
            uvec4 words = uvec4(0);
            if (p < end) {
                uint block = step_data[table + p / BLOCK];
                LOAD(values, value_scale, block, p, i % LOADS);
            }
            uint at = i / LOADS * (QUADS + 1) + i % LOADS * 2;
            cached[at] = words.xy;
            cached[at + 1] = words.zw;
        }
        int mine = row * (CHUNK + 1) + quarter * 8;
        float most = -INFINITY;
        [[unroll]] for (int i = 0; i < 8; i++) most = max(most, score[mine + i]);
        partial[lane] = most;
        barrier();
        float before = largest, sum = 0.0;
        [[unroll]] for (int i = 0; i < 4; i++) largest = max(largest, partial[row * 4 + i]);
        float base = largest == -INFINITY ? 0.0 : largest;  // a token past the tile's end sees nothing at all
        [[unroll]] for (int i = 0; i < 8; i++) {
            float w = exp(score[mine + i] - base);
            score[mine + i] = w;
            sum += w;
        }
        float factor = exp(before - base);
        if (quarter == 0) correction[row] = factor;
        barrier();
        partial[lane] = sum;
        barrier();
        total *= factor;
        [[unroll]] for (int i = 0; i < 4; i++) total += partial[row * 4 + i];
        [[unroll]] for (int t = 0; t < 4; t++)
            [[unroll]] for (int j = 0; j < EACH; j++) sums[t * EACH + j] *= correction[4 * band + t];
        int count = min(CHUNK, end - from);
        for (int p = 0; p < count; p++) {
            vec4 v[EACH];
            [[unroll]] for (int j = 0; j < EACH; j++)
                v[j] = halves(cached[p * (QUADS + 1) + min(column + 16 * j, QUADS - 1)]);
            [[unroll]] for (int t = 0; t < 4; t++) {
                float w = WEIGHT(score[(4 * band + t) * (CHUNK + 1) + p], p);
                if (WINDOW == 0 || w != 0.0)  // what is behind a token's window may be NaN
                    [[unroll]] for (int j = 0; j < EACH; j++) sums[t * EACH + j] += w * v[j];
            }
        }
    }
    barrier();
    if (quarter == 0) correction[row] = total;
    barrier();
    [[unroll]] for (int t = 0; t < 4; t++)
        [[unroll]] for (int j = 0; j < EACH; j++) {
            int m = 4 * band + t, quad = column + 16 * j;
            if (m < tokens && quad < QUADS)
                result[((first + m) * uint(heads) + head) * QUADS + quad] = sums[t * EACH + j] / correction[m];
        }
}
