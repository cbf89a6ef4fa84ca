// One key/value head and part of the positions of a token's attention, for all the GROUP query heads that share the keys. A
// position's keys and values are spread over LOADS neighbours of a subgroup, who add their products up by shuffles. Each subgroup
// has its own greatest score until all are merged at the end.
#include "attention_cache.glsl"
shared vec4 pool[SUBS * GROUP * QUADS];
shared vec2 found_by[SUBS * GROUP];  // of a subgroup and head: the greatest score, and the sum of weights
const float LOWEST = -3e38;          // score of a missing position; the difference of two is finite

#define HEADS(F, i) F(i, 0) F(i, 1) F(i, 2) F(i, 3) F(i, 4) F(i, 5) F(i, 6) F(i, 7)

// Attends to the positions from `begin` to before `end`, the first CHUNK of which are requested. The results come from
// the functions below.
void attend(Place at, int begin, int end) {
    int run = at.lane / LOADS, column = at.lane % LOADS;
    find_blocks(at, begin + CHUNK);
    share_token(at, begin, end);
    barrier();
    vec4 q_low[8], q_high[8], sum_low[8], sum_high[8];
    float largest[8], total[8];
#define BEGIN(i, h) if (h < GROUP) { \
        q_low[h] = query[h * QUADS + column * STEP]; \
        if (STEP == 2) q_high[h] = query[h * QUADS + column * STEP + 1]; \
        sum_low[h] = sum_high[h] = vec4(0.0); \
        largest[h] = LOWEST; \
        total[h] = 0.0; \
    }
    HEADS(BEGIN, 0)
    for (int start = begin; start < end; start += CHUNK) {
        uvec4 now_k[8], now_v[8];
#define TAKE(i) if (i < EACH) { \
            now_k[i] = IS_OWN(i) ? own_key[column] : held_k[i]; \
            now_v[i] = IS_OWN(i) ? own_value[column] : held_v[i]; \
        }
        REPEAT_8(TAKE)
        if (start + CHUNK < end) {  // the next ones are on their way meanwhile
            fetch_cached(at, start + CHUNK, end);
            find_blocks(at, start + 2 * CHUNK);
        }
        float score[8][8], most[8];
#define SCORE(i, h) if (h < GROUP) { \
            float dots = dot(low_of(key), q_low[h]); \
            if (STEP == 2) dots += dot(high_of(key), q_high[h]); \
            [[unroll]] for (uint apart = LOADS / 2; apart > 0; apart /= 2) dots += subgroupShuffleXor(dots, apart); \
            score[i][h] = start + run + i * RUNS < end ? dots : LOWEST; \
            most[h] = i == 0 ? score[i][h] : max(most[h], score[i][h]); \
        }
#define SCORES(i) if (i < EACH) { \
            uvec4 key = now_k[i]; \
            HEADS(SCORE, i) \
        }
        REPEAT_8(SCORES)
#define CORRECT(i, h) if (h < GROUP) { \
            [[unroll]] for (uint apart = LOADS; apart < SUBGROUP; apart *= 2) most[h] = max(most[h], subgroupShuffleXor(most[h], apart)); \
            most[h] = max(most[h], largest[h]); \
            float correction = exp(largest[h] - most[h]); \
            largest[h] = most[h]; \
            total[h] *= correction; \
            sum_low[h] *= correction; \
            if (STEP == 2) sum_high[h] *= correction; \
        }
        HEADS(CORRECT, 0)
#define ADD(i, h) if (h < GROUP) { \
            float weight = exp(score[i][h] - largest[h]); \
            total[h] += weight; \
            sum_low[h] += weight * low_of(value); \
            if (STEP == 2) sum_high[h] += weight * high_of(value); \
        }
#define VALUES(i) if (i < EACH) { \
            uvec4 value = now_v[i]; \
            HEADS(ADD, i) \
        }
        REPEAT_8(VALUES)
    }
    uint sub = gl_SubgroupID;
#define END(i, h) if (h < GROUP) { \
        [[unroll]] for (uint apart = LOADS; apart < SUBGROUP; apart *= 2) { \
            total[h] += subgroupShuffleXor(total[h], apart); \
            sum_low[h] += subgroupShuffleXor(sum_low[h], apart); \
            if (STEP == 2) sum_high[h] += subgroupShuffleXor(sum_high[h], apart); \
        } \
        if (gl_SubgroupInvocationID < LOADS) { \
            uint to = (sub * GROUP + h) * QUADS + column * STEP; \
            pool[to] = sum_low[h]; \
            if (STEP == 2) pool[to + 1] = sum_high[h]; \
            if (column == 0) found_by[sub * GROUP + h] = vec2(largest[h], total[h]); \
        } \
    }
    HEADS(END, 0)
    barrier();
}

float greatest_of(uint h) {
    float most = LOWEST;
    for (uint s = 0; s < SUBS; s++) most = max(most, found_by[s * GROUP + h].x);
    return most;
}

float total_of(uint h) {
    float most = greatest_of(h), sum = 0.0;
    for (uint s = 0; s < SUBS; s++) sum += found_by[s * GROUP + h].y * exp(found_by[s * GROUP + h].x - most);
    return sum;
}

// Four dimensions of a head, heads behind one another.
vec4 sum_of_runs(uint quad) {
    uint h = quad / QUADS;
    float most = greatest_of(h);
    vec4 sum = vec4(0.0);
    for (uint s = 0; s < SUBS; s++) sum += pool[s * GROUP * QUADS + quad] * exp(found_by[s * GROUP + h].x - most);
    return sum;
}
