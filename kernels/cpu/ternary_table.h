/*
 * embed and dense_matmul of a ternary table, which has a scale for each group of columns.
 *
 * The table is packed as ternary_matmul's weights are, once for both. An activation of the head keeps 22 bits of its group's
 * greatest: x ≈ unit · (65536 a + 256 b + c) with three int8 digits and a power of two as the unit, so that x is off by at
 * most 2^-22 of that greatest. The digits are three tokens to the micro-kernels, whose sums are exact: a group's
 * product is rounded to f32 once, and added to those of the groups before it. No score depends on other rows.
 */
#include "group_matmul.h"
#include "transform.h"

#define DIGITS 3
#define TABLE_ROWS (BLOCK_TOKENS / DIGITS) /* rows of activations a pass */

/* The scales and the codes of a panel, and what stands in it. */
typedef struct {
    const uint8_t *codes;
    const half_t *scales;
    int tiles;
} table_panel_t;

INLINE table_panel_t table_panel(const ternary_part_t *table, int64_t panel, int64_t columns, int64_t group) {
    const int64_t count = columns / group;
    return (table_panel_t){
        panel_at(table->codes, panel, count * groups_of(group)), table->scales + panel * count * PANEL_ROWS,
        panel_tiles(table->rows, panel)};
}

static void table_row(const table_embed_op_t *o, int64_t row, float *out) {
    const int64_t group = o->group, lane = row % PANEL_ROWS;
    const table_panel_t at = table_panel(&o->table, row / PANEL_ROWS, o->out.columns, group);
    const uint8_t *w = at.codes + 4 * lane;
    for (int64_t s = 0; s < o->out.columns / group; s++) {
        const float scale = v_load_half_part(at.scales + s * PANEL_ROWS + lane, 1)[0];
        for (int64_t g = 0; g < group; g += GROUP_COLUMNS, w += at.tiles * TILE_BYTES) {
            uint32_t word;
            memcpy(&word, w, sizeof word);
            for (int p = 0; p < PLANES && g + 4 * p < group; p++) {
                const uint32_t codes = plane_codes(word, p);
                for (int j = 0; j < 4; j++) *out++ = (float)((int32_t)(codes >> 8 * j & 3) - 1) * scale;
            }
        }
    }
}

static void table_embed(run_t *run, const op_t *op, int thread) {
    const table_embed_op_t *o = &op->table_embed;
    for (int64_t m; (m = pool_take(run->pool, thread, run->step.tokens)) >= 0;) {
        float *out = (float *)o->out.data + m * o->out.stride;
        table_row(o, run->step.token[m], out);
        if (o->transform.block) transform_row(&o->transform, 1, out, o->out.columns);
    }
}

/* The parts of the shared scratch, for `rows` of activations. */
typedef struct {
    int32_t *x; /* digits of rows, in passes of TABLE_ROWS, as gemm_panel takes them */
    int32_t *totals; /* [rows][DIGITS][groups]: sums of digits */
    float *units; /* [rows][groups] */
} table_scratch_t;

INLINE int64_t table_words(const table_matmul_op_t *o) {
    return o->x.columns / o->group * span_columns(o->group) / 4 * DIGITS;
}

static table_scratch_t table_parts(const run_t *run, const table_matmul_op_t *o, int64_t rows, size_t *bytes) {
    const size_t count = (size_t)(rows * (o->x.columns / o->group));
    const size_t x = aligned_bytes((size_t)(rows * table_words(o)), sizeof(int32_t));
    const size_t totals = aligned_bytes(DIGITS * count, sizeof(int32_t));
    const uintptr_t base = (uintptr_t)run->shared; /* 0 where only the size is asked for */
    *bytes = x + totals + aligned_bytes(count, sizeof(float));
    return (table_scratch_t){(int32_t *)base, (int32_t *)(base + x), (float *)(base + x + totals)};
}

static need_t table_matmul_need(const run_t *run, const op_t *op) {
    need_t need = {0};
    table_parts(run, &op->table_matmul, run->program.limits.max_rows, &need.shared);
    return need;
}

/* 2^(exponent - 127). */
INLINE float power_of(int32_t exponent) {
    const int32_t bits = exponent << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return power;
}

/* The least unit with which a group's digits do not overflow, as the exponent of an f32; 0 if an activation is no number. */
INLINE int32_t table_exponent(const float *x, int64_t group) {
    vi top = (vi)(0);
    for (int64_t i = 0; i < group; i += VL) {
        const vi bits = (vi)v_load_part(x + i, group - i < VL ? (int)(group - i) : VL) & 0x7fffffff;
        top = bits > top ? bits : top; /* the bits of NaN and infinity are the greatest */
    }
    int32_t greatest = 0;
    for (int i = 0; i < VL; i++) greatest = top[i] > greatest ? top[i] : greatest;
    const int32_t exponent = greatest >> 23;
    return exponent == 255 ? 0 : (exponent > 22 ? exponent : 22) - 21;
}

/* Lanes as signed bytes, lowest first, and what is above them. */
INLINE vi low_digit(vi *numbers) {
    const vi low = *numbers << 24 >> 24;
    *numbers = (*numbers - low) >> 8;
    return low;
}

/* Digits of one row, number m of `rows` in its pass, which begins at `to`. */
static void table_split(
    const table_matmul_op_t *o, const float *x, int32_t *to, int m, int rows, int32_t *totals, float *units) {
    const int64_t group = o->group, count = o->x.columns / group, tokens = DIGITS * rows;
    for (int64_t s = 0; s < count; s++, x += group, to += span_columns(group) / 4 * tokens) {
        const int32_t exponent = table_exponent(x, group);
        const float inverse = exponent ? power_of(254 - exponent) : 0.0f;
        vi sums[DIGITS] = {(vi)(0), (vi)(0), (vi)(0)};
        units[s] = exponent ? power_of(exponent) : NAN;
        for (int64_t i = 0; i < span_columns(group); i += VL) {
            const int64_t left = group - i;
            vi numbers = (vi)(0);
            if (exponent && left > 0)
                numbers = __builtin_convertvector(v_round(v_load_part(x + i, left < VL ? (int)left : VL) * inverse), vi);
            for (int d = DIGITS - 1; d >= 0; d--) {
                const vi digit = low_digit(&numbers);
                const vb bytes = __builtin_convertvector(digit, vb);
                sums[d] += digit;
                for (int j = 0; j < VL && i + j < span_columns(group); j += 4)
                    memcpy(to + (i + j) / 4 * tokens + DIGITS * m + d, (const int8_t *)&bytes + j, 4);
            }
        }
        for (int d = 0; d < DIGITS; d++) {
            int32_t sum = 0;
            for (int i = 0; i < VL; i++) sum += sums[d][i];
            totals[d * count + s] = sum;
        }
    }
}

_Static_assert(TILE_ROWS % VL == 0, "a tile is whole vectors");

/* sums[row] += unit · w · (65536 a + 256 b + c) of one group, for whole tiles, from the sums of its digits. */
INLINE void table_add(
    const int32_t *acc, const int32_t *totals, int64_t pitch, float unit, const half_t *w, int tiles, float *sums) {
    for (int i = 0; i < tiles * TILE_ROWS; i += VL) {
        vf part[DIGITS];
        for (int d = 0; d < DIGITS; d++)
            part[d] = __builtin_convertvector(*(const vi_mem *)(acc + d * PANEL_ROWS + i) - totals[d * pitch], vf);
        const vf number = part[0] * 65536.0f + (part[1] * 256.0f + part[2]);
        v_store(sums + i, v_load(sums + i) + number * (v_load_half(w + i) * unit));
    }
}

/* A panel by `rows` rows of activations from `first` on. */
static void table_block(const table_matmul_op_t *o, int64_t panel, const table_scratch_t *s, int64_t first, int rows) {
    const int64_t group = o->group, count = o->x.columns / group, groups = groups_of(group);
    const int64_t left = o->table.rows - panel * PANEL_ROWS, n = left < PANEL_ROWS ? left : PANEL_ROWS;
    table_panel_t at = table_panel(&o->table, panel, o->x.columns, group);
    const int32_t *x = s->x + first * table_words(o);
    float sums[TABLE_ROWS * PANEL_ROWS];
    memset(sums, 0, (size_t)rows * PANEL_ROWS * sizeof *sums);
    for (int64_t g = 0; g < count; g++) {
        int32_t acc[BLOCK_TOKENS * PANEL_ROWS];
        gemm_panel(at.codes, at.tiles, groups, x, DIGITS * rows, acc);
        for (int64_t r = 0; r < rows; r++) {
            const int32_t *totals = s->totals + (first + r) * DIGITS * count + g;
            table_add(
                acc + r * DIGITS * PANEL_ROWS, totals, count, s->units[(first + r) * count + g], at.scales, at.tiles,
                sums + r * PANEL_ROWS);
        }
        at.codes += at.tiles * groups * TILE_BYTES;
        at.scales += PANEL_ROWS;
        x += span_columns(group) / 4 * DIGITS * rows;
    }
    for (int64_t r = 0; r < rows; r++)
        memcpy(
            (float *)o->out.data + (first + r) * o->out.stride + panel * PANEL_ROWS, sums + r * PANEL_ROWS,
            (size_t)n * sizeof *sums);
}

static stretch_t table_matmul_begins(const run_t *run, const op_t *op, int thread) {
    const table_matmul_op_t *o = &op->table_matmul;
    const int64_t first = pool_share(run->pool, thread, panels_of(o->table.rows));
    if (first >= panels_of(o->table.rows)) return (stretch_t){0};
    const uint8_t *end = o->table.codes + packed_bytes(o->table.rows, o->x.columns, o->group, false);
    return (stretch_t){table_panel(&o->table, first, o->x.columns, o->group).codes, end};
}

static void table_matmul(run_t *run, const op_t *op, int thread) {
    const table_matmul_op_t *o = &op->table_matmul;
    const int64_t all = run->step.rows, count = o->x.columns / o->group;
    size_t bytes;
    const table_scratch_t s = table_parts(run, o, all, &bytes);
    for (int64_t r; (r = pool_take(run->pool, thread, all)) >= 0;) {
        const int64_t first = r / TABLE_ROWS * TABLE_ROWS;
        const int rows = all - first < TABLE_ROWS ? (int)(all - first) : TABLE_ROWS;
        table_split(
            o, (const float *)o->x.data + r * o->x.stride, s.x + first * table_words(o), (int)(r - first), rows,
            s.totals + r * DIGITS * count, s.units + r * count);
    }
    pool_barrier(run->pool, thread);
    for (int64_t panel; (panel = pool_take(run->pool, thread, panels_of(o->table.rows))) >= 0;)
        for (int64_t first = 0; first < all; first += TABLE_ROWS)
            table_block(o, panel, &s, first, all - first < TABLE_ROWS ? (int)(all - first) : TABLE_ROWS);
}
