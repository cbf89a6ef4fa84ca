// requires: SUBGROUPS
// variants: MATRICES
// The token of each of up to 8 rows: scores from the full weights every row of the head that could still win by its rough
// score, exactly as the kernel for the logits does (the same products in the same order: that of dense_mma where MATRICES, else
// of dense.glsl), and takes the greatest. A work-group looks at EACH * WG rows of the head; the one that ends last
// stores the tokens.
//
// FILTERED, for one row of x: also scores the rows of the head that are taken (filter.glsl) and lists them. The work-group that ends
// last decides from them whether the token passes the filters. Where it does not know, the step goes on to all logits.
#include "dense.glsl"
layout(constant_id = 1) const int COLS = 32;  // a multiple of 32
layout(constant_id = 2) const int TOKENS = 1;
layout(constant_id = 3) const int LANES = 8;
layout(constant_id = 4) const int EACH = 1;   // at most 8
layout(constant_id = 5) const int FILTERED = 0;
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, vec2, size);
BUFFER(2, readonly, vec4, params);
BUFFER(3, coherent, float, scores);  // where FILTERED, exact scores replace rough ones
BUFFER(4, coherent, uint, state);
BUFFER(5, readonly, uvec4, weight);
BUFFER(6, writeonly, int, chosen);
#if MATRICES
BUFFER(7, readonly, uvec4, split);
BUFFER(8, readonly, float, undo);
#else
BUFFER(7, readonly, vec4, x);
#endif
layout(push_constant) uniform Push { int rows_at, temperatures, seeds_lo, seeds_hi, token_seq, seq_begin, seq_len, top_ks, top_ps, min_ps, rows; };
#include "head.glsl"
const int QUADS = COLS / 8;
shared uint listed[EACH * WG];
shared uint found;
shared uint last;
shared uint top_key[MAX_ROWS];
shared uint top_token[MAX_ROWS];
shared float chance[1 + FILTERED * (EACH * WG - 1)];  // of a listed row, if it was taken; else 0
shared float counted[1 + FILTERED * (BINS - 1)];
shared uint bar;
Choice only;  // of the only row

Choice choice_of(uint r) { return TOKENS == 1 ? only : head_choice(r); }

// Invocation `r` gets the greatest key for row r of x, and its token, of its own and those of all invocations:
// the lowest token among equals. All invocations must call it. A key of 0 is none.
uvec2 greatest(uvec2 had, uint r, uint key, uint token) {
    uint lane = LANE;
    if (lane < MAX_ROWS) {
        top_key[lane] = had.x;
        top_token[lane] = had.y;
    }
    barrier();
    if (key != 0) atomicMax(top_key[r], key);
    barrier();
    if (lane < MAX_ROWS && top_key[lane] != had.x) top_token[lane] = 0xFFFFFFFFu;
    barrier();
    if (key != 0 && key == top_key[r]) atomicMin(top_token[r], token);
    barrier();
    return lane < MAX_ROWS ? uvec2(top_key[lane], top_token[lane]) : uvec2(0);
}

// The key of an exact score. A NaN key wins over all.
const uint NO_NUMBER = 0xFFFFFFFFu;
uint key_of(uint r, float score, uint token) {
    float key = head_key(choice_of(r), score, token);
    return no_number(key) ? NO_NUMBER : float_key(key);
}

#if !MATRICES
shared float below[SUBS];

// The logarithm of the rate at which SAMPLES rows of the head are taken on average. Each subgroup tries one, again and again.
float find_rate() {
    for (uint i = LANE; i < BINS; i += WG) counted[i] = float(state[STATE_BINS + i]);
    float peak = key_float(state[STATE_PEAK]), low = -20.0, width = 20.0 + float(BINS);  // as if the peak were at 0
    uint at = bin_of(peak);
    while (width > 0.05) {
        width /= float(SUBS + 1);
        float sum = 0.0, log_rate = low + float(gl_SubgroupID + 1) * width;
        barrier();
        for (uint i = gl_SubgroupInvocationID; i < BINS; i += SUBGROUP)
            sum += counted[at - i & BINS - 1] * min(exp(log_rate + 0.5 - float(i)), 1.0);
        sum = subgroupAdd(sum);
        if (gl_SubgroupInvocationID == 0) below[gl_SubgroupID] = sum <= SAMPLES ? width : 0.0;
        barrier();
        for (int i = 0; i < SUBS; i++) low += below[i];
    }
    return low - floor(peak);
}

uint list_at() { return STATE_FOUND + 2 * MAX_ROWS * gl_NumWorkGroups.x; }
float listed_z(uint i) { return uintBitsToFloat(state[list_at() + 2 * i]); }
float listed_chance(uint i) { return uintBitsToFloat(state[list_at() + 2 * i + 1]); }

// The greatest key that so many of the rows reach which were certain to be taken; 0 where there are fewer.
uint kth_greatest(uint count, float wanted) {
    uint low = 0, high = 0xFFFFFFFFu;
    while (low < high) {
        uint middle = low + (high - low) / 2 + 1;
        float reach = 0.0;
        for (uint i = LANE; i < count; i += WG) reach += listed_chance(i) >= 1.0 && float_key(listed_z(i)) >= middle ? 1.0 : 0.0;
        reach = group_sum_max(reach, 0.0).x;
        if (reach >= wanted) low = middle;
        else high = middle - 1;
        if (reach == wanted) break;
    }
    return low;
}

// Whether a token with z_w, the winner of all, passes the filters for certain. Decision 0026 has the proof.
bool passes(Filter f, float log_rate, float z_w) {
    uint count = state[STATE_TAKEN], reach = state[STATE_BAR];  // `reach` 0: there is no such row
    if (count > CAPACITY || f.top_k > MAX_TOP_K) return false;
    float evidence = 0.0, more = 0.0, above = 0.0, greatest = -INFINITY;
    for (uint i = LANE; i < count; i += WG) {
        float z = listed_z(i), p = listed_chance(i), size = exp(z + log_rate), bet = f.bet * size;
        bool sure = p >= 1.0, likelier = z > z_w;
        bool counts = likelier && (sure || bet * (1.0 - f.share) <= MAX_BET * p);
        bet *= (counts ? 1.0 : 0.0) - f.share;
        evidence += sure ? -bet : log1m(bet / p);
        if (!sure) continue;
        greatest = max(greatest, z);
        if (likelier) {
            more += 1.0;
            above += size;
        }
    }
    vec2 all = group_sum_max(evidence, greatest);
    more = group_sum_max(more, 0.0).x;
    above = group_sum_max(above, 0.0).x;
    bool all_known = reach == 0 || z_w >= key_float(reach);  // all tokens likelier than the winner were certain to be taken
    bool fine = true;
    if (f.top_k > 0) fine = all_known && more < float(f.top_k);
    if (f.min_z > -INFINITY) fine = fine && z_w >= max(all.y, reach == 0 ? -INFINITY : key_float(reach)) + f.min_z;
    if (!fine || f.top_p >= 1.0 || (all_known && more == 0.0)) return fine;
    if (f.top_k == 0) return !no_number(all.x) && all.x >= WRONG;
    uint least = kth_greatest(count, float(f.top_k));  // top-p is a share of the mass of the k likeliest
    float mass = 0.0;
    for (uint i = LANE; i < count; i += WG)
        if (listed_chance(i) >= 1.0 && float_key(listed_z(i)) >= least) mass += exp(listed_z(i) + log_rate);
    return (least == 0 || least >= reach) && above < f.share * group_sum_max(mass, 0.0).x;
}
#else  // for several rows of x, which are never FILTERED
float find_rate() { return 0.0; }
bool passes(Filter f, float log_rate, float z_w) { return false; }
#endif

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
            sum = sum_of_lanes(sum, LANES);
            if (FILTERED != 0 && part == 0) {
                scores[token] = sum;
                uint to = chance[i] > 0.0 ? atomicAdd(state[STATE_TAKEN], 1) : CAPACITY;
                if (to < CAPACITY) {
                    state[list_at() + 2 * to] = floatBitsToUint(sum * only.inverse);
                    state[list_at() + 2 * to + 1] = floatBitsToUint(chance[i]);
                }
            }
            uint key = key_of(r, sum, token);
            if (part == r && (key > best.x || (key == best.x && key != 0 && token < best.y))) best = uvec2(key, token);
        }
    }
    return greatest(uvec2(0), part % MAX_ROWS, best.x, best.y);
}
#endif

KERNEL(head_choose) {
    uint lane = LANE, group = gl_WorkGroupID.x, begin = group * (EACH * WG) + lane, count = TOKENS == 1 ? 1 : STEP_ROWS;
    if (lane == 0) found = 0;
    if (TOKENS == 1) only = head_choice(0);
    Filter f;
    float log_rate = 0.0;
    bool taking = false;
    if (FILTERED != 0) {
        f = row_filter(0, rows);
        if (lane == 0) bar = 0;
        if (f.on) log_rate = find_rate();
        taking = f.on && !no_number(log_rate) && abs(log_rate) < INFINITY;
    }
    vec2 sizes[8];
    float score[8], chances[8];
    bool doubtful[8];
    uint highest = 0;
#define CLEAR(i) if (i < EACH) { \
        sizes[i] = size[SIZES_AT + min(begin + i * WG, rows - 1)]; \
        doubtful[i] = false; \
        chances[i] = 0.0; \
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
        float doubt = p.z * sizes[i].x + p.w * sizes[i].y, key = head_key(choice, score[i] + doubt, begin + i * WG); \
        doubtful[i] = doubtful[i] || reached == 0 || isnan(key) || !(key < least); \
        if (FILTERED != 0 && taking && begin + i * WG < rows) { \
            float high = (score[i] + RAISED * doubt) * choice.inverse; \
            uint n = begin + i * WG, word = noise_words(choice.seed_lo, choice.seed_hi, n, choice.position, 1)[n & 3u]; \
            chances[i] = chance_of(log_size(f, score[i] * choice.inverse, high), log_rate); \
            if (chances[i] < 1.0) highest = max(highest, float_key(no_number(high) ? INFINITY : high)); \
            if (!takes(chances[i], word)) chances[i] = 0.0; \
        } \
    }
        REPEAT_8(READ)
        REPEAT_8(DOUBT)
    }
    barrier();
#define LIST(i) if (i < EACH && (doubtful[i] || chances[i] > 0.0) && begin + i * WG < rows) { \
        uint at = atomicAdd(found, 1); \
        listed[at] = begin + i * WG; \
        if (FILTERED != 0) chance[at] = chances[i]; \
    }
    REPEAT_8(LIST)
    if (FILTERED != 0 && highest != 0) atomicMax(bar, highest);
    barrier();
    if (FILTERED != 0 && lane == 0) atomicMax(state[STATE_BAR], bar);
    uvec2 best = scored(count);
    if (lane < count) {
        uint at = STATE_FOUND + (group * MAX_ROWS + lane) * 2;
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
            uint at = STATE_FOUND + (g * MAX_ROWS + r) * 2;
            uvec2 other = uvec2(state[at], state[at + 1]);
            if (other.x > mine.x || (other.x == mine.x && other.x != 0 && other.y < mine.y)) mine = other;
        }
        best = greatest(best, r, mine.x, mine.y);
    }
    if (lane < count) chosen[lane] = best.x == NO_NUMBER ? -1 : best.x != 0 ? int(best.y) : 0;
    if (FILTERED == 0 || !f.on || top_key[0] == NO_NUMBER) return;
    bool known = taking && passes(f, log_rate, scores[top_token[0]] * only.inverse);
    if (lane == 0) state[STATE_UNDECIDED] = known ? 0 : 1;
}
