/* This machine's limits, measured with the level's own instructions: the rooflines of `bitnet bench`. */

#define PROBE_CHUNK ((int64_t)1 << 20) /* bytes a thread takes at a time */
#define PROBE_PATHS 4 /* independent sums, so that no read waits for an addition */

typedef uint64_t vw __attribute__((ext_vector_type(VL / 2)));
typedef uint64_t vw_mem __attribute__((ext_vector_type(VL / 2), aligned(1), may_alias));

/* Read every byte of a buffer once, on all threads, each line prefetched `ahead` bytes before it is read (0: left to the
 * processor); the sum keeps the compiler from leaving reads out. */
static uint64_t probe_read(pool_t *pool, const uint8_t *data, int64_t bytes, int64_t ahead, int thread) {
    const int64_t stride = PROBE_PATHS * (int64_t)sizeof(vw);
    vw sum[PROBE_PATHS] = {(vw)(0)};
    for (int64_t chunk; (chunk = pool_take(pool, thread, bytes / PROBE_CHUNK)) >= 0;) {
        const uint8_t *from = data + chunk * PROBE_CHUNK;
        for (int64_t i = 0; i < PROBE_CHUNK; i += stride) {
            for (int64_t line = 0; ahead && line < stride; line += 64) __builtin_prefetch(from + i + ahead + line, 0, 2);
            for (int p = 0; p < PROBE_PATHS; p++) sum[p] += *(const vw_mem *)(from + i + p * (int64_t)sizeof(vw));
        }
    }
    const vw all = sum[0] + sum[1] + sum[2] + sum[3];
    uint64_t total = 0;
    for (int i = 0; i < VL / 2; i++) total += all[i];
    return total;
}

#if !defined(__AMX_INT8__) /* whose own is in gemm_amx.h */
/* Multiply-adds of int8 as fast as registers allow; returns how many one thread did. */
static int64_t probe_int8(int64_t turns, int32_t *result) {
    peak_t sum[PEAK_PATHS];
    memset(sum, 0, sizeof sum);
    for (int64_t i = 0; i < turns; i++)
        for (int p = 0; p < PEAK_PATHS; p++) {
            sum[p] = peak_step(sum[p]);
            __asm__ volatile("" : PEAK_REGISTER(sum[p])); /* no step may be left out or merged */
        }
    memcpy(result, sum, sizeof *result);
    return turns * PEAK_PATHS * PEAK_PRODUCTS;
}
#endif
