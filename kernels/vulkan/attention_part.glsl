// One key/value head and part of the positions of a token's attention, for all the GROUP query heads that share the keys, where
// subgroups are missing. Keys go through shared memory, where an invocation takes a whole score; values are
// summed as they are held.
#include "attention_cache.glsl"
const int PAIRS = (GROUP * CHUNK + WG - 1) / WG;  // scores of an invocation
shared uvec4 pool[POOL];  // keys: LOADS and one more a position, so that positions fall into different banks
shared vec4 score[GROUP * CHUNK / 4];
shared float weight[GROUP * CHUNK];
shared float correction[8];
shared float greatest[GROUP];
shared float totals[GROUP];
vec4 sums[16];  // of each head, STEP quads

// Adds a position's value, as the heads weigh it.
void add_value(uvec4 words, uint p) {
    vec4 a = low_of(words), b = high_of(words);
#define ADD_HEAD(h) if (h < GROUP) { \
        float w = weight[h * CHUNK + p]; \
        sums[2 * h] += w * a; \
        if (STEP == 2) sums[2 * h + 1] += w * b; \
    }
    REPEAT_8(ADD_HEAD)
}
// Attends to the positions from `begin` to before `end`, the first CHUNK of which are requested. The results come from
// the functions below.
void attend(Place at, int begin, int end) {
    int lane = at.lane, run = lane / LOADS, column = lane % LOADS;
    [[unroll]] for (int i = 0; i < 16; i++) sums[i] = vec4(0.0);
    float largest[8];
    [[unroll]] for (int i = 0; i < 8; i++) largest[i] = -INFINITY;
    float total = 0.0;  // of head `lane`
    for (int start = begin; start < end; start += CHUNK) {
        if (start != begin) {
            find_blocks(at, start);
            fetch_cached(at, start, end);
        }
        if (start == begin) share_token(at, begin, end);  // while the loads are on their way
        barrier();
#define SHARE(i) if (i < EACH && run < RUNS) pool[(run + i * RUNS) * (LOADS + 1) + column] = IS_OWN(i) ? own_key[column] : held_k[i];
        REPEAT_8(SHARE)
        barrier();
        int here = min(CHUNK, end - start);
        float found[8];
#define SCORE(j) if (j < PAIRS) { \
        int p = (lane + j * WG) % CHUNK, h = (lane + j * WG) / CHUNK; \
        float dots = 0.0; \
        if (h < GROUP) { \
            for (int i = 0; i < LOADS; i++) { \
                uvec4 words = pool[p * (LOADS + 1) + i]; \
                dots += dot(low_of(words), query[h * QUADS + i * STEP]); \
                if (STEP == 2) dots += dot(high_of(words), query[h * QUADS + i * STEP + 1]); \
            } \
            found[j] = p < here ? dots : -INFINITY; \
            score[h * (CHUNK / 4) + p / 4][p % 4] = found[j]; \
        } \
    }
        REPEAT_8(SCORE)
        barrier();
#define WEIGH(j) if (j < PAIRS) { \
        int p = (lane + j * WG) % CHUNK, h = (lane + j * WG) / CHUNK; \
        if (h < GROUP) { \
            float before = largest[j]; \
            for (int i = 0; i < CHUNK / 4; i++) { \
                vec4 s = score[h * (CHUNK / 4) + i]; \
                largest[j] = max(largest[j], max(max(s.x, s.y), max(s.z, s.w))); \
            } \
            weight[h * CHUNK + p] = exp(found[j] - largest[j]); \
            if (p == 0) { \
                correction[h] = exp(before - largest[j]); \
                greatest[h] = largest[j]; \
            } \
        } \
    }
        REPEAT_8(WEIGH)
        barrier();
        if (lane < GROUP) {
            float sum = 0.0;
            for (int i = 0; i < CHUNK; i++) sum += weight[lane * CHUNK + i];
            total = total * correction[lane] + sum;
        }
#define CORRECT(h) if (h < GROUP) { sums[2 * h] *= correction[h]; sums[2 * h + 1] *= correction[h]; }
        REPEAT_8(CORRECT)
#define VALUE(i) if (i < EACH && run < RUNS) \
        add_value(IS_OWN(i) ? own_value[column] : held_v[i], run + i * RUNS);
        REPEAT_8(VALUE)
    }
    if (lane < GROUP) totals[lane] = total;
    // Fold the runs: the upper half gives its sums to the lower half, which adds them up one by one.
#define SLOT(h, j) ((run % (RUNS / 2) * GROUP + h) * QUADS + column * STEP + j)
#define GIVE(h) if (h < GROUP) { \
        pool[SLOT(h, 0)] = floatBitsToUint(sums[2 * h]); \
        if (STEP == 2) pool[SLOT(h, 1)] = floatBitsToUint(sums[2 * h + 1]); \
    }
#define TAKE(h) if (h < GROUP) { \
        sums[2 * h] += uintBitsToFloat(pool[SLOT(h, 0)]); \
        if (STEP == 2) sums[2 * h + 1] += uintBitsToFloat(pool[SLOT(h, 1)]); \
    }
    if (run >= RUNS / 2 && run < RUNS) {
        REPEAT_8(GIVE)
    }
    barrier();
    if (run < RUNS / 2) {
        REPEAT_8(TAKE)
        REPEAT_8(GIVE)
    }
    barrier();
}

// The runs' results for four dimensions of a head, heads one after another.
vec4 sum_of_runs(uint quad) {
    vec4 sum = vec4(0.0);
    for (uint r = 0; r < RUNS / 2; r++) sum += uintBitsToFloat(pool[r * GROUP * QUADS + quad]);
    return sum;
}
float greatest_of(uint h) { return greatest[h]; }
float total_of(uint h) { return totals[h]; }
