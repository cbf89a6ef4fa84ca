// Rows of x for the compact head: evened out as its columns are, as integers of 16 bits; also the bound of a score's error.
// Column k is stored as a float divided by 16^(k % 8), so that a code can be multiplied where it stands in its word.
// A threadgroup a row. NORM: does the work of norm_rows first, in the same order: the tokens must be those of its logits.
#include "head_offset.metal"
#define LIMIT 32512.0f
#define DEVIATIONS (7.5f * 0.288675135f * 1.01f) /* t / sqrt(12), and 1 % for rounding to f32 */
#define HELD ((COLS + WG - 1) / WG)

[[kernel, max_total_threads_per_threadgroup(WG)]] void head_rows(
    device const int *step [[buffer(0)]], device const float *x [[buffer(1)]], device const float *gain [[buffer(2)]],
    device const float *column [[buffer(3)]], device float *normed [[buffer(4)]], device float *planes [[buffer(5)]],
    device float4 *params [[buffer(6)]], device uint *state [[buffer(7)]], constant int &rows [[buffer(8)]],
    constant float &eps [[buffer(9)]], PLACE) {
    threadgroup float2 scratch[SIMDGROUPS];
    Place place = PLACED;
    int r = int(group.x);
    if (r >= STEP_ROWS(step)) return;
    device const float *row = x + ulong(NORM ? step[rows + r] : r) * COLS;
    float squares = 0.0f;
    for (int i = place.item; i < COLS; i += WG) squares += row[i] * row[i];
    float norm = NORM ? 1.0f / precise::sqrt(group_sum(squares, scratch, place) / float(COLS) + eps) : 1.0f;
    float evened[HELD], square = 0.0f, largest = 0.0f;
    for (int i = 0; i < HELD; i++) {
        int k = place.item + i * WG;
        evened[i] = 0.0f;
        if (k < COLS) {
            float y = NORM ? row[k] * norm * gain[k] : row[k];
            if (NORM) normed[r * COLS + k] = y;
            evened[i] = y * column[k];
        }
        square += evened[i] * evened[i];
        largest = fmax(largest, fabs(evened[i]));
    }
    float2 found = group_sum_max(float2(square, largest), scratch, place);
    float unit = found.y / LIMIT, inverse = unit > 0.0f ? 1.0f / unit : 0.0f, base = 0.0f, lost = 0.0f;
    for (int i = 0; i < HELD; i++) {
        int k = place.item + i * WG;
        if (k >= COLS) break;
        float q = clamp(rint(evened[i] * inverse), -32640.0f, 32640.0f);
        planes[r * COLS + k] = q * as_type<float>(uint(127 - 4 * (k % 8)) << 23u);
        base += q * head_offsets(uint(k))[0];
        float rest = evened[i] - q * unit;
        lost += rest * rest;
    }
    base = group_sum(base, scratch, place);
    lost = group_sum(lost, scratch, place);
    if (place.item == 0) {
        params[r] = float4(unit, base, precise::sqrt(found.x) * DEVIATIONS, precise::sqrt(lost) * 1.01f);
        state[r] = 0;  // less than any key
    }
}
