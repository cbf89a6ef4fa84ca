// Products of decode_layer of weights with a scale for each COLUMNS, which SHARERS neighbouring chunks have together. A work-group's terms
// lie in `pool`, which attention uses at other times: those of a row behind one another, those of second rows behind all first ones.
// The codes of the next rows are requested as soon as those of these have been read.
#include "signed_codes.glsl"
#include "zero.glsl"
const bool EARLY = true;
const uint SHARERS = COLUMNS / 64;
uint scales[8], more_scales[8];  // words with the scales of the codes in flight
#define TERM(i) pool[(i) / 4][(i) % 4]
#define TERMS_OF(cols) ((cols) / COLUMNS | 1)  // from a row's terms to the next one's: odd, so that they spread over the banks
#define SCALE_AT(row, chunk, cols) ((row) * ((cols) / COLUMNS) + min(chunk, CHUNKS_OF(cols) - 1) / SHARERS)
#define FETCH_SCALES(i, scale, row, chunk, outs, cols, two) \
    scales[i] = scale[SCALE_AT(row, chunk, cols) / 2]; \
    if (two) more_scales[i] = scale[SCALE_AT(row + (outs), chunk, cols) / 2];
#define TAKE_SCALES(i) uint scale_word = scales[i], other_word = more_scales[i];
#define BEGIN_ROWS
#define MULTIPLY(chunk, outs, cols, lanes, two) { \
        uint slot = lane / (lanes) * TERMS_OF(cols) + (chunk) / SHARERS; \
        float other_scale = (two) ? scale_in(other_word, SCALE_AT(n + (outs), chunk, cols)) : 0.0; \
        put_terms(one, other, chunk, CHUNKS_OF(cols), PITCH_OF(cols), scale_in(scale_word, SCALE_AT(n, chunk, cols)), other_scale, slot, \
            ROWS_AT_ONCE(lanes) * TERMS_OF(cols), two); \
    }
#define END_ROWS(scale, outs, cols, lanes, two) \
    vec2 results = totals_of(lane, lanes, (cols) / COLUMNS, TERMS_OF(cols), ROWS_AT_ONCE(lanes) * TERMS_OF(cols), unit * UNFOLD, two);

// Puts the terms of a chunk of a row, and of a second one where `two`, where they belong; all invocations of a subgroup call it.
void put_terms(uvec4 one, uvec4 other, uint chunk, uint chunks, uint pitch, float scale, float other_scale, uint to, uint apart, bool two) {
    ivec2 sums = ivec2(0);
    uvec4 weights = signed_codes(one), others = signed_codes(other);
    if (chunk < chunks) [[unroll]] for (uint p = 0; p < 4; p++) {
        uvec4 x = x_quads[p * pitch + chunk];
        sums.x = product(weights << 2 * p, TOP_PAIRS, x, sums.x);
        if (two) sums.y = product(others << 2 * p, TOP_PAIRS, x, sums.y);
    }
    [[unroll]] for (uint next = 1; next < SHARERS; next *= 2) {
        sums.x += subgroupShuffleXor(sums.x, next);
        if (two) sums.y += subgroupShuffleXor(sums.y, next);
    }
    if (chunk % SHARERS != 0 || chunk >= chunks) return;
    precise float term = float(sums.x) * scale;
    TERM(to) = term;
    if (two) {
        precise float second_term = float(sums.y) * other_scale;
        TERM(to + apart) = second_term;
    }
}

// The results of a row and, where `two`, of its second one, in the first of the invocations that share them: the next one adds the other.
vec2 totals_of(uint lane, uint lanes, uint count, uint pitch, uint apart, float factor, bool two) {
    uint part = lane % lanes;
    subgroupMemoryBarrierShared();
    subgroupBarrier();
    precise float sum = 0.0;
    if (part == 0 || two && part == 1)
        for (uint s = 0; s < count; s++) sum += TERM(lane / lanes * pitch + part * apart + s);
    subgroupMemoryBarrierShared();
    subgroupBarrier();  // before the next rows' terms
    precise float value = sum_from_zero(sum) * factor;
    return vec2(value, two ? subgroupShuffleXor(value, 1) : 0.0);
}
