/*
 * Rows of dense matrices as f32: stored as floats, or in blocks as GGUF files have them.
 *
 * Blocks are decoded as the reference does, ggml-quants.c: each product and difference is rounded to f32 on its own, so a
 * value is the same bit for bit on every level. A row is a whole number of blocks.
 */
#ifndef BN_WEIGHTS_H
#define BN_WEIGHTS_H

#include "program.h"
#include "vec.h"

/* Columns decoded at a time: whole blocks of any type, and whole vectors. */
#define SPAN_COLUMNS 256
_Static_assert(SPAN_COLUMNS % VL == 0, "a span is whole vectors");

INLINE int in_blocks(int type) { return type > WEIGHT_F16; }

/* Bytes of `k` columns. */
static int64_t weight_bytes(int type, int64_t k) {
    switch (type) {
    case WEIGHT_F32: return k * 4;
    case WEIGHT_F16: return k * 2;
    case WEIGHT_Q8_0: return k / 32 * 34;
    case WEIGHT_Q4_0: return k / 32 * 18;
    case WEIGHT_Q6_K: return k / 256 * 210;
    default: return k / 256 * 144; /* Q4_K */
    }
}

INLINE float half_at(const uint8_t *from) {
    half_t bits;
    memcpy(&bits, from, sizeof bits);
    return v_load_half_part(&bits, 1)[0];
}

/* 34 bytes: an f16 scale, and 32 signed bytes. */
INLINE void decode_q8_0(const uint8_t *from, float *to) {
    const float scale = half_at(from);
    const int8_t *codes = (const int8_t *)from + 2;
    for (int i = 0; i < 32; i++) to[i] = (float)codes[i] * scale;
}

/* 18 bytes: an f16 scale, and 16 bytes whose low halves are the first 16 columns. */
INLINE void decode_q4_0(const uint8_t *from, float *to) {
    const float scale = half_at(from);
    for (int i = 0; i < 16; i++) {
        to[i] = (float)((from[2 + i] & 15) - 8) * scale;
        to[i + 16] = (float)((from[2 + i] >> 4) - 8) * scale;
    }
}

/* 210 bytes: low 4 bits (128), high 2 bits (64), scales of 16 columns (16, signed), an f16 scale of these. Each half of the
 * block is four times 32 columns. */
INLINE void decode_q6_k(const uint8_t *from, float *to) {
    const float whole = half_at(from + 208);
    const int8_t *scales = (const int8_t *)from + 192;
    for (int half = 0; half < 2; half++) {
        const uint8_t *low = from + 64 * half, *high = from + 128 + 32 * half;
        for (int part = 0; part < 4; part++, to += 32)
            for (int sixteen = 0; sixteen < 2; sixteen++) {
                const float scale = whole * (float)scales[8 * half + 2 * part + sixteen];
                for (int i = 16 * sixteen; i < 16 * sixteen + 16; i++) {
                    const int four = low[32 * (part & 1) + i] >> 4 * (part >> 1) & 15;
                    to[i] = (float)((four | (high[i] >> 2 * part & 3) << 4) - 32) * scale;
                }
            }
    }
}

/* 144 bytes: f16 scales of the scales and of the minimums, eight of each in 6 bits (12 bytes), and 4 bits a column. */
INLINE void decode_q4_k(const uint8_t *from, float *to) {
    const float scale_of = half_at(from), minimum_of = half_at(from + 2);
    const uint8_t *packed = from + 4, *codes = from + 16;
    for (int group = 0; group < 8; group++, to += 32) {
        const int j = group & 3;
        int scale = packed[j] & 63, minimum = packed[4 + j] & 63;
        if (group > 3) {
            scale = (packed[8 + j] & 15) | packed[j] >> 6 << 4;
            minimum = packed[8 + j] >> 4 | packed[4 + j] >> 6 << 4;
        }
        const float unit = scale_of * (float)scale, least = minimum_of * (float)minimum;
        for (int i = 0; i < 32; i++) to[i] = (float)(codes[32 * (group / 2) + i] >> 4 * (group & 1) & 15) * unit - least;
    }
}

/* `count` columns of whole blocks. */
static void decode_blocks(int type, const uint8_t *from, int64_t count, float *to) {
    const float *end = to + count;
    switch (type) {
    case WEIGHT_Q8_0:
        for (; to < end; from += 34, to += 32) decode_q8_0(from, to);
        break;
    case WEIGHT_Q4_0:
        for (; to < end; from += 18, to += 32) decode_q4_0(from, to);
        break;
    case WEIGHT_Q6_K:
        for (; to < end; from += 210, to += 256) decode_q6_k(from, to);
        break;
    default:
        for (; to < end; from += 144, to += 256) decode_q4_k(from, to);
    }
}

/* Row `row` of a matrix of k columns. */
static void weight_row(const void *matrix, int type, int64_t row, int64_t k, float *to) {
    const uint8_t *from = (const uint8_t *)matrix + row * weight_bytes(type, k);
    if (in_blocks(type)) {
        decode_blocks(type, from, k, to);
    } else if (type == WEIGHT_F32) {
        memcpy(to, from, (size_t)k * sizeof *to);
    } else {
        const half_t *halves = (const half_t *)from;
        int64_t i = 0;
        for (; i + VL <= k; i += VL) v_store(to + i, v_load_half(halves + i));
        if (i < k) v_store_part(to + i, v_load_half_part(halves + i, (int)(k - i)), (int)(k - i));
    }
}

#endif
