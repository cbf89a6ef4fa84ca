// requires: SUBGROUPS
// variants: MATRICES
// The token of each of up to 8 rows: scores from the full weights every row of the head that could still win by its rough
// score, exactly as the kernel for the logits does (the same products in the same order: that of dense_mma where MATRICES, else
// of dense.glsl), and takes the greatest. A work-group looks at EACH * WG rows of the head; the one that ends last
// stores the tokens.
#include "dense.glsl"
layout(constant_id = 1) const int COLS = 32;  // a multiple of 32
layout(constant_id = 2) const int TOKENS = 1;
layout(constant_id = 3) const int LANES = 8;
layout(constant_id = 4) const int EACH = 1;   // at most 8
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, vec2, size);
BUFFER(2, readonly, vec4, params);
BUFFER(3, readonly, float, scores);
BUFFER(4, coherent, uint, state);
BUFFER(5, readonly, uvec4, weight);
BUFFER(6, writeonly, int, chosen);
#if MATRICES
BUFFER(7, readonly, uvec4, split);
BUFFER(8, readonly, float, undo);
#else
BUFFER(7, readonly, vec4, x);
#endif
layout(push_constant) uniform Push { int rows_at, temperatures, seeds_lo, seeds_hi, token_seq, seq_begin, seq_len, rows; };
#include "head.glsl"
const int QUADS = COLS / 8;
shared uint listed[EACH * WG];
shared uint found;
shared uint last;
shared uint top_key[MOST_ROWS];
shared uint top_token[MOST_ROWS];
Choice only;  // of the only row

Choice choice_of(uint r) { return TOKENS == 1 ? only : head_choice(r); }

// Invocation `r` gets the greatest key for row r of x, and its token, of its own and those of all invocations:
// the lowest token among equals. All invocations must call it. A key of 0 is none.
uvec2 greatest(uvec2 had, uint r, uint key, uint token) {
    uint lane = LANE;
    if (lane < MOST_ROWS) {
        top_key[lane] = had.x;
        top_token[lane] = had.y;
    }
    barrier();
    if (key != 0) atomicMax(top_key[r], key);
    barrier();
    if (lane < MOST_ROWS && top_key[lane] != had.x) top_token[lane] = 0xFFFFFFFFu;
    barrier();
    if (key != 0 && key == top_key[r]) atomicMin(top_token[r], token);
    barrier();
    return lane < MOST_ROWS ? uvec2(top_key[lane], top_token[lane]) : uvec2(0);
}

// The key of an exact score. A NaN key wins over all.
const uint NO_NUMBER = 0xFFFFFFFFu;
uint key_of(uint r, float score, uint token) {
    float key = head_key(choice_of(r), score, token);
    return no_number(key) ? NO_NUMBER : float_key(key);
}

#if MATRICES
#define SUMS coopmat<float, gl_ScopeSubgroup, 16, 16, gl_MatrixUseAccumulator>
#define TOTAL(a, b) ((a) + (b))
#define LEFT coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseA>
#define RIGHT coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseB>
const int PITCH = 9, WEIGHTS = 32 * PITCH;  // as dense_mma has them
shared uvec4 pool[WEIGHTS + 128 * PITCH];

// The best of the listed rows, 128 at a time: eight subgroups of 32 have 16 each.
uvec2 scored(uint count) {
    uint lane = LANE;
    uvec2 best = uvec2(0);
    for (uint first = 0; first < found; first += 128) {
        SUMS totals = SUMS(0.0);
        for (uint from = 0; from < QUADS; from += 8) {
            barrier();
            uint r = lane / 8 % 16, k = from + lane % 8;
            pool[lane / 8 * PITCH + lane % 8] = r < count && k < QUADS ? split[(2 * r + lane / 128) * QUADS + k] : uvec4(0);
#define SHARE_WEIGHTS(i) { \
            uint at = (lane + i * 256) / 8; \
            bool there = first + at < found && k < QUADS; \
            pool[WEIGHTS + at * PITCH + lane % 8] = there ? weight[listed[first + at] * QUADS + k] : uvec4(0); \
        }
            REPEAT_4(SHARE_WEIGHTS)
            barrier();
            SUMS sums = SUMS(0.0);
            [[unroll]] for (uint i = 0; i < 8; i += 2) {
                RIGHT part;
                LEFT row;
                coopMatLoad(part, pool, WEIGHTS + gl_SubgroupID * 16 * PITCH + i, PITCH, gl_CooperativeMatrixLayoutColumnMajor);
                coopMatLoad(row, pool, i, PITCH, gl_CooperativeMatrixLayoutRowMajor);
                sums = coopMatMulAdd(row, part, sums);
                coopMatLoad(row, pool, 16 * PITCH + i, PITCH, gl_CooperativeMatrixLayoutRowMajor);
                sums = coopMatMulAdd(row, part, sums);
            }
            totals = TOTAL(totals, sums);
        }
        barrier();
        coopMatStore(totals, pool, gl_SubgroupID * 4, 32, gl_CooperativeMatrixLayoutRowMajor);
        barrier();
        for (uint i = lane; i < (TOKENS + 1) / 2 * 256; i += 256) {
            uint r = i / 128, at = first + i % 128, key = 0, token = 0;
            if (r < count && at < found) {
                token = listed[at];
                key = key_of(r, uintBitsToFloat(pool[i / 4][i % 4]) * undo[r], token);
            }
            best = greatest(best, r, key, token);
        }
    }
    return best;
}
#else
// The best of the listed rows: LANES invocations score a row of the head, and one of them keeps the best for each row of x.
uvec2 scored(uint count) {
    uint lane = LANE, part = lane % LANES;
    uvec2 best = uvec2(0);
    for (uint i = lane / LANES; i < found; i += WG / LANES) {
        uint token = listed[i];
        for (uint r = 0; r < count; r++) {
            float sum = 0.0;
            for (uint base = part; base < part + QUADS; base += 16 * LANES) {
                uvec4 words[16];
                vec4 low[16], high[16];
#define FETCH(i) if (i * LANES < QUADS) { \
                uint k = min(base + i * LANES, QUADS - 1); \
                words[i] = weight[token * QUADS + k]; \
                low[i] = x[r * QUADS * 2 + 2 * k]; \
                high[i] = x[r * QUADS * 2 + 2 * k + 1]; \
            }
#define ADD(i) if (base + i * LANES < QUADS) \
                sum = add_products(sum, low[i], high[i], halves(words[i].x, words[i].y), halves(words[i].z, words[i].w));
                REPEAT_16(FETCH)
                REPEAT_16(ADD)
            }
            uint key = key_of(r, sum_of_lanes(sum, LANES), token);
            if (part == r && (key > best.x || (key == best.x && key != 0 && token < best.y))) best = uvec2(key, token);
        }
    }
    return greatest(uvec2(0), part % MOST_ROWS, best.x, best.y);
}
#endif

KERNEL(head_choose) {
    uint lane = LANE, group = gl_WorkGroupID.x, begin = group * (EACH * WG) + lane, count = TOKENS == 1 ? 1 : STEP_ROWS;
    if (lane == 0) found = 0;
    if (TOKENS == 1) only = head_choice(0);
    vec2 sizes[8];
    float score[8];
    bool doubtful[8];
#define CLEAR(i) if (i < EACH) { \
        sizes[i] = size[min(begin + i * WG, rows - 1)]; \
        doubtful[i] = false; \
    }
    REPEAT_8(CLEAR)
    for (uint r = 0; r < count; r++) {
        vec4 p = params[r];
        Choice choice = choice_of(r);
        uint reached = state[r];
        float least = key_float(reached);
        least -= 1e-5 + 1e-6 * abs(least);
#define READ(i) if (i < EACH) score[i] = scores[r * rows + min(begin + i * WG, rows - 1)];
#define DOUBT(i) if (i < EACH) { \
        float key = head_key(choice, score[i] + (p.z * sizes[i].x + p.w * sizes[i].y), begin + i * WG); \
        doubtful[i] = doubtful[i] || reached == 0 || isnan(key) || !(key < least); \
    }
        REPEAT_8(READ)
        REPEAT_8(DOUBT)
    }
    barrier();
#define LIST(i) if (i < EACH && doubtful[i] && begin + i * WG < rows) listed[atomicAdd(found, 1)] = begin + i * WG;
    REPEAT_8(LIST)
    barrier();
    uvec2 best = scored(count);
    if (lane < count) {
        uint at = STATE_FOUND + (group * MOST_ROWS + lane) * 2;
        state[at] = best.x;
        state[at + 1] = best.y;
    }
    memoryBarrierBuffer();
    barrier();
    if (lane == 0) last = atomicAdd(state[STATE_ARRIVALS], 1);
    barrier();
    if (last != gl_NumWorkGroups.x - 1) return;
    memoryBarrierBuffer();
    best = uvec2(0);
    for (uint r = 0; r < count; r++) {
        uvec2 mine = uvec2(0);
        for (uint g = lane; g < gl_NumWorkGroups.x; g += WG) {
            uint at = STATE_FOUND + (g * MOST_ROWS + r) * 2;
            uvec2 other = uvec2(state[at], state[at + 1]);
            if (other.x > mine.x || (other.x == mine.x && other.x != 0 && other.y < mine.y)) mine = other;
        }
        best = greatest(best, r, mine.x, mine.y);
    }
    if (lane < count) chosen[lane] = best.x == NO_NUMBER ? -1 : best.x != 0 ? int(best.y) : 0;
}
