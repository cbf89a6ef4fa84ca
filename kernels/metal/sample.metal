// One threadgroup chooses the token of one row. Thresholds of top-k and top-p are found by bisection over the order-preserving
// integer form of floats, so that no sort is needed and ties are all kept.
#include "draw.metal"

// Sum over tokens with key >= least: of 1 (largest key threshold unused), or of e^(z - top).
inline float measure(device const float *row, int n, float inverse, uint least, bool mass, float top, threadgroup float2 *scratch,
                     Place place) {
    float sum = 0.0f;
    for (int v = place.item; v < n; v += WG) {
        float z = row[v] * inverse;
        if (float_key(z) >= least) sum += mass ? precise::exp(z - top) : 1.0f;
    }
    return group_sum(sum, scratch, place);
}

[[kernel, max_total_threads_per_threadgroup(WG)]] void sample(
    device const int *step [[buffer(0)]], constant int &rows [[buffer(1)]], constant int &temperatures [[buffer(2)]],
    constant int &top_ks [[buffer(3)]], constant int &top_ps [[buffer(4)]], constant int &min_ps [[buffer(5)]],
    constant int &seeds_lo [[buffer(6)]], constant int &seeds_hi [[buffer(7)]], constant int &token_seq [[buffer(8)]],
    constant int &seq_begin [[buffer(9)]], constant int &seq_len [[buffer(10)]], device const float *logits [[buffer(11)]],
    device int *out [[buffer(12)]], constant int &n [[buffer(13)]], PLACE) {
    threadgroup float2 scratch[SIMDGROUPS];
    threadgroup float best_value[WG];
    threadgroup int best_index[WG];
    Place place = PLACED;
    int r = int(group.x), lane = place.item;
    if (r >= STEP_ROWS(step)) return;
    int token = step[rows + r];
    device const float *row = logits + ulong(r) * ulong(n);
    float temperature = as_type<float>(step[temperatures + r]);
    bool greedy = temperature == 0.0f;
    float inverse = greedy ? 1.0f : 1.0f / temperature;
    uint least = 0, position = 0;
    bool odd = false;  // whether this thread has seen a NaN
    float floor_z = -INFINITY;
    if (!greedy) {
        position = uint(token_position(step, token_seq, seq_begin, seq_len, token)) + 1u;
        float top = -INFINITY;
        for (int v = lane; v < n; v += WG) {
            float z = row[v] * inverse;
            top = fmax(top, z);
            odd = odd || no_number(z);
        }
        top = group_max(top, scratch, place);
        int top_k = step[top_ks + r];
        float top_p = as_type<float>(step[top_ps + r]), min_p = as_type<float>(step[min_ps + r]);
        // Top-k counts tokens, then top-p their mass: the greatest key at which that still reaches what is wanted. The first
        // measure, of all that are left, tells how much top-p wants.
        for (int turn = 0; turn < 2; turn++) {
            bool mass = turn == 1;
            if (mass ? top_p >= 1.0f : top_k <= 0 || top_k >= n) continue;
            uint low = least, high = 0xFFFFFFFFu, key = least;
            float wanted = -1.0f;
            while (low < high) {
                float measured = measure(row, n, inverse, key, mass, top, scratch, place);
                if (wanted < 0.0f) wanted = mass ? top_p * measured : float(top_k);
                else if (measured >= wanted) low = key;
                else high = key - 1u;
                key = low + (high - low) / 2u + 1u;
            }
            least = low;
        }
        if (min_p > 0.0f) floor_z = top + precise::log(min_p);
    }
    float best = -INFINITY;
    int chosen = n;
    for (int v = lane; v < n; v += WG) {
        float z = greedy ? row[v] : row[v] * inverse;
        odd = odd || no_number(z);
        if (!greedy) {
            if (float_key(z) < least || z < floor_z) continue;
            z += gumbel(uint(step[seeds_lo + r]), uint(step[seeds_hi + r]), uint(v), position);
        }
        if (z > best || chosen == n) {
            best = z;
            chosen = v;
        }
    }
    best_value[lane] = best;
    best_index[lane] = odd ? -1 : chosen;
    for (int half_size = WG / 2; half_size > 0; half_size /= 2) {
        GROUP_BARRIER;
        if (lane < half_size) {
            float other = best_value[lane + half_size];
            int other_index = best_index[lane + half_size], mine = best_index[lane];
            if (mine >= 0 && other_index < n &&
                (other_index < 0 || mine == n || other > best_value[lane] || (other == best_value[lane] && other_index < mine))) {
                best_value[lane] = other;
                best_index[lane] = other_index;
            }
        }
    }
    if (lane == 0) out[r] = best_index[0];
}
