// The compact head: a matrix of f16 in 4 bits a weight, with a bound on each score's error. Row n is stored as codes
// 0 ... 15: W[n, k] ~ column[k] * size[n].x * (code - offset[k]). `column` evens out columns of unlike size, size.x is the
// greatest magnitude of the row, so evened, over 7.5, and `offset` is 7.5 plus a dither that does not depend on the weights, so
// that errors are uniform and independent (decision 0060 has the proof). size.y is the norm of the stored row,
// without the column sizes. A word of codes is eight neighbours, the first in its lowest bits.
#include "head_offset.metal"
#define SAMPLED 4096 /* rows, about, that a column's size is estimated from */

// A threadgroup has 32 columns; groups of four of its threads take rows by turns.
[[kernel, max_total_threads_per_threadgroup(WG)]] void head_columns(
    device const half4 *weight [[buffer(0)]], device float *column [[buffer(1)]], constant int &rows [[buffer(2)]], PLACE) {
    threadgroup float sums[WG][8];
    int item = int(index), part = item % 4, slots = WG / 4, stride = rows / SAMPLED + 1;
    float4 low = float4(0.0f), high = float4(0.0f);
    for (int n = item / 4 * stride; n < rows; n += slots * stride) {
        ulong at = ulong(n) * (COLS / 4) + ulong(int(group.x) * 8 + part * 2);
        float4 a = float4(weight[at]), b = float4(weight[at + 1]);
        low += a * a;
        high += b * b;
    }
    for (int i = 0; i < 4; i++) {
        sums[item][i] = low[i];
        sums[item][4 + i] = high[i];
    }
    GROUP_BARRIER;
    if (item >= 32) return;
    float sum = 0.0f;
    for (int slot = 0; slot < slots; slot++) sum += sums[slot * 4 + item / 8][item % 8];
    float rms = precise::sqrt(sum / float(SAMPLED));
    column[int(group.x) * 32 + item] = rms > 0.0f && rms < INFINITY ? rms : 1.0f;
}

// A threadgroup has a row, a thread 32 columns of it: COLS / 32 of them have any. Grid: [any, enough for all rows].
[[kernel, max_total_threads_per_threadgroup(WG)]] void head_pack(
    device const half4 *weight [[buffer(0)]], device const float4 *column [[buffer(1)]], device uint *codes [[buffer(2)]],
    device float2 *size [[buffer(3)]], constant int &rows [[buffer(4)]], PLACE) {
    threadgroup float2 scratch[SIMDGROUPS];
    Place place = PLACED;
    int n = int(group.x) + int(group.y) * int(groups.x);
    if (n >= rows) return;
    float4 v[8];
    float largest = 0.0f, odd = 0.0f;
    for (int i = 0; i < 8; i++) {
        v[i] = float4(0.0f);
        if (place.item < COLS / 32) {
            int k = place.item * 8 + i;
            v[i] = float4(weight[ulong(n) * (COLS / 4) + ulong(k)]) / column[k];
        }
        float greatest = magnitude(v[i]);
        for (int j = 0; j < 4; j++) odd += isfinite(v[i][j]) ? 0.0f : 1.0f;
        largest = fmax(largest, greatest);
    }
    float2 found = group_sum_max(float2(odd, largest), scratch, place);
    float step = found.y * (1.000001f / 7.5f);
    bool finite = found.x == 0.0f;
    float inverse = finite && step > 0.0f ? 1.0f / step : 0.0f, squares = 0.0f;
    if (place.item < COLS / 32) {
        for (int i = 0; i < 4; i++) {
            uint word = 0;
            for (int j = 0; j < 2; j++) {
                float4 offset = head_offsets(uint(place.item * 32 + i * 8 + j * 4));
                float4 code = rint(clamp((inverse > 0.0f ? v[2 * i + j] * inverse : float4(0.0f)) + offset, 0.0f, 15.0f));
                squares += dot(code - offset, code - offset);
                uint4 c = uint4(code);
                word |= (c.x | c.y << 4u | c.z << 8u | c.w << 12u) << uint(16 * j);
            }
            codes[ulong(n) * (COLS / 8) + ulong(place.item * 4 + i)] = word;
        }
    }
    squares = group_sum(squares, scratch, place);
    float stored = finite ? step : INFINITY;  // a weight is NaN: the row is always in doubt
    if (place.item == 0) size[n] = float2(stored, stored * precise::sqrt(squares) * 1.0001f);
}
