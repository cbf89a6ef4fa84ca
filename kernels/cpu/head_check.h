/*
 * Top-p over the compact head: is the winner of all tokens among those that top-p keeps?
 *
 * Rows of the head are taken at random, each with a probability that follows its rough score, and scored exactly. They are
 * evidence for or against the winner. Whatever the rough scores are, evidence of CHECK_WRONG arises by accident with a
 * probability of at most e^-CHECK_WRONG. docs/measurements/sampling.md has the proof. If there is too little, more rows are
 * taken. If it is against the winner, the next candidate is checked: the greatest key of the tokens that are likelier. If no
 * candidate is left, all tokens that are likelier are scored, and one of them is drawn. Where nothing is certain,
 * all logits are computed. "z" is a logit over the temperature, and the winner has the greatest z plus noise.
 */
#ifndef BN_HEAD_CHECK_H
#define BN_HEAD_CHECK_H

#include "head_score.h"

#define CHECK_ROWS 512 /* maximum rows of the head, about, that are taken at first for a row of logits */
#define CHECK_MORE 4 /* times as many each time that they leave it open */
#define CHECK_STAGES 4
#define CHECK_SHARE 4 /* and at most one in so many, in the last stage */
#define CHECK_MASS 0x1p18 /* maximum rate times the mass of all rows: then the evidence is more than enough */
#define CHECK_WRONG 32.0 /* -ln of the probability that the rows taken mislead */
#define CHECK_RAISED (8.9f / 7.5f) /* of head_bound: for 8.9 standard deviations instead of 7.5 */
#define CHECK_MARGIN 0x1p-12f /* of all mass: half for rows beyond their bounds, half for rounding */
#define CHECK_BET 0.9f /* a row's greatest share in a factor of the evidence */
#define CHECK_AGAINST 0.2f /* bet that the winner does not pass */
#define CHECK_EACH 8 /* bins a unit of u */

/* How far a token may be above its rough z. */
INLINE vf check_reach(const head_sample_op_t *o, const head_row_t *row, int64_t token, int n) {
    const float slope = CHECK_RAISED * head_slope(row), rest = row->rest * o->chunk_norm[token / HEAD_CHUNK];
    const vf weights = row->slack * v_load_part(o->step + token, n);
    return slope * __builtin_elementwise_sqrt(weights * weights + rest * rest);
}

/* The rough z of `count` tokens. */
INLINE void check_rough(const head_row_t *row, const float *scores, int64_t begin, int64_t count, float *z) {
    for (int64_t i = 0; i < count; i++) z[i] = adjusted(&row->adjust, scores[i], begin + i) / row->draw.temperature;
}

/*
 * u of the tokens of a chunk, by which they are taken: the rough z, or a greater one where the bound is wide. Numbers past
 * the last token, up to HEAD_CHUNK, are -infinity.
 */
static void check_sizes(
    const head_sample_op_t *o, const head_row_t *row, const float *scores, int64_t chunk, int64_t count, float *u) {
    const int64_t begin = chunk * HEAD_CHUNK, whole = row->adjust.marks ? 0 : count / VL * VL;
    const vf inverse = v_set(1 / row->draw.temperature); /* u need not be the quotient */
    for (int64_t i = 0; i < whole; i += VL) v_store(u + i, v_load(scores + i) * inverse);
    check_rough(row, scores + whole, begin + whole, count - whole, u + whole);
    for (int64_t i = count; i < HEAD_CHUNK; i++) u[i] = -INFINITY;
    const float slope = CHECK_RAISED * head_slope(row); /* no lift in most chunks */
    if (slope * head_bound(row, o->chunk_step[chunk], o->chunk_norm[chunk]) <= row->check.spare) return;
    for (int64_t i = 0; i < count; i += VL) {
        const int n = count - i < VL ? (int)(count - i) : VL;
        const vf lift = check_reach(o, row, begin + i, n) - row->check.spare;
        v_store_part(u + i, v_load(u + i) + v_max(lift, v_set(0.0f)), n);
    }
}

/* Maximum rows, about, that are taken in a stage. */
INLINE float check_rows(int64_t n, int stage) {
    int64_t rows = CHECK_ROWS, share = n / CHECK_SHARE;
    for (int i = stage; i < CHECK_STAGES - 1; i++) share /= CHECK_MORE;
    for (int i = 0; i < stage; i++) rows *= CHECK_MORE;
    if (rows > share) rows = share;
    return rows > 0 ? (float)rows : 1.0f;
}

static void check_begin(head_row_t *row, int64_t n) {
    const float low = row->draw.top_p - CHECK_MARGIN, high = row->draw.top_p + CHECK_MARGIN;
    check_t *check = &row->check;
    check->rows = check_rows(n, check->stage);
    check->bet = low > 0 ? sqrtf(2 * (float)CHECK_WRONG / (check->rows * low * (1 - low))) : 0;
    const float above = check->bet * (1 - low), below = CHECK_AGAINST * high;
    check->spare = logf(CHECK_BET / (above > below ? above : below));
}

/* Keep the greatest u. A NaN is kept, too. */
static void check_peak(const float *u, evidence_t *evidence) {
    const float peak = greatest(u, HEAD_CHUNK);
    if (!(peak <= evidence->peak) || any_nan(u, HEAD_CHUNK)) evidence->peak = any_nan(u, HEAD_CHUNK) ? NAN : peak;
}

/* Count the tokens of a chunk by u, in steps below the peak; those beyond the last step are counted in it. */
static void check_count(const head_row_t *row, const float *u, int64_t count, evidence_t *evidence) {
    int32_t bins[HEAD_CHUNK];
    for (int64_t i = 0; i < HEAD_CHUNK; i += VL) {
        const vf below = v_min((row->check.peak - v_load(u + i)) * CHECK_EACH, v_set(CHECK_BINS - 1));
        const vi bin = __builtin_convertvector(v_max(below, v_set(0.0f)), vi);
        memcpy(bins + i, &bin, sizeof bin);
    }
    for (int64_t i = 0; i < count; i++) evidence->bins[bins[i] & (CHECK_BINS - 1)]++;
}

/* Find the rate at which rows are taken, from what all threads have counted. */
static void check_rate(const evidence_t *evidence, int64_t stride, int threads, check_t *check) {
    double counts[CHECK_BINS], size[CHECK_BINS], mass = 0;
    for (int i = 0; i < CHECK_BINS; i++) {
        counts[i] = 0;
        for (int t = 0; t < threads; t++) counts[i] += evidence[t * stride].bins[i];
        size[i] = exp(-(double)i / CHECK_EACH);
        mass += counts[i] * size[i];
    }
    double low = -40, high = log(CHECK_MASS / mass); /* logarithms of the rate, with the peak at 0 */
    for (int turn = 0; turn < 40; turn++) {
        const double middle = turn ? (low + high) / 2 : high, rate = exp(middle);
        double rows = 0;
        for (int i = 0; i < CHECK_BINS; i++) rows += counts[i] * (rate * size[i] < 1 ? rate * size[i] : 1);
        if (rows <= check->rows) low = middle;
        else high = middle;
    }
    check->log_rate = (float)low - check->peak;
}

/*
 * Which of a chunk's tokens are taken, as words that are not 0, and with which probability, in steps of 2^-32 and never 0. The random
 * words are independent of the tokens' noise and of other stages' words. False if none is taken. Tokens past the last are not.
 */
static bool check_take(const head_row_t *row, const float *u, int64_t begin, int64_t count, float *chance, int32_t *taken) {
    const draw_t *d = &row->draw;
    vi any = (vi)(0);
    for (int64_t first = 0; first < HEAD_CHUNK; first += 4 * VL) {
        vu counter;
        for (int i = 0; i < VL; i++) counter[i] = (uint32_t)((begin + first) / 4 + i);
        vu words[4] = {counter, (vu)(d->position + 1), (vu)(1u + (uint32_t)row->check.stage), (vu)(0u)};
        philox(words, d->seed_lo, d->seed_hi);
        for (int j = 0; j < 4; j++) {
            const int64_t at = first + j * VL;
            const vf size = v_exp(v_min(v_load(u + at) + row->check.log_rate, v_set(0.0f)));
            const vf steps = v_max(__builtin_elementwise_ceil(size * 0x1p32f), v_set(1.0f));
            const vu below = __builtin_convertvector(v_min(steps, v_set(0xffffff00p0f)), vu); /* the greatest below 2^32 */
            vi own = (vi)(words[j] < below) | ~(vi)(steps < 0x1p32f);
            for (int64_t i = count - at; i < VL; i++) own[i < 0 ? 0 : i] = 0;
            v_store(chance + at, v_min(steps, v_set(0x1p32f)) * 0x1p-32f);
            memcpy(taken + at, &own, sizeof own);
            any |= own;
        }
    }
    int32_t some = 0;
    for (int i = 0; i < VL; i++) some |= any[i];
    return some != 0;
}

/* Add what a row that was taken says; z is exact. */
static void check_add(const head_row_t *row, float z, float chance, evidence_t *evidence) {
    const float low = row->draw.top_p - CHECK_MARGIN, high = row->draw.top_p + CHECK_MARGIN;
    const bool likelier = z > row->check.z;
    const double size = exp((double)z + row->check.log_rate) / chance;
    const double passes = row->check.bet * size * (low - likelier), fails = CHECK_AGAINST * size * (likelier - high);
    if (chance >= 1) {
        evidence->passes += passes;
        evidence->fails += fails;
    } else { /* a factor that is not positive: this row is beyond its bound, and nothing is certain */
        evidence->passes += passes > -1 ? log1p(passes) : -INFINITY;
        evidence->fails += fails > -1 ? log1p(fails) : -INFINITY;
    }
}

/*
 * The candidate with the greatest key of those likelier than `above`, as the winner; false if a token that is not in the list may
 * have a greater one. All that reach the threshold are in the list, with their z.
 */
static bool check_next(head_row_t *row, float above) {
    float z = 0, noise[4 * VL];
    scored_t best = {-INFINITY, NO_TOKEN};
    for (int32_t i = 0; i < row->listed; i++) {
        const scored_t own = row->list[i];
        if (own.value != own.value) return false;
        if (!(own.value > above)) continue;
        gumbel(own.token / 4 * 4, row->draw.position, row->draw.seed_lo, row->draw.seed_hi, noise);
        const float key = own.value + noise[own.token % 4];
        if (!(key > best.value) && !(key == best.value && own.token < best.token)) continue;
        best = (scored_t){key, own.token};
        z = own.value;
    }
    if (best.token == NO_TOKEN || !(best.value >= row->threshold)) return false;
    row->check.winner = best.token;
    row->check.z = z;
    return true;
}

/* Decide by what the rows taken by all threads say, or go on: to more rows, or to the next candidate. A NaN leaves it open. */
static void check_verdict(head_row_t *row, evidence_t *evidence, int64_t stride, int threads, int64_t n) {
    double passes = 0, fails = 0;
    for (int t = 0; t < threads; t++) {
        passes += evidence[t * stride].passes;
        fails += evidence[t * stride].fails;
    }
    if (row->draw.top_p > CHECK_MARGIN && passes >= CHECK_WRONG) {
        row->mode = HEAD_DRAWN;
    } else if (fails >= CHECK_WRONG) {
        for (int t = 0; t < threads; t++) evidence[t * stride].passes = evidence[t * stride].fails = 0;
        if (check_next(row, row->check.z)) return;
        row->mode = HEAD_AGAIN;
        row->listed = 0;
    } else if (row->check.stage + 1 < CHECK_STAGES) {
        row->check.stage++;
        check_begin(row, n);
        check_rate(evidence, stride, threads, &row->check);
    } else {
        row->mode = HEAD_ALL;
    }
}

/* Draw again from the tokens that are likelier than a winner that did not pass: they are in the list, with their z. */
static int32_t check_again(const head_row_t *row) {
    float best = -INFINITY, noise[4 * VL];
    scored_t winner = {-INFINITY, NO_TOKEN};
    for (int32_t i = 0; i < row->listed; i++) {
        const scored_t own = row->list[i];
        if (own.value != own.value) return NO_TOKEN;
        if (!(own.value > row->check.z)) continue;
        gumbel(own.token / 4 * 4, row->draw.position, row->draw.seed_lo, row->draw.seed_hi, noise);
        const float key = own.value + noise[own.token % 4];
        if (!(key > best) && !(key == best && own.token < winner.token)) continue;
        best = key;
        winner = own;
    }
    double all = 0, above = 0; /* top-p keeps less than all: the one that did not pass is left out */
    for (int32_t i = 0; i < row->listed; i++) {
        const float z = row->list[i].value;
        const double mass = z > row->check.z ? exp((double)z - row->check.z) : 0;
        all += mass;
        above += z > winner.value ? mass : 0;
    }
    return above < (row->draw.top_p - CHECK_MARGIN) * all || above == 0 ? winner.token : NO_TOKEN;
}

#endif
