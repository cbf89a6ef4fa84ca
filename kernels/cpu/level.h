/* An instruction-set level: the same operations, compiled from level.c once for each row of build.toml. */
#ifndef BN_LEVEL_H
#define BN_LEVEL_H

#include "pool.h"
#include "program.h"

/* The step that runs now: views into the executable's copy of the step buffer. */
typedef struct {
    int32_t tokens, seqs, rows;
    const int32_t *token, *token_seq, *seq_begin, *seq_len, *row;
    const float *temperature, *top_p, *min_p;
    const int32_t *top_k;
    const uint32_t *seed_lo, *seed_hi;
    bool adjust;
    int32_t logprobs; /* words of a row's log-probabilities: 1 and 2 for each of the likeliest, or 0 */
    const int32_t *slot;
    const float *repetition, *presence, *frequency;
    const int32_t *block_table, *state_from, *state_to;
} step_t;

typedef struct {
    program_t program;
    step_t step;
    pool_t *pool;
    int threads; /* of the pool, at most */
    uint8_t *shared; /* scratch that the threads share within an operation */
    uint8_t *scratch; /* each thread's own */
    size_t shared_bytes, scratch_bytes;
    _Atomic int64_t scored; /* head rows that this run has read in full */
    bool multipliers_are_few;
    int32_t *logprobs; /* [rows][step.logprobs], of this pass */
} run_t;

typedef struct {
    size_t shared, scratch;
} need_t;

typedef struct {
    const char *kernel; /* the name that receipts print */
    void (*run)(run_t *run, const op_t *op, int thread); /* entered by every thread */
    need_t (*need)(const run_t *run, const op_t *op); /* scratch for the largest step; NULL for none */
    stretch_t (*begins)(const run_t *run, const op_t *op, int thread); /* weights read first; NULL for none */
} operation_t;

/* A ternary matrix in the packing of bitnet.core.hal.program.TernaryData. */
typedef struct {
    const uint8_t *codes;
    uint8_t *packed;
    int64_t rows, columns;
    int64_t group; /* columns that are packed on their own, with scales [rows, columns / group]; 0: all of them, without */
    const uint16_t *scales;
    uint16_t *packed_scales;
    int64_t binary; /* whether no weight is 0, and each is packed in one bit; columns are a multiple of 128 */
} pack_t;

/* A dense matrix [rows, columns] to be stored as head_layout.h says. */
typedef struct {
    const void *weight;
    int64_t type, rows, columns;
    uint8_t *codes;
    float *step, *chunk_step, *chunk_norm, *column, *offset;
    double *squares; /* scratch of head_pack_scratch bytes */
} head_pack_t;

typedef struct {
    const char *name; /* avx512, vnni_avx2, … */
    const char *device; /* the part after the colon in the device's name: amx, avx512, avx2, neon, simd128, scalar */
    size_t (*packed_bytes)(int64_t rows, int64_t columns, int64_t group, int64_t binary);
    size_t (*packed_scales)(int64_t rows, int64_t columns, int64_t group); /* in bytes */
    void (*pack)(pool_t *pool, const pack_t *job, int thread); /* entered by every thread */
    size_t (*head_bytes)(int64_t rows, int64_t columns);
    size_t (*head_pack_scratch)(int64_t columns, int threads);
    void (*head_pack)(pool_t *pool, const head_pack_t *job, int thread); /* entered by every thread */
    uint64_t (*probe_read)(pool_t *pool, const uint8_t *data, int64_t bytes, int64_t ahead, int thread); /* entered by every thread */
    int64_t (*probe_int8)(int64_t turns, int32_t *result);
    operation_t operations[OP_KINDS];
} level_t;

#if !defined(__wasm__)
extern const level_t level_scalar;
#endif
#if defined(__x86_64__)
extern const level_t level_amx, level_vbmi_avx512, level_avx512, level_vnni_avx2, level_avx2;
#elif defined(__aarch64__)
extern const level_t level_neon;
#elif defined(__wasm__)
extern const level_t level_simd128;
#endif

/* Whether this processor and its operating system run a level's instructions. */
bool level_runs(const level_t *level);

/* Whether 512-bit additions run beside as many dot products as the processor can do: AMD's processors have other units for them,
 * Intel's the same ones. */
bool multipliers_are_few(void);

/* Position in its sequence of a token of the step. */
static inline int32_t token_position(const step_t *step, int32_t token) {
    int32_t s = step->token_seq[token];
    return step->seq_len[s] - step->seq_begin[s + 1] + token;
}

/* Bytes of `count` items of `size`, rounded up so that the next array is aligned for any vector. */
static inline size_t aligned_bytes(size_t count, size_t size) { return (count * size + 63) / 64 * 64; }

#endif
