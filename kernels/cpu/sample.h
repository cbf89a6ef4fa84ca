#ifndef BN_SAMPLE_H
#define BN_SAMPLE_H

/*
 * sample: greedy, or a Gumbel-max draw from the tokens that pass top-k, top-p and min-p.
 *
 * Thresholds are found by radix selection: a histogram of the top bits of the logits (as integers of the same order), then
 * of the next bits of those in the bin that holds the threshold. Nothing is sorted.
 */

static need_t sample_need(const run_t *run, const op_t *op) {
    (void)run;
    return (need_t){.scratch = 2 * aligned_bytes((size_t)op->sample.logits.columns + 4 * VL, sizeof(float))};
}

/* An integer that orders as the float does. */
INLINE uint32_t order_key(float a) {
    uint32_t bits = 0;  /* of zeros of both signs */
    if (a != 0) memcpy(&bits, &a, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

INLINE float greatest(const float *z, int64_t n) {
    vf top = v_set(-INFINITY);
    int64_t i = 0;
    for (; i + VL <= n; i += VL) top = v_max(v_load(z + i), top);
    float best = v_top(top);
    for (; i < n; i++) best = z[i] > best ? z[i] : best;
    return best;
}

static int32_t lowest_index_of(const float *z, float value, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (z[i] == value) return (int32_t)i;
    return 0; /* of logits that are not numbers, for a rough score */
}

#define RADIX_BITS 11
#define RADIX_BINS (1 << RADIX_BITS)

/*
 * The greatest key at which the mass of all entries with at least that key reaches `target`; `mass` NULL counts 1
 * for each. Entries with a key below `least` do not take part.
 */
static uint32_t select_key(const float *z, const float *mass, int64_t n, double target, uint32_t least) {
    static const int shifts[] = {21, 10, 0}, bits[] = {11, 11, 10};
    double bins[RADIX_BINS], above = 0;
    uint32_t prefix = 0;
    for (int level = 0; level < 3; level++) {
        const int shift = shifts[level], count = 1 << bits[level];
        memset(bins, 0, sizeof bins);
        for (int64_t i = 0; i < n; i++) {
            const uint32_t key = order_key(z[i]);
            if (key < least || (level && key >> shifts[level - 1] != prefix)) continue;
            bins[key >> shift & (uint32_t)(count - 1)] += mass ? mass[i] : 1.0;
        }
        int bin = count - 1, lowest = count - 1; /* lowest: the last bin that is not empty, should rounding fall short */
        for (; bin >= 0; bin--) {
            if (bins[bin] == 0) continue;
            lowest = bin;
            if (above + bins[bin] >= target) break;
            above += bins[bin];
        }
        if (bin < 0) {
            bin = lowest;
            above -= bins[bin];
        }
        prefix = prefix << bits[level] | (uint32_t)bin;
    }
    return prefix;
}

/* Philox4x32-10 (Salmon et al. 2011), VL counters (quad, position + 1, 0, 0) at a time. */
typedef uint64_t vq __attribute__((ext_vector_type(VL)));

INLINE void philox(vu counter[4], uint32_t k0, uint32_t k1) {
    for (int round = 0; round < 10; round++) {
        const vq a = __builtin_convertvector(counter[0], vq) * 0xD2511F53u;
        const vq b = __builtin_convertvector(counter[2], vq) * 0xCD9E8D57u;
        const vu high_a = __builtin_convertvector(a >> 32, vu), high_b = __builtin_convertvector(b >> 32, vu);
        counter[0] = high_b ^ counter[1] ^ k0;
        counter[1] = __builtin_convertvector(b, vu);
        counter[2] = high_a ^ counter[3] ^ k1;
        counter[3] = __builtin_convertvector(a, vu);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

/* Gumbel noise of the tokens first … first + 4 VL - 1, `first` a multiple of 4. */
INLINE void gumbel(int64_t first, uint32_t position, uint32_t k0, uint32_t k1, float *noise) {
    vu quad;
    for (int i = 0; i < VL; i++) quad[i] = (uint32_t)(first / 4 + i);
    vu lanes[4] = {quad, (vu)(position + 1), (vu)(0u), (vu)(0u)};
    philox(lanes, k0, k1);
    for (int j = 0; j < 4; j++) {
        const vf u = (__builtin_convertvector(lanes[j] >> 9, vf) + 0.5f) * 0x1p-23f; /* exact: 24 bits */
        const vf g = -v_log(-v_log(u));
        for (int i = 0; i < VL; i++) noise[4 * i + j] = g[i];
    }
}

typedef struct {
    float temperature, top_p, min_p;
    int32_t top_k;
    uint32_t seed_lo, seed_hi, position;
} draw_t;

static draw_t draw_of(const step_t *step, int64_t r) {
    return (draw_t){
        .temperature = step->temperature[r],
        .top_p = step->top_p[r],
        .min_p = step->min_p[r],
        .top_k = step->top_k[r],
        .seed_lo = step->seed_lo[r],
        .seed_hi = step->seed_hi[r],
        .position = (uint32_t)token_position(step, step->row[r]),
    };
}

/* What adjusts the logits of a row: its slot's marks and biases, NULL where it has none. */
typedef struct {
    int32_t *marks;
    const float *biases;
    float repetition, presence, frequency;
} adjust_t;

static adjust_t adjust_of(const step_t *step, const sample_op_t *o, int64_t r) {
    if (!step->adjust || !o->marks || step->slot[r] == 0) return (adjust_t){0};
    const int64_t begin = (int64_t)(step->slot[r] - 1) * o->logits.columns;
    return (adjust_t){o->marks + begin, o->biases + begin, step->repetition[r], step->presence[r], step->frequency[r]};
}

#define IN_OUTPUT 2 /* a mark counts this for each time that the token is in the output */

INLINE float adjusted(const adjust_t *a, float logit, int64_t token) {
    if (!a->marks) return logit;
    const int32_t mark = a->marks[token];
    if (mark) logit = logit > 0 ? logit / a->repetition : logit * a->repetition;
    if (mark >= IN_OUTPUT) logit -= a->presence + a->frequency * (float)(mark / IN_OUTPUT);
    return logit + a->biases[token];
}

/* The tokens that top-k, top-p and min-p leave. */
typedef struct {
    uint32_t least; /* order_key of the least z */
    float floor; /* least z, taken from the greatest */
    float top;
} threshold_t;

INLINE bool passes(const threshold_t *keep, float z) {
    return order_key(z) >= keep->least && z - keep->top >= keep->floor;
}

/* p: scratch for n values; z and p may be read and written VL values past n. */
static threshold_t draw_threshold(const draw_t *d, const float *z, float *p, int64_t n) {
    threshold_t keep = {0, d->min_p > 0 ? logf(d->min_p) : -INFINITY, greatest(z, n)};
    if (d->top_k > 0 && d->top_k < n) keep.least = select_key(z, NULL, n, d->top_k, 0);
    if (d->top_p < 1) {
        double total = 0;
        for (int64_t i = 0; i < n; i += VL) v_store(p + i, v_exp(v_load(z + i) - keep.top));
        for (int64_t i = 0; i < n; i++) total += order_key(z[i]) >= keep.least ? p[i] : 0.0f;
        keep.least = select_key(z, p, n, (double)d->top_p * total, keep.least);
    }
    return keep;
}

/* The token of one row of logits, or NO_TOKEN; z and p: scratch for n + 4 VL values each. */
#define NO_TOKEN (-1) /* of logits that are not numbers */
static int32_t choose_token(const draw_t *d, const float *logits, int64_t n, float *z, float *p) {
    if (any_nan(logits, n)) return NO_TOKEN;
    if (d->temperature == 0) return lowest_index_of(logits, greatest(logits, n), n);
    for (int64_t i = 0; i < n; i++) z[i] = logits[i] / d->temperature;
    for (int64_t i = n; i < n + 4 * VL; i++) z[i] = -INFINITY;
    const threshold_t keep = draw_threshold(d, z, p, n);
    float best = -INFINITY, noise[4 * VL];
    int32_t token = lowest_index_of(z, keep.top, n);
    for (int64_t i = 0; i < n; i += 4 * VL) {
        bool any = false;
        for (int j = 0; j < 4 * VL; j++) any |= passes(&keep, z[i + j]);
        if (!any) continue;
        gumbel(i, d->position, d->seed_lo, d->seed_hi, noise);
        for (int j = 0; j < 4 * VL && i + j < n; j++) {
            if (!passes(&keep, z[i + j]) || !(z[i + j] + noise[j] > best)) continue;
            best = z[i + j] + noise[j];
            token = (int32_t)(i + j);
        }
    }
    return token;
}

/* The same of logits that are adjusted first. */
static int32_t choose_adjusted(
    const draw_t *d, const adjust_t *a, const float *logits, int64_t n, float *z, float *p) {
    if (!a->marks) return choose_token(d, logits, n, z, p);
    for (int64_t i = 0; i < n; i++) z[i] = adjusted(a, logits[i], i);
    return choose_token(d, z, n, z, p);
}

/* Keep the token of a row, which counts as one of the output. */
INLINE void keep_token(const sample_op_t *o, const adjust_t *a, int64_t r, int32_t token) {
    o->out[r] = token;
    if (a->marks && token != NO_TOKEN) a->marks[token] += IN_OUTPUT;
}

/*
 * Log-probabilities of a row: words[0] is that of `token`, and then come the k likeliest tokens, greatest first and of equals the
 * lower, and k log-probabilities of theirs. Tokens past the vocabulary are -1. p: scratch for n + VL values.
 */
static void tell_logprobs(const float *logits, int64_t n, int32_t token, int32_t k, int32_t *words, float *p) {
    const float top = greatest(logits, n);
    double total = 0;
    for (int64_t i = 0; i < n; i += VL) v_store(p + i, v_exp(v_load(logits + i) - top));
    for (int64_t i = 0; i < n; i++) total += p[i];
    const double normaliser = top + log(total);
    int32_t *tokens = words + 1;
    float *values = (float *)(words + 1 + k); /* logits, until the end */
    int32_t count = 0;
    for (int64_t i = 0; i < n && k > 0; i++) {
        if (count == k && !(logits[i] > values[k - 1])) continue;
        int32_t at = count < k ? count++ : k - 1;
        for (; at > 0 && logits[i] > values[at - 1]; at--) tokens[at] = tokens[at - 1], values[at] = values[at - 1];
        tokens[at] = (int32_t)i, values[at] = logits[i];
    }
    for (int32_t i = 0; i < count; i++) values[i] = (float)(values[i] - normaliser);
    for (int32_t i = count; i < k; i++) tokens[i] = -1, values[i] = -INFINITY;
    ((float *)words)[0] = token == NO_TOKEN ? NAN : (float)(logits[token] - normaliser);
}

static void sample(run_t *run, const op_t *op, int thread) {
    const sample_op_t *o = &op->sample;
    const int64_t n = o->logits.columns;
    float *z = (float *)(run->scratch + (size_t)thread * run->scratch_bytes);
    float *p = z + aligned_bytes((size_t)n + 4 * VL, sizeof(float)) / sizeof(float);
    for (int64_t r; (r = pool_take(run->pool, thread, run->step.rows)) >= 0;) {
        const draw_t draw = draw_of(&run->step, r);
        const adjust_t adjust = adjust_of(&run->step, o, r);
        const float *logits = (const float *)o->logits.data + r * o->logits.stride;
        keep_token(o, &adjust, r, choose_adjusted(&draw, &adjust, logits, n, z, p));
        const int32_t words = run->step.logprobs;
        if (words) tell_logprobs(logits, n, o->out[r], words / 2, run->logprobs + r * words, p);
    }
}

#endif
