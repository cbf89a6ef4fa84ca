/* rope_append: rotary embedding of q (in place) and k, with an RMSNorm of each of their heads before or after it if there
 * are weights for it; stores k and v in the paged cache. */
#include "rows.h"

#define MIN_ROW 1e-30f /* a row of an i8 cache whose greatest magnitude is below it is kept as zeros */

/* One head of d elements to its RMSNorm, in place. */
static void norm_head(float *head, const float *weight, float eps, int d) {
    double squares = 0;
    for (int i = 0; i < d; i++) squares += (double)head[i] * head[i];
    const double inverse = inverse_rms(squares, d, eps);
    for (int i = 0; i < d; i++) head[i] = (float)(head[i] * inverse * weight[i]);
}

/* The first d elements of a head: from[d] rotated to to[d], which may be the same. */
static void rotate(const float *from, float *to, const float *cosine, const float *sine, int d, int interleaved) {
    const int half = d / 2;
    if (interleaved) {
        for (int i = 0; i < half; i++) {
            float a = from[2 * i], b = from[2 * i + 1];
            to[2 * i] = a * cosine[i] - b * sine[i];
            to[2 * i + 1] = b * cosine[i] + a * sine[i];
        }
        return;
    }
    for (int i = 0; i < half; i += VL) {
        int n = half - i < VL ? half - i : VL;
        vf a = v_load_part(from + i, n), b = v_load_part(from + half + i, n);
        vf c = v_load_part(cosine + i, n), s = v_load_part(sine + i, n);
        v_store_part(to + i, a * c - b * s, n);
        v_store_part(to + half + i, b * c + a * s, n);
    }
}

/* A head of q or k, normed if there is a weight, and rotated, in place. */
static void turn(const rope_append_op_t *o, float *head, const float *norm, const float *cosine, const float *sine) {
    if (norm && !o->norms_last) norm_head(head, norm, o->eps, o->head_dim);
    rotate(head, head, cosine, sine, o->rotated, o->interleaved);
    if (norm && o->norms_last) norm_head(head, norm, o->eps, o->head_dim);
}

/* to[i · stride] = the code of from[i], and the scale of them all. */
static void append_codes(int8_t *to, float *scale, int64_t stride, const float *from, int d) {
    vu most = (vu)(0u);
    for (int i = 0; i < d; i += VL) {
        const vu bits = (vu)v_abs(v_load_part(from + i, d - i < VL ? d - i : VL));
        most = bits > most ? bits : most; /* integers order numbers, infinities and NaN, the last above all */
    }
    uint32_t lanes[VL], top = 0;
    memcpy(lanes, &most, sizeof lanes);
    for (int i = 0; i < VL; i++) top = lanes[i] > top ? lanes[i] : top;
    float greatest;
    memcpy(&greatest, &top, sizeof greatest);
    const int sound = top < 0x7f800000u, zero = greatest < MIN_ROW;
    *scale = !sound ? NAN : zero ? 0.0f : greatest / 127.0f;
    const float inverse = sound && !zero ? 127.0f / greatest : 0.0f;
    for (int i = 0; i < d; i += VL) {
        const int n = d - i < VL ? d - i : VL;
        const vf a = v_round(v_load_part(from + i, n) * inverse);
        const vi codes = __builtin_convertvector(v_min(v_max(a, v_set(-127.0f)), v_set(127.0f)), vi);
        for (int j = 0; j < n; j++) to[(i + j) * stride] = (int8_t)codes[j];
    }
}

/* to[i · stride] = from[i] in the cache's type. */
static void append(const kv_t *kv, void *cache, int64_t at, int64_t stride, const float *from, int d) {
    for (int i = 0; i < d; i += VL) {
        const int n = d - i < VL ? d - i : VL;
        const vf a = v_load_part(from + i, n);
        if (kv->type == KV_F16) {
            half_t *to = (half_t *)cache + at + i * stride;
            const vs h = v_to_half(a);
            if (stride == 1)
                memcpy(to, &h, (size_t)n * sizeof *to);
            else
                for (int j = 0; j < n; j++) to[j * stride] = h[j];
        } else {
            float *to = (float *)cache + at + i * stride;
            for (int j = 0; j < n; j++) to[j * stride] = a[j];
        }
    }
}

/* A key/value head and its query heads, of one token. */
static void rope_append(run_t *run, const op_t *op, int thread) {
    const rope_append_op_t *o = &op->rope_append;
    const kv_t *kv = &run->program.kv;
    const step_t *step = &run->step;
    const int d = o->head_dim, turned = o->rotated, ratio = o->heads / o->kv_heads;
    const int64_t k_codes = (int64_t)d * kv->k_stride, v_codes = (int64_t)kv->block_size * kv->v_stride; /* of a head */
    const int64_t items = (int64_t)step->tokens * o->kv_heads;
    for (int64_t item; (item = pool_take(run->pool, thread, items)) >= 0;) {
        const int32_t m = (int32_t)(item / o->kv_heads), g = (int32_t)(item % o->kv_heads);
        const int32_t p = token_position(step, m);
        const int32_t *table = step->block_table + o->table + (int64_t)step->token_seq[m] * run->program.limits.max_blocks;
        const int64_t block = table[p / kv->block_size] * kv->block, place = p % kv->block_size;
        const float *cosine = o->cosine + (int64_t)p * (turned / 2), *sine = o->sine + (int64_t)p * (turned / 2);
        float *row = (float *)o->qkv.data + (int64_t)m * o->qkv.stride;
        for (int h = g * ratio; h < (g + 1) * ratio; h++) turn(o, row + h * d, o->q_norm, cosine, sine);
        float *k = row + (o->heads + g) * d, *v = k + o->kv_heads * d;
        turn(o, k, o->k_norm, cosine, sine);
        const int64_t keys = block + g * kv->k_head, values = block + g * kv->v_head;
        if (kv->type == KV_I8) {
            int8_t *k_to = (int8_t *)o->layer.k + keys, *v_to = (int8_t *)o->layer.v + values;
            append_codes(k_to + place, (float *)(k_to + k_codes) + place, kv->k_stride, k, d);
            append_codes(v_to + place * kv->v_stride, (float *)(v_to + v_codes) + place, 1, v, d);
            continue;
        }
        append(kv, o->layer.k, keys + place, kv->k_stride, k, d);
        append(kv, o->layer.v, values + place * kv->v_stride, 1, v, d);
    }
}
