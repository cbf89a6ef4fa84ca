// The same as transform_quant, for steps of many tokens: a warp has CHUNKS times 1,024 elements of a row, a block the row. Of each 1,024,
// a lane first has every 32nd, so that the steps over the upper bits of their places are its own, and after an exchange in shared memory
// 32 that lie side by side, for the lower bits and the codes. KIND is 0 or 1, BLOCK at most 1,024.
#define UNIT 1024
#define SHARE (UNIT / WARP) /* elements of a lane */
#define UNITS ((DIM + UNIT - 1) / UNIT)
#define CHUNKS ((UNITS + WARPS - 1) / WARPS)
#define PITCH (SHARE + 1) /* of a tile's rows: so that a column's elements fall into different banks */

// The steps of a transform over the bits of a place that are bits of the elements' numbers here, and LOWEST times those.
template <int LOWEST>
__device__ __forceinline__ void transform(float (&v)[SHARE]) {
#pragma unroll
    for (int apart = 1; apart < SHARE; apart *= 2) {
        if (apart * LOWEST >= BLOCK) break;
#pragma unroll
        for (int i = 0; i < SHARE; i++) {
            if (i & apart) continue;
            float a = v[i], b = v[i + apart];
            v[i] = a + b, v[i + apart] = a - b;
        }
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * WARP)
transform_rows(const int *step, const float *x, const float *, const float *weight, const float *signs, float eps,
               signed char *out, float *scale, int *sums) {
    extern __shared__ float tiles[];  // [WARPS][SHARE * PITCH]
    __shared__ float2 parts[WARPS];
    int m = blockIdx.x, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    float *tile = tiles + warp * (SHARE * PITCH);
    const float root = 1.0f / sqrtf((float)BLOCK);
    start_dependents();
    wait_for_before();
    if (m >= STEP_TOKENS(step)) return;
    float v[CHUNKS][SHARE], sum = 0.0f, largest = 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        int first = (c * WARPS + warp) * UNIT;
        auto place = [&](int i) { return first + i * WARP + lane; };
        auto there = [&](int i) { return DIM % UNIT == 0 && UNITS % WARPS == 0 ? true : first + i * WARP + lane < DIM; };
#pragma unroll
        for (int i = 0; i < SHARE; i++) {
            int k = place(i);
            float y = 0.0f;
#if KIND == 0
            if (there(i)) y = x[(size_t)m * DIM + k];
#else
            if (there(i)) y = act(x[(size_t)m * 2 * DIM + k]) * x[(size_t)m * 2 * DIM + DIM + k];
#endif
            v[c][i] = y;
        }
#pragma unroll
        for (int i = 0; i < SHARE; i++) {
            float factor = root;
            if (NORM) sum += v[c][i] * v[c][i];
            if (SIGNS && there(i)) factor *= signs[place(i)];
            if (NORM && there(i)) factor *= weight[place(i)];
            v[c][i] *= factor;
        }
        transform<WARP>(v[c]);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < SHARE; i++) tile[i * PITCH + lane] = v[c][i];
        __syncwarp();
#pragma unroll
        for (int i = 0; i < SHARE; i++) v[c][i] = tile[lane * PITCH + i];
        transform<1>(v[c]);
#pragma unroll
        for (int i = 0; i < SHARE; i++) largest = fmaxf(largest, fabsf(v[c][i]));
    }
    if (NORM) sum = warp_reduce<Sum>(sum);
    largest = warp_max(largest);
    if (lane == 0) parts[warp] = make_float2(sum, largest);
    __syncthreads();
    sum = largest = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += parts[w].x, largest = fmaxf(largest, parts[w].y);
    float inverse = NORM ? rsqrtf(sum * (1.0f / DIM) + eps) : 1.0f;
    largest = fmaxf(largest * inverse, QUANT_FLOOR);
    float factor = 127.0f * reciprocal(largest) * inverse;
    int row_sum = 0;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        int first = (c * WARPS + warp) * UNIT + lane * SHARE;
        int words[SHARE / 4], group = 0;
#pragma unroll
        for (int i = 0; i < SHARE / 4; i++) {
            const float *four = v[c] + 4 * i;
            words[i] = pack(four[0] * factor, four[1] * factor, four[2] * factor, four[3] * factor);
#if SUMS && BOUND
            group = __dp4a(__vabs4(words[i]), 0x01010101u, (unsigned)group);
#elif SUMS
            row_sum = dot_ones(words[i], row_sum);
#endif
        }
#if SUMS && BOUND  // four lanes have the elements of a group
        group += __shfl_xor_sync(FULL, group, 1), group += __shfl_xor_sync(FULL, group, 2);
        row_sum = max(row_sum, (int)__reduce_max_sync(FULL, (unsigned)group));
#endif
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int4 *to = (int4 *)(out + (size_t)m * DIM + first) + i;
            if (first + i * 16 + 16 <= DIM) *to = make_int4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
        }
    }
#if SUMS
    finish_row<WARPS>(row_sum, largest * (1.0f / 127.0f), sums + m, scale + m);
#else
    if (threadIdx.x == 0) scale[m] = largest * (1.0f / 127.0f);
#endif
}
