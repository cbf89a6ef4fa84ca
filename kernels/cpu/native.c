/* Interface for bitnet/core/cpu/native.py: levels, pools, memory, packing, and running a compiled program. */
#include <stdlib.h>
#include <string.h>

#include "level.h"

/* Best first; a device runs the first of its name that the processor has. */
static const level_t *const LEVELS[] = {
#if defined(__x86_64__)
    &level_amx, &level_vbmi_avx512, &level_avx512, &level_vnni_avx2, &level_avx2,
#elif defined(__aarch64__)
    &level_neon,
#endif
#if defined(__wasm__)
    &level_simd128,
#else
    &level_scalar,
#endif
};
#define LEVEL_COUNT ((int)(sizeof LEVELS / sizeof *LEVELS))

/* Level number `index`, or NULL past the last. */
BN_API const level_t *bitnet_level(int index) { return index < LEVEL_COUNT ? LEVELS[index] : NULL; }
BN_API const char *bitnet_level_name(const level_t *level) { return level->name; }
BN_API const char *bitnet_level_device(const level_t *level) { return level->device; }
BN_API bool bitnet_level_runs(const level_t *level) { return level_runs(level); }
BN_API size_t bitnet_packed_bytes(const level_t *level, int64_t rows, int64_t columns, int64_t group, int64_t binary) {
    return level->packed_bytes(rows, columns, group, binary);
}
/* Whether the level reads weights in one bit. */
BN_API bool bitnet_one_bit(const level_t *level) { return level->operations[OP_BINARY_MATMUL].run != NULL; }
BN_API size_t bitnet_packed_scales(const level_t *level, int64_t rows, int64_t columns, int64_t group) {
    return level->packed_scales(rows, columns, group);
}

/* Sizes of the structures that native.py mirrors, for it to compare. */
BN_API size_t bitnet_op_size(void) { return sizeof(op_t); }
BN_API size_t bitnet_program_size(void) { return sizeof(program_t); }

BN_API void *bitnet_pages_alloc(size_t bytes) { return pages_alloc(bytes); }
BN_API void bitnet_pages_free(void *pages, size_t bytes) { pages_free(pages, bytes); }
BN_API pool_t *bitnet_pool_new(int threads) { return pool_new(threads); }
BN_API void bitnet_pool_delete(pool_t *pool) { pool_delete(pool); }

typedef struct {
    const level_t *level;
    pool_t *pool;
    pack_t job;
} packing_t;

static void pack_job(void *argument, int thread) {
    const packing_t *p = argument;
    p->level->pack(p->pool, &p->job, thread);
}

/* Repack TernaryData, its scales too where there are several. */
BN_API void bitnet_pack(const level_t *level, pool_t *pool, const pack_t *job) {
    packing_t p = {level, pool, *job};
    pool_run(pool, pack_job, &p, true);
}

BN_API size_t bitnet_head_bytes(const level_t *level, int64_t rows, int64_t columns) {
    return level->head_bytes(rows, columns);
}

typedef struct {
    const level_t *level;
    pool_t *pool;
    head_pack_t job;
} head_packing_t;

static void head_pack_job(void *argument, int thread) {
    const head_packing_t *p = argument;
    p->level->head_pack(p->pool, &p->job, thread);
}

/* Store the weights of `dense` compactly in the arrays that `head` points to; false without memory. */
BN_API bool bitnet_head_pack(
    const level_t *level, pool_t *pool, int threads, const dense_matmul_op_t *dense, const head_sample_op_t *head) {
    const size_t bytes = level->head_pack_scratch(dense->x.columns, threads);
    head_packing_t p = {
        level,
        pool,
        {
            .weight = dense->weight,
            .type = dense->type,
            .rows = dense->out.columns,
            .columns = dense->x.columns,
            .codes = (uint8_t *)head->codes,
            .step = (float *)head->step,
            .chunk_step = (float *)head->chunk_step,
            .chunk_norm = (float *)head->chunk_norm,
            .column = (float *)head->column,
            .offset = (float *)head->offset,
            .squares = pages_alloc(bytes),
        },
    };
    if (!p.job.squares) return false;
    pool_run(pool, head_pack_job, &p, true);
    pages_free(p.job.squares, bytes);
    return true;
}

typedef struct {
    const level_t *level;
    pool_t *pool;
    const uint8_t *data; /* of a read */
    int64_t bytes, ahead; /* of a read */
    int64_t turns; /* of int8 products */
    _Atomic int64_t done;
} probe_t;

static void probe_job(void *argument, int thread) {
    probe_t *p = argument;
    int32_t result = 0;
    if (p->data)
        p->done += (int64_t)p->level->probe_read(p->pool, p->data, p->bytes, p->ahead, thread);
    else
        p->done += p->level->probe_int8(p->turns, &result);
}

/* Read every whole MiB of a buffer on all threads, prefetching `ahead` bytes; returns their sum as 64-bit words. */
BN_API int64_t bitnet_probe_read(
    const level_t *level, pool_t *pool, const uint8_t *data, int64_t bytes, int64_t ahead) {
    probe_t p = {.level = level, .pool = pool, .data = data, .bytes = bytes, .ahead = ahead};
    pool_run(pool, probe_job, &p, true);
    return p.done;
}

/* Multiply-add int8 in registers on all threads; returns the number of products. */
BN_API int64_t bitnet_probe_int8(const level_t *level, pool_t *pool, int64_t turns) {
    probe_t p = {.level = level, .pool = pool, .turns = turns};
    pool_run(pool, probe_job, &p, true);
    return p.done;
}

/* Weights that a thread reads next. */
typedef struct {
    _Alignas(128) stretch_t soon;
} ahead_t;

typedef struct {
    run_t run;
    const level_t *level;
    ahead_t *ahead; /* of each thread */
    int32_t *step; /* own copy of the step buffer, which decode steps advance */
    int32_t *tokens; /* where this run's samples go */
    int32_t count;
    bool exact; /* all logits are computed, not those that a compact head leaves in doubt */
    int launched[OP_KINDS], launched_count; /* kinds, in first-launch order */
    double products; /* with ternary weights, of a token */
    size_t shared_total, scratch_total;
} executable_t;

BN_API void bitnet_executable_delete(executable_t *e) {
    free(e->step);
    if (e->ahead) pages_free(e->ahead, (size_t)e->run.threads * sizeof *e->ahead);
    if (e->run.shared) pages_free(e->run.shared, e->shared_total);
    if (e->run.scratch) pages_free(e->run.scratch, e->scratch_total);
    free(e);
}

/* `program` is copied, what it points to is not. NULL without memory. */
BN_API executable_t *bitnet_executable_new(const level_t *level, pool_t *pool, int threads, const program_t *program) {
    executable_t *e = calloc(1, sizeof *e);
    if (!e) return NULL;
    e->level = level;
    e->run.pool = pool;
    e->run.threads = threads;
    e->run.multipliers_are_few = multipliers_are_few();
    e->run.program = *program;
    size_t shared = 0, scratch = 0;
    for (int32_t i = 0; i < program->op_count; i++) {
        const operation_t *operation = &level->operations[program->ops[i].kind];
        const int32_t kind = program->ops[i].kind;
        if (kind == OP_TERNARY_MATMUL || kind == OP_GROUP_MATMUL || kind == OP_BINARY_MATMUL) {
            const ternary_matmul_op_t *o = &program->ops[i].ternary_matmul;
            e->products += (double)o->x.columns * o->out.columns;
        }
        if (kind == OP_EXPERT_MATMUL) {
            const expert_matmul_op_t *o = &program->ops[i].expert_matmul;
            const double rows = o->shares.data ? 1.0 : o->ids.columns; /* that share the columns of x */
            e->products += (double)o->x.columns * rows * o->each;
        }
        if (!operation->need) continue;
        const need_t need = operation->need(&e->run, &program->ops[i]);
        if (need.shared > shared) shared = need.shared;
        if (need.scratch > scratch) scratch = need.scratch;
    }
    /* A cache line apart, so that threads do not share one; readers may run a vector past the end. */
    e->run.shared_bytes = shared;
    e->run.scratch_bytes = aligned_bytes(scratch + 128, 1);
    e->shared_total = shared + 128;
    e->scratch_total = e->run.scratch_bytes * (size_t)threads + 128;
    e->run.shared = pages_alloc(e->shared_total);
    e->run.scratch = pages_alloc(e->scratch_total);
    e->ahead = pages_alloc((size_t)threads * sizeof *e->ahead);
    e->step = calloc((size_t)program->step.words, sizeof *e->step);
    if (e->run.shared && e->run.scratch && e->ahead && e->step) return e;
    bitnet_executable_delete(e);
    return NULL;
}

/* Bytes of scratch the executable holds. */
BN_API size_t bitnet_executable_bytes(const executable_t *e) { return e->shared_total + e->scratch_total; }

static void view_step(executable_t *e) {
    const step_layout_t *at = &e->run.program.step;
    const int32_t *words = e->step;
    e->run.step = (step_t){
        .tokens = words[STEP_TOKENS],
        .seqs = words[STEP_SEQS],
        .rows = words[STEP_ROWS],
        .token = words + at->tokens,
        .token_seq = words + at->token_seq,
        .seq_begin = words + at->seq_begin,
        .seq_len = words + at->seq_len,
        .row = words + at->rows,
        .temperature = (const float *)(words + at->temperature),
        .top_k = words + at->top_k,
        .top_p = (const float *)(words + at->top_p),
        .min_p = (const float *)(words + at->min_p),
        .seed_lo = (const uint32_t *)(words + at->seed_lo),
        .seed_hi = (const uint32_t *)(words + at->seed_hi),
        .adjust = words[STEP_ADJUST] != 0,
        .logprobs = words[STEP_LOGPROBS] ? 2 * words[STEP_LOGPROBS] - 1 : 0,
        .slot = words + at->slot,
        .repetition = (const float *)(words + at->repetition),
        .presence = (const float *)(words + at->presence),
        .frequency = (const float *)(words + at->frequency),
        .block_table = words + at->block_table,
        .state_from = words + at->state_from,
        .state_to = words + at->state_to,
    };
}

/* Whether a step's logits are all computed: the host reads them, or their log-probabilities need them. */
static bool needs_all_logits(const executable_t *e) {
    const program_t *program = &e->run.program;
    if (e->step[STEP_LOGITS] || program->op_count == 0) return e->step[STEP_LOGITS];
    const op_t *last = &program->ops[program->op_count - 1];
    const bool few = last->kind != OP_HEAD_SAMPLE || last->head_sample.dense->dense_matmul.out.columns < HEAD_REPORTED_TOKENS;
    return e->step[STEP_LOGPROBS] && (few || program->deterministic || e->run.step.rows > HEAD_CHECKED_ROWS);
}

static void record_launch(executable_t *e, int kind) {
    for (int i = 0; i < e->launched_count; i++)
        if (e->launched[i] == kind) return;
    e->launched[e->launched_count++] = kind;
}

/* Keep the tokens just sampled, and make them the input of the next step. */
static void advance(executable_t *e, const int32_t *sampled, int32_t turn) {
    const step_layout_t *at = &e->run.program.step;
    memcpy(e->tokens + (int64_t)turn * e->run.step.rows, sampled, (size_t)e->run.step.rows * sizeof *sampled);
    if (turn + 1 == e->count) return;
    e->run.logprobs += (int64_t)e->run.step.rows * e->run.step.logprobs;
    for (int32_t s = 0; s < e->run.step.seqs; s++) {
        e->step[at->tokens + s] = sampled[s] < 0 ? 0 : sampled[s];
        e->step[at->seq_len + s]++;
        e->step[at->state_from + s] = e->step[at->state_to + s];
    }
}

static void run_op(executable_t *e, const op_t *op, int thread) {
    if (thread == 0) record_launch(e, op->kind);
    e->level->operations[op->kind].run(&e->run, op, thread);
    pool_barrier_fetching(e->run.pool, thread, &e->ahead[thread].soon);
}

#define FETCH_AHEAD ((ptrdiff_t)256 << 10) /* part of a second-level cache of a megabyte or more */

/* With few tokens, reading weights waits for memory: those of the next operation that has any are
 * prefetched while this thread waits for others. */
static void look_ahead(executable_t *e, int32_t next, int thread) {
    stretch_t *soon = &e->ahead[thread].soon;
    *soon = (stretch_t){0};
    const program_t *program = &e->run.program;
    if (e->run.step.tokens > 16 || e->run.threads == 1) return;
    for (; next < program->op_count; next++) {
        const operation_t *operation = &e->level->operations[program->ops[next].kind];
        if (!operation->begins) continue;
        *soon = operation->begins(&e->run, &program->ops[next], thread);
        if (soon->end - soon->next > FETCH_AHEAD) soon->end = soon->next + FETCH_AHEAD;
        return;
    }
}

static void run_job(void *argument, int thread) {
    executable_t *e = argument;
    const program_t *program = &e->run.program;
    look_ahead(e, 0, thread);
    for (int32_t turn = 0; turn < e->count; turn++)
        for (int32_t i = 0; i < program->op_count; i++) {
            const op_t *op = &program->ops[i];
            if (e->level->operations[op->kind].begins) look_ahead(e, i + 1, thread);
            if (op->kind == OP_HEAD_SAMPLE && e->exact) {
                if (thread == 0) e->run.scored += op->head_sample.dense->dense_matmul.out.columns;
                run_op(e, op->head_sample.dense, thread);
                op = op->head_sample.sample;
            }
            run_op(e, op, thread);
            const op_t *sample = op->kind == OP_HEAD_SAMPLE ? op->head_sample.sample : op;
            if (sample->kind != OP_SAMPLE || i + 1 != program->op_count) continue;
            if (thread == 0) advance(e, sample->sample.out, turn);
            if (turn + 1 < e->count) pool_barrier(e->run.pool, thread);
        }
}

#define LONG_STEP 1e11 /* products that take some tenths of a second */

/* Run the program `count` times; `tokens` gets int32[count, R] where it ends in a sample, and `logprobs` int32[count, R, words]
 * where the step asks for them. Where it says that nobody reads the logits, those that a compact head stands for hold approximate
 * scores afterwards. */
BN_API void bitnet_executable_run(
    executable_t *e, const int32_t *step, int32_t count, int32_t *tokens, int32_t *logprobs) {
    memcpy(e->step, step, (size_t)e->run.program.step.words * sizeof *step);
    view_step(e);
    e->count = count;
    e->tokens = tokens;
    e->run.logprobs = logprobs;
    e->exact = needs_all_logits(e);
    e->run.scored = 0;
    pool_run(e->run.pool, run_job, e, (double)e->run.step.tokens * e->products > LONG_STEP);
}

/* Rows of a compactly stored head that the last run read in full, over all its turns. */
BN_API int64_t bitnet_executable_scored(const executable_t *e) { return e->run.scored; }

/* Whether the last run computed all logits without a compact head. */
BN_API bool bitnet_executable_exact(const executable_t *e) { return e->exact; }

/* Name of the kernel launched `index`-th for the first time, or NULL past the last. */
BN_API const char *bitnet_executable_kernel(const executable_t *e, int index) {
    return index < e->launched_count ? e->level->operations[e->launched[index]].kernel : NULL;
}
