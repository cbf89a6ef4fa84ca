// The part of delta_rule in chunks that needs no state: a block has a chunk of one head of q and k, and all value heads that use it.
// Four warps have k . k, four q . k, 16 rows each. Then a thread has a column of (I + A)^-1, by substitution.
#include "delta_chunks.cuh"
#define WG 256
#define RATIO (HEADS / K_HEADS)
#define GROUP (WG / CHUNK < RATIO ? WG / CHUNK : RATIO) /* value heads that are solved at a time */
#define PITCH (CHUNK + 4)

extern "C" __global__ void __launch_bounds__(WG)
delta_prepare(const int *step, int seq_begin, const float *qkv, const float *gates, float *matrices, float *factors, float eps) {
    extern __shared__ __align__(128) float heads[];  // q and k; then A of each value head
    __shared__ float norms[2][CHUNK], sums[GROUP][2][CHUNK], strengths[GROUP][CHUNK];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, quarter = lane % 4;
    int place = blockIdx.x, key_head = blockIdx.y, s = 0, seqs = STEP_SEQS(step);
    start_dependents();
    while (s + 1 < seqs && step[seq_begin + s + 1] / CHUNK + s + 1 <= place) s++;
    int begin = step[seq_begin + s], end = step[seq_begin + s + 1], first = begin + (place - begin / CHUNK - s) * CHUNK;
    bool there = in_chunks(begin, end) && first < end;
    if (there || place == 0) wait_for_before();  // one block does in any case, as the next kernel waits only for this one
    if (!there) return;
    int count = min(CHUNK, end - first);
    copy_heads<WG>(heads, qkv, key_head, first, count);
    copies_wait<0>();
    __syncthreads();
#pragma unroll 4
    for (int i = warp; i < 2 * CHUNK; i += WG / WARP) {
        float4 *at = (float4 *)(heads + i * D_K) + (lane ^ swizzle(i) / 4);
        bool has = lane < D_K / 4;
        float4 v = has ? *at : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        float factor = 1.0f / sqrtf(warp_reduce<Sum>(squares(v)) + eps);
        if (i < CHUNK) factor /= sqrtf((float)D_K);
        if (has) *at = times(v, factor);
        if (lane == 0) norms[i / CHUNK][i % CHUNK] = factor;
    }
    __syncthreads();
    int row = warp % 4 * 16 + group;  // and row + 8
    bool of_keys = warp < 4;
    float products[CHUNK / 8][4];
    {
        Sums3 sum[CHUNK / 8] = {};
        const float *a = heads + ((of_keys ? CHUNK : 0) + row) * D_K + 2 * quarter, *b = heads + (CHUNK + group) * D_K + 2 * quarter;
        for (int k = 0; k < D_K; k += 8) {
            int at = k ^ swizzle(group);
            float2 low = *(const float2 *)(a + at), high = *(const float2 *)(a + 8 * D_K + at);
            SplitTile tile = split_tile({low.x, low.y, high.x, high.y});
#pragma unroll
            for (int n = 0; n < CHUNK / 8; n++) {
                if (8 * n <= warp % 4 * 16 + 15) sum[n].add(tile, *(const float2 *)(b + 8 * n * D_K + at));
            }
        }
#pragma unroll
        for (int n = 0; n < CHUNK / 8; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) products[n][e] = sum[n].of(e);
        }
    }
    for (int r0 = 0; r0 < RATIO; r0 += GROUP) {
        auto head = [&](int r) { return TILED ? (r0 + r) * K_HEADS + key_head : key_head * RATIO + r0 + r; };
        auto pair = [&](int r) { return (size_t)place * HEADS + head(r); };
        __syncthreads();
        if (warp < GROUP && r0 + warp < RATIO) {  // running sums, as two floats each; more than 150 leaves nothing of an f32
            const float *gate = gates + head(warp);
            double c[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int t = 2 * lane + i;
                float g = t < count ? gate[(size_t)(first + t) * 2 * HEADS] : 0.0f;
                c[i] = g < -150.0f ? -150.0 : (double)g;
                strengths[warp][t] = t < count ? gate[(size_t)(first + t) * 2 * HEADS + HEADS] : 0.0f;
            }
            c[1] += c[0];
            double before = c[1];
#pragma unroll
            for (int apart = 1; apart < WARP; apart *= 2) {
                double other = __shfl_up_sync(FULL, before, apart);
                if (lane >= apart) before += other;
            }
            double last = __shfl_sync(FULL, before, WARP - 1);
            before -= c[1];
            float *to = factors + pair(warp) * 4 * CHUNK;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int t = 2 * lane + i;
                double sum = before + c[i];
                float high = (float)sum, decay = expf(high);
                sums[warp][0][t] = high, sums[warp][1][t] = (float)(sum - high);
                to[t] = decay * norms[1][t], to[CHUNK + t] = decay * norms[0][t];
                to[2 * CHUNK + t] = expf((float)(last - sum)) * norms[1][t], to[3 * CHUNK + t] = expf((float)last);
            }
        }
        __syncthreads();
        for (int r = 0; r < GROUP && r0 + r < RATIO; r++) {
            float *weigh = matrices + pair(r) * PAIR + CHUNK * CHUNK;
#pragma unroll
            for (int n = 0; n < CHUNK / 8; n++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    int i = row + 8 * half;
                    float2 put;
                    auto element = [&](int j, float product) {
                        if (j > i || (of_keys && j == i)) return 0.0f;
                        float decay = expf((sums[r][0][i] - sums[r][0][j]) + (sums[r][1][i] - sums[r][1][j]));
                        return (of_keys ? strengths[r][i] * product : product) * decay;
                    };
                    int j = 8 * n + 2 * quarter;
                    put.x = element(j, products[n][2 * half]), put.y = element(j + 1, products[n][2 * half + 1]);
                    float *to = of_keys ? heads + (r * CHUNK + i) * PITCH + j : weigh + i * CHUNK + (j ^ swizzle(i));
                    *(float2 *)to = put;
                }
            }
        }
        __syncthreads();
        int r = threadIdx.x / CHUNK, column = threadIdx.x % CHUNK;
        if (r < GROUP && r0 + r < RATIO) {
            const float *a = heads + r * CHUNK * PITCH;
            float *solve = matrices + pair(r) * PAIR, strength = strengths[r][column], x[CHUNK];
#pragma unroll
            for (int i = 0; i < CHUNK; i++) {
                float parts[4] = {};
#pragma unroll
                for (int k = 0; k < i; k += 4) {
                    float4 v = *(const float4 *)(a + i * PITCH + k);
                    parts[0] += v.x * x[k];
                    if (k + 1 < i) parts[1] += v.y * x[k + 1];
                    if (k + 2 < i) parts[2] += v.z * x[k + 2];
                    if (k + 3 < i) parts[3] += v.w * x[k + 3];
                }
                float sum = (parts[0] + parts[1]) + (parts[2] + parts[3]);
                x[i] = i == column ? 1.0f : i < column ? 0.0f : -sum;
                solve[i * CHUNK + (column ^ swizzle(i))] = x[i] * strength;
            }
        }
    }
}
