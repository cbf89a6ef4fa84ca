// ternary_matmul for up to TOKENS (8) tokens, fused with the quantisation before it and the activation after it where possible.
// out[m, n] = f32(sum of x[m, k] w[n, k]) * (scale[m] * w_scale[n]), w in {-1, 0, 1} held as codes w + 1 in two bits.
//
// LANES threads of a simdgroup share EACH rows of `out` and take 16 bytes of a row of W at a time, neighbours next to one another:
// every byte is read once. At each bit pair those hold 16 neighbours of K: pair 3 (the top) weights k..k+15, pair 2 those 32
// further, and so on; two such chunks make 128 of K. Their offset of one adds the sum of x, which is subtracted at the end.
//
// A code is no integer here: put at the lowest bits of a half's exponent, codes 0, 1 and 2 are the halves 0, 2^-14 and 2^-13.
// A shift and a mask thus make two weights, and one fma of halves multiplies both. Sums of eight products of codes and
// int8 fit a half exactly (2048 * 2^-14), and a thread's sum of those a float; threads add up integers.
//
// INPUT 0: x is int8, with a scale and a sum for each token. 1: x is f32, one token: absmax int8 here. 2: the same after RMSNorm.
// Every threadgroup then quantises the row for itself.
// GLU: rows 0..rows/2-1 of W are gates, the others their ups, and out = act(gate) * up.
#ifndef EACH
#define EACH 1
#endif
#define CHUNKS (ROW_BYTES / 16)
#define ITERS ((CHUNKS + LANES - 1) / LANES)
#define GROUP_ROWS (WG / LANES * EACH)
#define TIMES (1 + GLU) /* rows of W for one of out */
#define VECTORS ((COLS / 4 + WG - 1) / WG)
#define CODES 0x0C000C00u
#define UNIT 16384.0f /* 2^14: what one is of the sums */

#if INPUT
// Absmax int8 of the row, after RMSNorm where INPUT is 2, as halves in the order in which the codes of a word come to be multiplied
// (x_of below). Returns its scale and its sum. The norm is one factor of the whole row, so that the mean square and the
// greatest magnitude can be found together.
inline float2 quantized(device const float4 *x, device const float4 *norm, float eps, threadgroup half2 *pairs,
                        threadgroup float2 *scratch, Place place) {
    float4 v[VECTORS];
    float2 found = float2(0.0f, 0.0f);
    for (int i = 0; i < VECTORS; i++) {
        int k = place.item + i * WG;
        v[i] = k < COLS / 4 ? x[k] : float4(0.0f);
#if INPUT == 2
        found.x += dot(v[i], v[i]);
        if (k < COLS / 4) v[i] *= norm[k];
#endif
        found.y = fmax(found.y, magnitude(v[i]));
    }
    found = group_sum_max(found, scratch, place);
    float inverse = INPUT == 2 ? 1.0f / precise::sqrt(found.x / float(COLS) + eps) : 1.0f;
    float largest = fmax(found.y * inverse, QUANT_FLOOR), factor = 127.0f / largest * inverse;
    int sum = 0;
    for (int i = 0; i < VECTORS || place.item + i * WG < ROW_BYTES; i++) {
        int k = place.item + i * WG;
        char4 q = i < VECTORS ? to_int8(v[min(i, VECTORS - 1)] * factor) : char4(0);  // beyond K the values are zero
        int chunk = k / 32 * 2 + k % 8 / 4, word = k % 4, pair = k % 32 / 8;
        if (k < ROW_BYTES) {
            pairs[(2 * word * CHUNKS + chunk) * 4 + pair] = half2(half(q.x), half(q.z));
            pairs[((2 * word + 1) * CHUNKS + chunk) * 4 + pair] = half2(half(q.y), half(q.w));
        }
        sum += sum4(q);
    }
    return float2(largest / 127.0f, group_sum(float(sum), scratch, place));  // exact: below 2^24, as are its parts
}
#endif

[[kernel, max_total_threads_per_threadgroup(WG)]] void ternary_decode(
    device const int *step [[buffer(0)]],
#if INPUT
    device const float4 *input [[buffer(1)]],
#else
    device const char *input [[buffer(1)]],
#endif
    device const float *scale [[buffer(2)]], device const int *x_sums [[buffer(3)]], device const float4 *norm [[buffer(4)]],
    constant float &eps [[buffer(5)]], device const uint4 *codes [[buffer(6)]], device const float *w_scale [[buffer(7)]],
    device float *out [[buffer(8)]], constant int &rows [[buffer(9)]], PLACE) {
    Place place = PLACED;
    int lane = place.item % LANES, slot = place.item / LANES, tokens = STEP_TOKENS(step), outs = rows / TIMES;
    int first = int(group.x) * GROUP_ROWS + slot * EACH;
    float2 sums[EACH * TIMES][TOKENS];
    for (int r = 0; r < EACH * TIMES; r++)
        for (int t = 0; t < TOKENS; t++) sums[r][t] = float2(0.0f, 0.0f);
#if INPUT
    threadgroup uint4 x[8 * CHUNKS];
    threadgroup float2 scratch[SIMDGROUPS];
    float2 made = quantized(input, norm, eps, (threadgroup half2 *)x, scratch, place);
#endif
    for (int i = 0; i < ITERS; i++) {
        int chunk = lane + i * LANES;
        if (chunk >= CHUNKS) break;
        uint4 code[EACH * TIMES];
        for (int r = 0; r < EACH * TIMES; r++) {
            int n = min(first + r / TIMES, outs - 1) + r % TIMES * outs;
            code[r] = codes[ulong(n) * CHUNKS + ulong(chunk)];
        }
        for (int t = 0; t < TOKENS; t++) {
#if !INPUT
            // Four times 16 activations, as far as the row goes.
            char4 read[4][4];
            for (int pair = 0; pair < 4; pair++)
                for (int word = 0; word < 4; word++) {
                    int k = chunk / 2 * 128 + pair * 32 + chunk % 2 * 16 + 4 * word;
                    device const char *from = input + ulong(min(t, tokens - 1)) * COLS;
                    read[pair][word] = k < COLS ? *(device const char4 *)(from + k) : char4(0);
                }
#endif
            for (int word = 0; word < 4; word++) {
                // For each bit pair the activations of bytes 0 and 2 of the word, and those of 1 and 3.
#if INPUT
                uint4 even = x[2 * word * CHUNKS + chunk], odd = x[(2 * word + 1) * CHUNKS + chunk];
                half2 x0[4] = {as_type<half2>(even.x), as_type<half2>(even.y), as_type<half2>(even.z), as_type<half2>(even.w)};
                half2 x1[4] = {as_type<half2>(odd.x), as_type<half2>(odd.y), as_type<half2>(odd.z), as_type<half2>(odd.w)};
#else
                half2 x0[4], x1[4];
                for (int pair = 0; pair < 4; pair++) {
                    char4 v = read[pair][word];
                    x0[pair] = half2(half(v.x), half(v.z));
                    x1[pair] = half2(half(v.y), half(v.w));
                }
#endif
                for (int r = 0; r < EACH * TIMES; r++) {
                    uint c = code[r][word];
                    half2 sum = as_type<half2>(c << 4 & CODES) * x0[0];
                    sum = fma(as_type<half2>(c << 6 & CODES), x0[1], sum);
                    sum = fma(as_type<half2>(c << 8 & CODES), x0[2], sum);
                    sum = fma(as_type<half2>(c << 10 & CODES), x0[3], sum);
                    sum = fma(as_type<half2>(c >> 4 & CODES), x1[0], sum);
                    sum = fma(as_type<half2>(c >> 2 & CODES), x1[1], sum);
                    sum = fma(as_type<half2>(c & CODES), x1[2], sum);
                    sum = fma(as_type<half2>(c << 2 & CODES), x1[3], sum);
                    sums[r][t] += float2(sum);
                }
            }
        }
    }
    for (int t = 0; t < TOKENS; t++) {
        int totals[EACH * TIMES];
        for (int r = 0; r < EACH * TIMES; r++) {
            int sum = int((sums[r][t].x + sums[r][t].y) * UNIT);
#if LANES == 32
            sum = simd_sum(sum);
#else
            for (ushort apart = LANES / 2; apart > 0; apart = apart / 2) sum += simd_shuffle_xor(sum, apart);
#endif
            totals[r] = sum;
        }
        if (t >= tokens) continue;
        // Thread e of those that share the rows stores row e.
        for (int e = 0; e < EACH; e++) {
            int to = first + e;
            if (lane != e % LANES || to >= outs) continue;
#if INPUT
            float x_scale = made.x;
            int x_sum = int(made.y);
#else
            float x_scale = scale[t];
            int x_sum = x_sums[t];
#endif
            float value = float(totals[e * TIMES] - x_sum) * (x_scale * w_scale[to]);
            ulong place_of = ulong(t) * ulong(outs) + ulong(to);
#if GLU
            float up = float(totals[e * TIMES + 1] - x_sum) * (x_scale * w_scale[to + outs]);
            out[place_of] = act(value) * up;
#elif ADD
            float before = out[place_of];
            out[place_of] = before + value;
#else
            out[place_of] = value;
#endif
        }
    }
}
