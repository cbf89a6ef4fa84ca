/*
 * A compiled program, built by bitnet/core/cpu/native.py, whose ctypes structures mirror these field by field.
 *
 * Rows of a matrix begin at multiples of 64 bytes; the padding between `columns` and `stride` is always zero.
 */
#ifndef BN_PROGRAM_H
#define BN_PROGRAM_H

#include <stdint.h>

typedef struct {
    void *data;
    int32_t columns, stride; /* in elements */
} matrix_t;

enum op_kind {
    OP_EMBED,
    OP_NORM_QUANT,
    OP_TERNARY_MATMUL,
    OP_ROPE_APPEND,
    OP_ATTENTION,
    OP_GLU_NORM_QUANT,
    OP_NORM_ROWS,
    OP_DENSE_MATMUL,
    OP_SAMPLE,
    OP_QUANTIZE,
    OP_HEAD_SAMPLE,
    OP_GROUP_MATMUL,
    OP_TABLE_EMBED,
    OP_TABLE_MATMUL,
    OP_ADD_BIAS,
    OP_CENTER_ROWS,
    OP_CAUSAL_CONV,
    OP_DELTA_GATES,
    OP_DELTA_RULE,
    OP_GATED_QUANT,
    OP_ROUTE,
    OP_EXPERT_MATMUL,
    OP_NORM_TOKENS,
    OP_BINARY_MATMUL,
    OP_KINDS
};

/* A Walsh-Hadamard transform of a row. */
typedef struct {
    const float *signs; /* of the whole row, or NULL */
    int32_t block, pad; /* elements; 0: no transform */
} transform_t;

/* A state of the sequences, which the operation lays out as it likes. */
typedef struct {
    float *data;
    int64_t entry; /* elements of one */
} state_t;

/* How a dense matrix is stored: floats, or blocks of GGUF's types. */
enum weight_type { WEIGHT_F32, WEIGHT_F16, WEIGHT_Q8_0, WEIGHT_Q4_0, WEIGHT_Q6_K, WEIGHT_Q4_K };

/* Where the digits of a ternary block's columns are: the byte of each, and the factor that, modulo 256, moves it to the top. */
typedef struct {
    int32_t columns, size; /* of a block, the size in bytes */
    int32_t scale_at; /* byte of the IEEE half that is its scale */
    int32_t base; /* 2: digits are -1 and +1; 3 or 4: they are -1, 0 and +1 */
    uint8_t place[256], factor[256];
} code_blocks_t;

typedef struct {
    const void *table; /* [V, D] */
    int32_t type, pad;
    matrix_t out;
    transform_t transform;
    const code_blocks_t *blocks; /* of a ternary table, which has no `type`; or NULL */
} embed_op_t;

typedef struct {
    matrix_t x;
    const float *weight; /* or NULL */
    float eps;
    int32_t pad;
    matrix_t out;
    float *scale;
    transform_t transform;
} norm_quant_op_t;

/* One of the matrices stacked along N, repacked by the level's `pack`. */
typedef struct {
    const uint8_t *codes;
    const uint16_t *scales; /* of groups of columns: [panels][groups][PANEL_ROWS], the bits of IEEE halves; or NULL */
    int32_t rows;
    float scale; /* of all columns, where `scales` is NULL */
    const uint8_t *unpacked; /* of a ternary_matmul: its rows in the packing of TernaryData, while `codes` are not packed; or NULL */
} ternary_part_t;

/* ternary_matmul, group_matmul and binary_matmul. */
typedef struct {
    matrix_t x;
    const float *scale;
    const ternary_part_t *parts;
    int32_t part_count, add;
    matrix_t out;
    int32_t group;  /* columns that share a scale, which divide those of x; 0: all */
    int32_t binary; /* whether the weights are packed in one bit each */
} ternary_matmul_op_t;

/* embed and dense_matmul of a ternary table, in groups of `group` columns. */
typedef struct {
    ternary_part_t table;
    int32_t group, pad;
    matrix_t out;
    transform_t transform;
} table_embed_op_t;

typedef struct {
    matrix_t x;
    ternary_part_t table;
    int32_t group, pad;
    matrix_t out;
} table_matmul_op_t;

/* One layer of the cache. Keys stand transposed, so that a vector is one element of neighbouring positions:
 * k[block][kv head][element][position], v[block][kv head][position][element], with the strides of kv_t. The codes of a
 * head of an i8 cache are followed by a scale for each position. A block's layers stand side by side, so that a short
 * sequence uses few pages. */
typedef struct {
    void *k, *v;
} kv_layer_t;

typedef struct {
    matrix_t qkv;
    kv_layer_t layer;
    const float *cosine, *sine; /* [positions, rotated / 2] */
    int32_t heads, kv_heads, head_dim, interleaved;
    const float *q_norm, *k_norm; /* [head_dim], or NULL */
    float eps;
    int32_t rotated; /* elements of a head, from its first on */
    int32_t table;   /* words from the first block table to this layer's */
    int32_t norms_last; /* the norms come after the rotation */
} rope_append_op_t;

typedef struct {
    matrix_t qkv, out;
    kv_layer_t layer;
    int32_t heads, kv_heads, head_dim, window; /* window: positions that a token sees; 0: all */
    int32_t table;                              /* words from the first block table to this layer's */
} attention_op_t;

enum activation { ACTIVATION_RELU2, ACTIVATION_SILU, ACTIVATION_GELU };

typedef struct {
    matrix_t gate_up;
    const float *weight; /* or NULL */
    float eps;
    int32_t activation;
    matrix_t out;
    matrix_t scale; /* of each part */
    transform_t transform;
    int32_t parts; /* rows side by side */
    float clamp; /* of gates and values; 0: none */
} glu_norm_quant_op_t;

typedef struct {
    matrix_t x;
    const float *weight;
    float eps;
    int32_t pad;
    matrix_t out;
    transform_t transform;
} norm_rows_op_t;

typedef struct {
    matrix_t x;
    const float *bias;
} add_bias_op_t;

typedef struct {
    matrix_t x, out;
} center_rows_op_t;

typedef struct {
    matrix_t x, out;
    const float *weight;
    float eps;
    int32_t add;
} norm_tokens_op_t;

typedef struct {
    matrix_t x, out;
    const float *weight; /* [taps, C]: transposed */
    state_t state; /* [taps - 1, C] */
    int32_t taps, pad;
} causal_conv_op_t;

typedef struct {
    matrix_t x, out;
    const float *weight, *alpha, *beta, *bias, *rate;
    float eps;
    int32_t heads;
} delta_gates_op_t;

typedef struct {
    matrix_t qkv, gates, out;
    state_t state; /* as delta_rule.h says */
    int32_t k_heads, v_heads, d_k, d_v;
    float eps;
    int32_t tiled;
} delta_rule_op_t;

typedef struct {
    matrix_t x, gate, out;
    const float *weight; /* [head_dim], or NULL */
    float *scale;
    float eps;
    int32_t head_dim, silu, untile; /* silu: else sigmoid */
    transform_t transform;
} gated_quant_op_t;

typedef struct {
    matrix_t x, ids, shares;
    const float *weight, *router; /* [K], [experts, K] */
    float eps;
    int32_t experts;
} route_op_t;

/* The rows of an expert's matrices are those of `parts`; each expert's are packed apart, one after the other. */
typedef struct {
    matrix_t x, scale, ids, shares; /* shares: no data where results stand side by side */
    const ternary_part_t *parts;
    int32_t part_count, experts;
    matrix_t out;
    int32_t group, each; /* columns that share a scale, 0: all; rows of an expert's matrices */
} expert_matmul_op_t;

typedef struct {
    matrix_t x;
    const void *weight; /* [N, K] */
    int32_t type, pad;
    matrix_t out;
} dense_matmul_op_t;

/* marks and biases, [slots][V], adjust the logits of rows that name a slot. */
typedef struct {
    matrix_t logits;
    int32_t *out;
    int32_t *marks;
    float *biases;
} sample_op_t;

typedef struct {
    matrix_t x;
    int32_t rows, pad;
    matrix_t codes;
    float *scale;
} quantize_op_t;

/* A dense_matmul and the sample that takes its logits, in one: head_layout.h describes the compact weights. */
#define HEAD_CHECKED_ROWS 16 /* maximum rows of logits of a step that are checked by rows of the head: more share all logits */
#define HEAD_REPORTED_TOKENS 32768 /* minimum tokens of a vocabulary whose log-probabilities do without all logits */
typedef struct {
    const struct op *dense, *sample;
    const uint8_t *codes;
    const float *step, *chunk_step, *chunk_norm, *column, *offset; /* [N], [N / 64], [N / 64], [K], [K] */
} head_sample_op_t;

typedef struct op {
    int32_t kind, pad;
    union {
        embed_op_t embed;
        norm_quant_op_t norm_quant;
        ternary_matmul_op_t ternary_matmul;
        rope_append_op_t rope_append;
        attention_op_t attention;
        glu_norm_quant_op_t glu_norm_quant;
        norm_rows_op_t norm_rows;
        dense_matmul_op_t dense_matmul;
        sample_op_t sample;
        quantize_op_t quantize;
        head_sample_op_t head_sample;
        table_embed_op_t table_embed;
        table_matmul_op_t table_matmul;
        add_bias_op_t add_bias;
        center_rows_op_t center_rows;
        norm_tokens_op_t norm_tokens;
        causal_conv_op_t causal_conv;
        delta_gates_op_t delta_gates;
        delta_rule_op_t delta_rule;
        gated_quant_op_t gated_quant;
        route_op_t route;
        expert_matmul_op_t expert_matmul;
    };
} op_t;

enum kv_type { KV_F32, KV_F16, KV_I8 };

/* Strides of the cache, in elements: of an element row among keys, a position among values, a block, and a head. */
typedef struct {
    int32_t type, block_size, k_stride, v_stride;
    int64_t block, k_head, v_head;
} kv_t;

typedef struct {
    int32_t max_tokens, max_seqs, max_rows, max_blocks;
} limits_t;

#define MAX_LOGPROBS 20 /* likeliest tokens */

/* Words of a step's header: tokens (M), sequences (S), rows (R), one that is not used here, whether logits are read,
 * whether a row's are adjusted, and 1 and how many likeliest tokens' log-probabilities are reported with the chosen ones'. */
enum { STEP_TOKENS, STEP_SEQS, STEP_ROWS, STEP_DONE, STEP_LOGITS, STEP_ADJUST, STEP_LOGPROBS };

/* Word offsets in the step buffer: bitnet.core.hal.step.StepLayout. */
typedef struct {
    int32_t words;
    int32_t tokens, token_seq, seq_begin, seq_len, rows;
    int32_t temperature, top_k, top_p, min_p, seed_lo, seed_hi, slot, repetition, presence, frequency, block_table;
    int32_t state_from, state_to;
} step_layout_t;

typedef struct {
    const op_t *ops;
    int32_t op_count, deterministic;
    kv_t kv;
    limits_t limits;
    step_layout_t step;
} program_t;

#endif
