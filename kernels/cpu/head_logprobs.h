/*
 * Log-probabilities over the compact head: exact logits of the chosen and the likeliest tokens, and a normaliser within a bound.
 *
 * The likeliest tokens are found as for top-k, so they and their logits are those of the full weights. The normaliser is the
 * logarithm of Σ e^z. The terms that look greatest are computed from the full weights, and the rest from rough scores,
 * each less half of its variance, so that the mean of a term over the dither is e^z. So many terms are exact that TELL_SIGMAS standard deviations of the
 * others' sum are at most TELL_WITHIN of all. Where that takes too many rows of the head, all logits are computed. ADR 0129 has
 * what this rests on. Sums are kept by chunk, so that no result depends on which thread did what.
 */
#ifndef BN_HEAD_LOGPROBS_H
#define BN_HEAD_LOGPROBS_H

#include "head_check.h"

#define TELL_WITHIN (1.0 / 64) /* maximum error of the sum, of itself */
#define TELL_SIGMAS 8.0 /* standard deviations that this is */
#define TELL_LESS 2 /* divisor of the variance that terms may have which are not exact, each time that it was too great */
#define TELL_STAGES 6
#define TELL_ROWS 8192 /* maximum rows of the head, about, that are read for a row of logits */

/* The variance of rough scores with this bound: activations rounded up or down at random have two thirds of the worst case's. */
INLINE vf tell_variance(const head_row_t *row, vf step, float norm) {
    const vf weights = row->slack * step;
    const float rest = row->rest * norm;
    return (weights * weights + rest * rest * (2.0f / 3)) * (1.0f / (HEAD_SIGMAS * HEAD_SIGMAS));
}

/* Prepare the row in which log-probabilities of another's logits are found. */
static void tell_begin(head_row_t *row, const head_row_t *of, int32_t top) {
    row->draw = (draw_t){.temperature = 1, .top_p = 1, .top_k = top > 0 ? top : 1};
    row->adjust = (adjust_t){0};
    row->unit = of->unit;
    row->base = of->base;
    row->slack = of->slack;
    row->rest = of->rest;
    row->mode = of->mode == HEAD_ALL ? HEAD_ALL : HEAD_REPORTED;
}

/* Rough sizes of the tokens of a chunk, as logarithms, so that their mean over the dither is e^z; past the last, -infinity. */
static void tell_sizes(
    const head_sample_op_t *o, const head_row_t *row, const float *scores, int64_t chunk, int64_t count, float *u) {
    for (int64_t i = count / VL * VL; i < HEAD_CHUNK; i++) u[i] = -INFINITY;
    for (int64_t i = 0; i < count; i += VL) {
        const int n = count - i < VL ? (int)(count - i) : VL;
        const vf step = v_load_part(o->step + chunk * HEAD_CHUNK + i, n);
        v_store_part(u + i, v_load_part(scores + i, n) - 0.5f * tell_variance(row, step, o->chunk_norm[chunk]), n);
    }
}

/* Choose which sizes are computed exactly, from what all threads have counted; false if too many are needed. */
static bool tell_plan(
    const head_sample_op_t *o, head_row_t *row, const evidence_t *evidence, int64_t stride, int threads, int64_t n) {
    double variance = 0, counts[CHECK_BINS], all = 0, rest = 0;
    for (int64_t c = 0; c < chunks_of(n); c++)
        variance += tell_variance(row, v_set(o->chunk_step[c]), o->chunk_norm[c])[0] / (double)chunks_of(n);
    for (int i = 0; i < CHECK_BINS; i++) {
        counts[i] = 0;
        for (int t = 0; t < threads; t++) counts[i] += evidence[t * stride].bins[i];
        all += counts[i] * exp(-(double)(i + 1) / CHECK_EACH);
    }
    /* A share of the variance that may be: the rest is for terms at the end of what is exact. */
    const double least = TELL_WITHIN / TELL_SIGMAS * all, share = pow(TELL_LESS, -1 - row->check.stage);
    const double allowed = share * least * least / expm1(variance);
    int bin = CHECK_BINS;
    for (; bin > 0; bin--) {
        const double more = counts[bin - 1] * exp(-2.0 * (bin - 1) / CHECK_EACH);
        if (!(rest + more <= allowed)) break;
        rest += more;
    }
    double rows = 0;
    for (int i = 0; i < bin; i++) rows += counts[i];
    row->check.bet = (float)bin; /* tokens in the bins before this one are exact */
    return rows <= TELL_ROWS && fabsf(row->check.peak) < INFINITY;
}

/* Which tokens of a chunk are computed exactly, as words that are not 0, and the sum and the variance of the others. */
static void tell_rest(
    const head_sample_op_t *o, const head_row_t *row, const float *u, int64_t chunk, int64_t count, int32_t *exact, rest_t *rest) {
    vd sum = (vd)(0.0), squares = (vd)(0.0);
    for (int64_t i = 0; i < count; i += VL) {
        const int n = count - i < VL ? (int)(count - i) : VL;
        const vf below = (row->check.peak - v_load(u + i)) * CHECK_EACH;
        const vi rough = below >= row->check.bet; /* all ones, or 0 */
        const vf variance = tell_variance(row, v_load_part(o->step + chunk * HEAD_CHUNK + i, n), o->chunk_norm[chunk]);
        const vf size = v_exp(v_max(v_load(u + i) - row->check.peak, v_set(-87.0f)));
        const vf own = (vf)((vi)size & rough), spread = (vf)((vi)(v_exp(variance) - 1.0f) & rough);
        for (int j = 0; j < n; j++) exact[i + j] = !rough[j];
        sum += v_wide(own);
        squares += v_wide(own) * v_wide(own) * v_wide(spread);
    }
    *rest = (rest_t){v_sum_double(sum), v_sum_double(squares)};
}

INLINE double normal_above(double a) { return 0.5 * erfc(a * 0.70710678118654752); }

/*
 * Add a term from the full weights to those of its chunk. Tokens are chosen by rough scores, so one near the end of what is exact
 * is chosen where its score is too high, and counts roughly where it is too low: left so, the sum would be too small. `more` is
 * the factor that makes the mean over the dither e^z.
 */
static void tell_add(const head_sample_op_t *o, const head_row_t *row, int64_t token, float z, rest_t *rest) {
    const double variance = tell_variance(row, v_set(o->step[token]), o->chunk_norm[token / HEAD_CHUNK])[0], sigma = sqrt(variance);
    const double least = row->check.peak - row->check.bet / CHECK_EACH + 0.5 * variance; /* rough score of a token that is chosen */
    const double size = exp((double)z - row->check.peak), below = (least - z) / sigma;
    if (!(below > -8)) { /* chosen for certain */
        rest->sum += size;
        return;
    }
    const double chosen = normal_above(below), more = normal_above(below - sigma) / chosen;
    const double rough = exp(variance) * normal_above(2 * sigma - below);
    rest->sum += more * size;
    rest->squares += size * size * (more * more * chosen + rough - 1);
}

/* Keep the sum of a row's terms if it is as near as it must be; else, have more terms computed exactly. */
static void tell_verdict(
    const head_sample_op_t *o, const head_scratch_t *s, int64_t r, const evidence_t *evidence, int threads, int64_t n) {
    const int64_t chunks = chunks_of(n);
    head_row_t *row = &s->row[r];
    double sum = 0, squares = 0;
    for (int64_t c = 0; c < chunks; c++) {
        sum += s->rest[r * chunks + c].sum;
        squares += s->rest[r * chunks + c].squares;
    }
    row->mass = sum;
    if (TELL_SIGMAS * sqrt(squares) <= TELL_WITHIN * sum) row->mode = HEAD_DRAWN;
    else if (++row->check.stage == TELL_STAGES || !tell_plan(o, row, evidence, s->rows, threads, n)) row->mode = HEAD_ALL;
}

static int falling(const void *a, const void *b) {
    const scored_t *x = a, *y = b;
    return x->value != y->value ? (x->value < y->value) - (x->value > y->value) : (x->token > y->token) - (x->token < y->token);
}

/* Write the log-probabilities as tell_logprobs does, of a row that was decided; `logit` is that of the chosen token. */
static void tell_words(head_row_t *row, int32_t token, float logit, int32_t k, int32_t *words) {
    const double normaliser = log(row->mass) + row->check.peak;
    qsort(row->list, (size_t)row->listed, sizeof *row->list, falling);
    float *values = (float *)(words + 1 + k);
    for (int32_t i = 0; i < k; i++) {
        const bool has = i < row->listed;
        words[1 + i] = has ? row->list[i].token : -1;
        values[i] = has ? (float)(row->list[i].value - normaliser) : -INFINITY;
    }
    ((float *)words)[0] = token == NO_TOKEN ? NAN : (float)(logit - normaliser);
}

#endif
