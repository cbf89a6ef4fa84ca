// requires: COOPMAT SUBGROUPS
// Attention of many tokens over an f16 cache, on f16 cooperative matrices of 16 x 16 x 16: a work-group of eight subgroups of 32
// takes one head of TILE tokens of a sequence, and the cache in chunks of CHUNK positions, with a running maximum (Dao 2023). A
// subgroup has 16 of the tokens and half of a chunk's positions; the results of the two halves are merged at the end.
// Where a matrix keeps an element is up to the device, so scores go through shared memory, and a token's correction comes as a
// matrix of its row. Places and strides are in 16 bytes.
layout(constant_id = 1) const int DIM = 64;  // a multiple of 16, at most 128
layout(constant_id = 2) const int BLOCK = 32;
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, vec4, qkv);
BUFFER(2, readonly, uvec4, keys);
BUFFER(3, readonly, uvec4, values);
BUFFER(4, writeonly, vec4, result);
layout(push_constant) uniform Push { int token_seq, seq_begin, seq_len, block_table, max_blocks, heads, kv_heads; };
#define SUMS coopmat<float, gl_ScopeSubgroup, 16, 16, gl_MatrixUseAccumulator>
#define LEFT coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseA>
#define RIGHT coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseB>
#define PRODUCT(a, b) ((a) * (b))
#define TOTAL(a, b) ((a) + (b))
const int TILE = 64, CHUNK = 64, HALF = CHUNK / 2;
const int QUADS = DIM / 4, LOADS = DIM / 8, PITCH = LOADS + 1;  // one more a row, so that rows fall into different banks
const int STEPS = DIM / 16;                                     // matrices of a row
const int OWN_PITCH = HALF / 4 + 1, OWN = 16 * OWN_PITCH;       // of a subgroup's scores, f32, and later weights, f16
const int VALUES = 8 * OWN;                                     // keys and then scores stand before the values
const int EACH = (CHUNK * LOADS + 255) / 256;
#define INSIDE(at) (CHUNK * LOADS % 256 == 0 || at < CHUNK * LOADS)
shared uvec4 pool[VALUES + CHUNK * PITCH];
shared vec4 factors[8 * 16 * 4];  // a row's correction, 16 times
shared float tops[2 * TILE];
shared float totals[2 * TILE];

KERNEL(attention_mma) {
    int lane = LANE, head = int(gl_WorkGroupID.x), tile = -1 - int(gl_WorkGroupID.y);
    // Tiles are counted over the sequences, each of which begins with a new one; the last, which take the longest, come first.
    int s = 0, seqs = STEP_SEQS, first = 0, tokens = 0;
    for (int i = 0; i < seqs; i++) tile += (step_data[seq_begin + i + 1] - step_data[seq_begin + i] + TILE - 1) / TILE;
    if (tile < 0) return;
    for (; s < seqs; s++) {
        first = step_data[seq_begin + s];
        tokens = step_data[seq_begin + s + 1] - first;
        int tiles = (tokens + TILE - 1) / TILE;
        if (tile < tiles) break;
        tile -= tiles;
    }
    int start = step_data[seq_len + s] - tokens + tile * TILE;  // position of the tile's first token
    first += tile * TILE;
    tokens = min(tokens - tile * TILE, TILE);
    int table = block_table + s * max_blocks, end = start + tokens;
    uint kv_head = head / (heads / kv_heads), row_quads = uint(heads + 2 * kv_heads) * QUADS;
    float unit = 1.0 / sqrt(float(DIM));
    for (uint i = lane; i < TILE * LOADS; i += 256) {
        uint m = i / LOADS, from = (first + m) * row_quads + head * QUADS + i % LOADS * 2;
        vec4 a = m < tokens ? qkv[from] * unit : vec4(0.0), b = m < tokens ? qkv[from + 1] * unit : vec4(0.0);
        pool[m * PITCH + i % LOADS] =
            uvec4(half_pair(a.x, a.y), half_pair(a.z, a.w), half_pair(b.x, b.y), half_pair(b.z, b.w));
    }
    uvec4 next_k[4], next_v[4];
    int from = 0;
#define FETCH(i) if (i < EACH) { \
        uint at = lane + i * 256; \
        int p = from + int(at / LOADS); \
        bool there = INSIDE(at) && p < end; /* beyond the end: not to be read */ \
        uint block = there ? step_data[table + p / BLOCK] : 0; \
        uint place = ((block * BLOCK + p % BLOCK) * kv_heads + kv_head) * LOADS + at % LOADS; \
        next_k[i] = there ? keys[place] : uvec4(0); \
        next_v[i] = there ? values[place] : uvec4(0); \
    }
    REPEAT_4(FETCH)
    barrier();
    int rows = int(gl_SubgroupID % 4) * 16, half_ = int(gl_SubgroupID / 4), inside = int(gl_SubgroupInvocationID);
    uint own = gl_SubgroupID * OWN, own_factors = gl_SubgroupID * 64;
    LEFT query[8];
    SUMS sums[8];
#define QUERY(i) if (i < STEPS) { \
        coopMatLoad(query[i], pool, rows * PITCH + 2 * i, PITCH, gl_CooperativeMatrixLayoutRowMajor); \
        sums[i] = SUMS(0.0); \
    }
    REPEAT_8(QUERY)
    // Two invocations a token, which have 16 scores each.
    int row = inside / 2, side = inside % 2;
    float largest = -INFINITY, total = 0.0;
    while (from < end) {
        barrier();
#define SHARE(i) if (i < EACH) { \
        uint at = lane + i * 256, to = at / LOADS * PITCH + at % LOADS; \
        if (INSIDE(at)) { \
            pool[to] = next_k[i]; \
            pool[VALUES + to] = next_v[i]; \
        } \
    }
        REPEAT_4(SHARE)
        int base = from + half_ * HALF + side * 16;  // position of this invocation's first score
        from += CHUNK;
        barrier();
        REPEAT_4(FETCH)
        SUMS low = SUMS(0.0);
        SUMS high = SUMS(0.0);
#define SCORE(i) if (i < STEPS) { \
        RIGHT key; \
        coopMatLoad(key, pool, half_ * HALF * PITCH + 2 * i, PITCH, gl_CooperativeMatrixLayoutColumnMajor); \
        low = coopMatMulAdd(query[i], key, low); \
        coopMatLoad(key, pool, (half_ * HALF + 16) * PITCH + 2 * i, PITCH, gl_CooperativeMatrixLayoutColumnMajor); \
        high = coopMatMulAdd(query[i], key, high); \
    }
        REPEAT_8(SCORE)
        barrier();
        coopMatStore(low, pool, own, OWN_PITCH, gl_CooperativeMatrixLayoutRowMajor);
        coopMatStore(high, pool, own + 4, OWN_PITCH, gl_CooperativeMatrixLayoutRowMajor);
        subgroupMemoryBarrierShared();
        subgroupBarrier();
        vec4 score[4];
        float before = largest;
#define LOOK(i) { \
        vec4 v = uintBitsToFloat(pool[own + row * OWN_PITCH + side * 4 + i]); \
        ivec4 p = base + 4 * i + ivec4(0, 1, 2, 3); \
        v = mix(vec4(-INFINITY), v, lessThanEqual(p, ivec4(min(start + rows + row, end - 1)))); \
        score[i] = v; \
        largest = max(largest, max(max(v.x, v.y), max(v.z, v.w))); \
    }
        REPEAT_4(LOOK)
        largest = max(largest, subgroupShuffleXor(largest, 1));
        float top = largest == -INFINITY ? 0.0 : largest, factor = exp(before - top);  // before the first position it sees: zeros
        total *= factor;
#define WEIGH(i) { score[i] = exp(score[i] - top); total += dot(score[i], vec4(1.0)); }
        REPEAT_4(WEIGH)
        subgroupBarrier();
        uvec2 words[4];
#define PACK(i) words[i] = uvec2(packHalf2x16(score[i].xy), packHalf2x16(score[i].zw));
        REPEAT_4(PACK)
        pool[own + row * OWN_PITCH + side * 2] = uvec4(words[0], words[1]);
        pool[own + row * OWN_PITCH + side * 2 + 1] = uvec4(words[2], words[3]);
        factors[own_factors + row * 4 + side * 2] = vec4(factor);
        factors[own_factors + row * 4 + side * 2 + 1] = vec4(factor);
        subgroupMemoryBarrierShared();
        subgroupBarrier();
        SUMS correction;
        coopMatLoad(correction, factors, own_factors, 4, gl_CooperativeMatrixLayoutRowMajor);
        LEFT weights;
        LEFT more;
        coopMatLoad(weights, pool, own, OWN_PITCH, gl_CooperativeMatrixLayoutRowMajor);
        coopMatLoad(more, pool, own + 2, OWN_PITCH, gl_CooperativeMatrixLayoutRowMajor);
#define ADD_VALUES(i) if (i < STEPS) { \
        RIGHT value; \
        sums[i] = PRODUCT(sums[i], correction); \
        coopMatLoad(value, pool, VALUES + half_ * HALF * PITCH + 2 * i, PITCH, gl_CooperativeMatrixLayoutRowMajor); \
        sums[i] = coopMatMulAdd(weights, value, sums[i]); \
        coopMatLoad(value, pool, VALUES + (half_ * HALF + 16) * PITCH + 2 * i, PITCH, gl_CooperativeMatrixLayoutRowMajor); \
        sums[i] = coopMatMulAdd(more, value, sums[i]); \
    }
        REPEAT_8(ADD_VALUES)
    }
    total += subgroupShuffleXor(total, 1);
    if (side == 0) {
        tops[half_ * TILE + rows + row] = largest;
        totals[half_ * TILE + rows + row] = total;
    }
    barrier();
    // Each half is brought to the common maximum and divided by the common sum; the second goes through shared memory.
    float top = max(tops[rows + row], tops[TILE + rows + row]);
    float a = exp(tops[rows + row] - top) * totals[rows + row], b = exp(tops[TILE + rows + row] - top) * totals[TILE + rows + row];
    float share = exp(largest - top) / (a + b);
    factors[own_factors + row * 4 + side * 2] = vec4(share);
    factors[own_factors + row * 4 + side * 2 + 1] = vec4(share);
    subgroupMemoryBarrierShared();
    subgroupBarrier();
    SUMS shares;
    coopMatLoad(shares, factors, own_factors, 4, gl_CooperativeMatrixLayoutRowMajor);
#define STORE(i) if (i < STEPS) coopMatStore(sums[i], pool, rows * (QUADS + 1) + 4 * i, QUADS + 1, gl_CooperativeMatrixLayoutRowMajor);
#define SCALE(i) if (i < STEPS) sums[i] = PRODUCT(sums[i], shares);
#define ADD_OTHER(i) if (i < STEPS) { \
        SUMS other; \
        coopMatLoad(other, pool, rows * (QUADS + 1) + 4 * i, QUADS + 1, gl_CooperativeMatrixLayoutRowMajor); \
        sums[i] = TOTAL(sums[i], other); \
    }
    REPEAT_8(SCALE)
    if (half_ == 1) {
        REPEAT_8(STORE)
    }
    barrier();
    if (half_ == 0) {
        REPEAT_8(ADD_OTHER)
        REPEAT_8(STORE)
    }
    barrier();
    for (uint i = lane; i < TILE * QUADS; i += 256) {
        uint m = i / QUADS;
        if (m < tokens)
            result[((first + m) * uint(heads) + head) * QUADS + i % QUADS] = uintBitsToFloat(pool[m * (QUADS + 1) + i % QUADS]);
    }
}
