// One work-group chooses the token of one row. The threshold of top-k is found by bisection over the order-preserving integer form
// of floats, so that no sort is needed and ties are all kept. That of top-p is not looked for: a token is drawn from all, and
// stays if the more likely ones have less than the wanted mass; else only those are left, and another is drawn (decision 0026).

inline int no_number(float z) { return (as_uint(z) & 0x7FFFFFFFu) > 0x7F800000u; }

// Philox4x32-10 (Salmon et al. 2011) at counter (v / 4, position, 0, 0): its lanes are for the tokens v ... v + 3, v a multiple of 4.
inline uint4 noise_words(uint seed_lo, uint seed_hi, uint v, uint position) {
    uint4 c = (uint4)(v >> 2, position, 0, 0);
    uint2 key = (uint2)(seed_lo, seed_hi);
    for (int round = 0; round < 10; round++) {
        uint lo0 = c.x * 0xD2511F53u, hi0 = mul_hi(c.x, 0xD2511F53u);
        uint lo1 = c.z * 0xCD9E8D57u, hi1 = mul_hi(c.z, 0xCD9E8D57u);
        c = (uint4)(hi1 ^ c.y ^ key.x, lo1, hi0 ^ c.w ^ key.y, lo0);
        key += (uint2)(0x9E3779B9u, 0xBB67AE85u);
    }
    return c;
}

// A word of it as a Gumbel variate.
inline float gumbel_of(uint word) {
    float u = ((float)(word >> 9) + 0.5f) * 0x1p-23f;
    return -log(-log(u));
}

// Sum over tokens with key >= least: of 1, or of e^(z - top).
inline float measure(global const float *row, int n, float inverse, uint least, int mass, float top, local float2 *scratch) {
    float sum = 0.0f;
    for (int v = get_local_id(0); v < n; v += WG) {
        float z = row[v] * inverse;
        if (float_key(z) >= least) sum += mass ? exp(z - top) : 1.0f;
    }
    return group_sum(sum, scratch);
}

kernel void sample(global const int *step, int rows, int temperatures, int top_ks, int top_ps, int min_ps, int seeds_lo,
                   int seeds_hi, int token_seq, int seq_begin, int seq_len, global const float *logits, global int *out, int n) {
    local float2 scratch[WG];
    local float best_value[WG];
    local int best_index[WG];
    // Rows past the last repeat it without effect: Intel's compiler for CPUs runs idle work-groups too,
    // up to what they read from memory.
    int r = get_group_id(0), lane = get_local_id(0), last = STEP_ROWS(step) - 1, token = step[rows + min(r, last)];
    if (r > last) return;
    global const float *row = logits + (size_t)r * n;
    float temperature = as_float(step[temperatures + r]);
    int greedy = temperature == 0.0f;
    float inverse = greedy ? 1.0f : 1.0f / temperature;
    uint least = 0, position = 0;
    int odd = 0;  // whether this work-item has seen a NaN; not looked for below, where PoCL 3.1 runs idle work-items as well
    float floor_z = -INFINITY, top = -INFINITY, top_p = 1.0f;
    if (!greedy) {
        position = token_position(step, token_seq, seq_begin, seq_len, token) + 1;
        for (int v = lane; v < n; v += WG) {
            float z = row[v] * inverse;
            top = fmax(top, z);
            odd |= no_number(z);
        }
        top = group_max(top, scratch);
        int top_k = step[top_ks + r];
        float min_p = as_float(step[min_ps + r]);
        top_p = as_float(step[top_ps + r]);
        uint high = top_k > 0 && top_k < n ? 0xFFFFFFFFu : 0;
        while (least < high) {  // the greatest key that top_k tokens reach
            uint middle = least + (high - least) / 2 + 1;
            float count = measure(row, n, inverse, middle, 0, top, scratch);
            if (count >= (float)top_k) least = middle;
            else high = middle - 1;
            if (count == (float)top_k) break;
        }
        if (min_p > 0.0f) floor_z = top + log(min_p);
    }
    float wanted = -1.0f;  // mass that the tokens more likely than the chosen one must not reach
    for (;;) {
        float best = -INFINITY;
        int index = n;
        if (greedy) {
            UNROLL_BY_8
            for (int v = lane; v < n; v += WG) {
                float z = row[v];
                odd |= no_number(z);
                if (z > best || index == n) {
                    best = z;
                    index = v;
                }
            }
        } else {
            for (int first = 4 * lane; first < n; first += 4 * WG) {
                float z[4];
                int left = 0;  // of these tokens
                for (int i = 0; i < 4; i++) {
                    z[i] = row[min(first + i, n - 1)] * inverse;
                    left |= (first + i < n && float_key(z[i]) >= least && !(z[i] < floor_z)) << i;
                }
                if (left == 0) continue;
                uint4 words = noise_words(step[seeds_lo + r], step[seeds_hi + r], first, position);
                for (int i = 0; i < 4; i++) {
                    if ((left >> i & 1) == 0) continue;
                    float key = z[i] + gumbel_of(i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w);
                    if (key > best || index == n) {
                        best = key;
                        index = first + i;
                    }
                }
            }
        }
        best_value[lane] = best;
        best_index[lane] = odd ? -1 : index;
        for (int half_size = WG / 2; half_size > 0; half_size /= 2) {
            barrier(CLK_LOCAL_MEM_FENCE);
            if (lane < half_size) {
                float other = best_value[lane + half_size];
                int other_index = best_index[lane + half_size], mine = best_index[lane];
                if (mine >= 0 && other_index < n && (other_index < 0 || mine == n || other > best_value[lane] ||
                                                     (other == best_value[lane] && other_index < mine))) {
                    best_value[lane] = other;
                    best_index[lane] = other_index;
                }
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        int chosen = best_index[0];
        if (top_p >= 1.0f || chosen < 0 || chosen >= n) break;
        uint more = float_key(row[chosen] * inverse) + 1;
        // The mass of all that are left comes first, and only once.
        float mass = 0.0f;
        for (int turn = wanted < 0.0f ? 0 : 1; turn < 2; turn++) {
            mass = measure(row, n, inverse, turn == 0 ? least : more, 1, top, scratch);
            if (turn == 0) wanted = top_p * mass;
        }
        if (mass == 0.0f || !(mass >= wanted)) break;
        least = more;
    }
    if (lane == 0) out[r] = best_index[0];
}
