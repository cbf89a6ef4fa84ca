// Scores of all rows of a compact head, roughly, for up to TOKENS (8) rows of x, and for each of these the greatest key that its
// winner reaches for certain. A simdgroup keeps EACH rows of the head in registers, read once, and takes one row of x after the
// other from threadgroup memory. Products and sums of 32 columns are integers below 2^24, exact in floats; these add up as
// integers, below 2^31 for up to 4,096 columns.
#include "head.metal"
#define CHUNKS (COLS / 32)
#define HELD ((CHUNKS + 31) / 32)

[[kernel, max_total_threads_per_threadgroup(WG)]] void head_score(
    device const int *step [[buffer(0)]], device const uint4 *codes [[buffer(1)]], device const float2 *size [[buffer(2)]],
    device const float4 *planes [[buffer(3)]], device const float4 *params [[buffer(4)]], device float *scores [[buffer(5)]],
    device atomic_uint *state [[buffer(6)]], constant int &rows_at [[buffer(7)]], constant int &temperatures [[buffer(8)]],
    constant int &seeds_lo [[buffer(9)]], constant int &seeds_hi [[buffer(10)]], constant int &token_seq [[buffer(11)]],
    constant int &seq_begin [[buffer(12)]], constant int &seq_len [[buffer(13)]], constant int &rows [[buffer(14)]], PLACE) {
    threadgroup float4 x[COLS / 4];
    threadgroup float2 scratch[SIMDGROUPS];
    Place place = PLACED;
    ChoiceAt at = {rows_at, temperatures, seeds_lo, seeds_hi, token_seq, seq_begin, seq_len};
    int first = (int(group.x) * SIMDGROUPS + place.simdgroup) * EACH, count = min(STEP_ROWS(step), TOKENS);
    uint4 held[EACH][HELD];
    for (int e = 0; e < EACH; e++)
        for (int i = 0; i < HELD; i++)
            held[e][i] = codes[ulong(min(first + e, rows - 1)) * CHUNKS + ulong(min(place.lane + 32 * i, CHUNKS - 1))];
    for (int r = 0; r < count; r++) {
        GROUP_BARRIER;
        for (int k = place.item; k < COLS / 4; k += WG) x[k] = planes[r * (COLS / 4) + k];
        GROUP_BARRIER;
        int sums[EACH];
        for (int e = 0; e < EACH; e++) sums[e] = 0;
        for (int i = 0; i < HELD; i++) {
            int chunk = place.lane + 32 * i;
            if (chunk >= CHUNKS) break;
            float part[EACH];
            for (int e = 0; e < EACH; e++) part[e] = 0.0f;
            for (int word = 0; word < 4; word++) {
                float4 a = x[chunk * 8 + word * 2], b = x[chunk * 8 + word * 2 + 1];
                for (int e = 0; e < EACH; e++) {
                    uint c = held[e][i][word];
                    part[e] = fma(float(c & 0x0000000Fu), a.x, part[e]);
                    part[e] = fma(float(c & 0x000000F0u), a.y, part[e]);
                    part[e] = fma(float(c & 0x00000F00u), a.z, part[e]);
                    part[e] = fma(float(c & 0x0000F000u), a.w, part[e]);
                    part[e] = fma(float(c & 0x000F0000u), b.x, part[e]);
                    part[e] = fma(float(c & 0x00F00000u), b.y, part[e]);
                    part[e] = fma(float(c & 0x0F000000u), b.z, part[e]);
                    part[e] = fma(float(c & 0xF0000000u), b.w, part[e]);
                }
            }
            for (int e = 0; e < EACH; e++) sums[e] += int(part[e]);
        }
        float4 p = params[r];
        float greatest = -INFINITY;
        for (int e = 0; e < EACH; e++) {
            int sum = simd_sum(sums[e]), n = first + e;
            if (place.lane != e || n >= rows) continue;
            float2 sizes = size[n];
            float score = (float(sum) - p.y) * p.x * sizes.x, doubt = p.z * sizes.x + p.w * sizes.y;
            scores[ulong(r) * ulong(rows) + ulong(n)] = score;
            greatest = head_key(head_choice(step, at, r), score - doubt, uint(n));
        }
        greatest = group_max(greatest, scratch, place);
        if (place.item == 0) atomic_fetch_max_explicit(&state[r], float_key(greatest), memory_order_relaxed);
    }
}
