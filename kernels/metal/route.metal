// The experts of each token: logits, then the greatest of them and their softmax.
#include "draw.metal"

// Grid: [shares of the experts, tokens]. LANES threads of a simdgroup share an expert's row of the router, and every row's sums are
// added in the same order, so that equal rows have equal logits. The norm is one factor of the whole row.
[[kernel, max_total_threads_per_threadgroup(WG)]] void route_logits(
    device const int *step [[buffer(0)]], device const float4 *x [[buffer(1)]], device const float4 *weight [[buffer(2)]],
    constant float &eps [[buffer(3)]], device const float4 *router [[buffer(4)]], device float *logits [[buffer(5)]],
    constant int &dim [[buffer(6)]], constant int &experts [[buffer(7)]], PLACE) {
    threadgroup float2 scratch[SIMDGROUPS];
    Place place = PLACED;
    int m = int(group.y), lane = place.item % LANES, e = int(group.x) * (WG / LANES) + place.item / LANES, quads = dim / 4;
    if (m >= STEP_TOKENS(step)) return;
    device const float4 *row = x + ulong(m) * ulong(quads), *of = router + ulong(min(e, experts - 1)) * ulong(quads);
    float squares = 0.0f, sum = 0.0f;
    for (int k = place.item; k < quads; k += WG) squares += dot(row[k], row[k]);
    for (int k = lane; k < quads; k += LANES) sum += dot(row[k] * weight[k], of[k]);
    for (ushort apart = LANES / 2; apart > 0; apart /= 2) sum += simd_shuffle_xor(sum, apart);
    float inverse = 1.0f / precise::sqrt(group_sum(squares, scratch, place) / float(dim) + eps);
    if (lane == 0 && e < experts) logits[ulong(m) * ulong(experts) + ulong(e)] = sum * inverse;
}

#define TAKEN 0u /* below the key of any number */
#define NOT_A_NUMBER 0xFFFFFFFFu /* above it, so that a share tells of it */

// One threadgroup a token. In each round the greatest key is taken; of equal ones, that of the lowest expert.
[[kernel, max_total_threads_per_threadgroup(WG)]] void route_top(
    device const int *step [[buffer(0)]], device const float *logits [[buffer(1)]], device int *ids [[buffer(2)]],
    device float *shares [[buffer(3)]], constant int &top [[buffer(4)]], PLACE) {
    threadgroup uint key[EXPERTS];
    threadgroup uint2 best[SIMDGROUPS];
    Place place = PLACED;
    int m = int(group.x), item = place.item;
    if (m >= STEP_TOKENS(step)) return;
    device const float *row = logits + ulong(m) * EXPERTS;
    device int *chosen_ids = ids + ulong(m) * ulong(top);
    device float *chosen_shares = shares + ulong(m) * ulong(top);
    // A thread reads and writes only the keys of its own experts.
    for (int e = item; e < EXPERTS; e += WG) key[e] = no_number(row[e]) ? NOT_A_NUMBER : float_key(row[e]);
    float first = 0.0f, total = 0.0f;
    for (int j = 0; j < top; j++) {
        uint greatest = TAKEN, lowest = EXPERTS;
        for (int e = item; e < EXPERTS; e += WG) {
            if (key[e] > greatest) {
                greatest = key[e];
                lowest = uint(e);
            }
        }
        uint of_simdgroup = simd_max(greatest);
        lowest = simd_min(greatest == of_simdgroup ? lowest : uint(EXPERTS));
        GROUP_BARRIER;
        if (place.lane == 0) best[place.simdgroup] = uint2(of_simdgroup, lowest);
        GROUP_BARRIER;
        uint2 found = best[0];
        for (int i = 1; i < SIMDGROUPS; i++) {
            uint2 other = best[i];
            if (other.x > found.x || (other.x == found.x && other.y < found.y)) found = other;
        }
        int chosen = int(found.y);
        if (chosen % WG == item) key[chosen] = TAKEN;
        if (j == 0) first = row[chosen];
        float power = precise::exp(row[chosen] - first);
        total += power;
        if (item == 0) {
            chosen_ids[j] = chosen;
            chosen_shares[j] = power;
        }
    }
    if (item == 0)
        for (int j = 0; j < top; j++) chosen_shares[j] /= total;
}
