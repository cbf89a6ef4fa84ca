/*
 * Every operation, for the instruction set this file is compiled with. LEVEL names it (build.toml).
 */
#include "level.h"
#include "vec.h"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

#if defined(__AMX_INT8__)
#define DEVICE "amx"
#include "tile_vbmi.h"
#elif defined(__AVX512VBMI__)
#define DEVICE "avx512"
#include "tile_vbmi.h"
#elif defined(__AVX512VNNI__)
#define DEVICE "avx512"
#include "tile_avx512.h"
#elif defined(__AVX2__)
#define DEVICE "avx2"
#include "tile_avx2.h"
#elif defined(__ARM_FEATURE_DOTPROD)
#define DEVICE "neon"
#include "tile_neon.h"
#elif defined(__wasm_simd128__)
#define DEVICE "simd128"
#include "tile_simd128.h"
#else
#define DEVICE "scalar"
#include "tile_portable.h"
#endif

#if defined(RELAXED)
#define NAME "relaxed_" TEXT(LEVEL)
#else
#define NAME TEXT(LEVEL)
#endif

#include "add_bias.h"
#include "attention.h"
#include "causal_conv.h"
#include "center_rows.h"
#include "delta_gates.h"
#include "delta_rule.h"
#include "dense_matmul.h"
#include "embed.h"
#include "expert_matmul.h"
#include "gated_quant.h"
#include "glu_norm_quant.h"
#include "head_sample.h"
#include "norm_quant.h"
#include "norm_rows.h"
#include "norm_tokens.h"
#include "probe.h"
#include "quantize.h"
#include "rope_append.h"
#include "route.h"
#include "sample.h"
#include "binary_matmul.h"
#include "ternary_matmul.h"
#include "ternary_table.h"

#define OPERATION(name, need) {#name "_" NAME, name, need, NULL}
#define STREAMING(name) {#name "_" NAME, name, name##_need, name##_begins}

const level_t JOIN(level_, LEVEL) = {
    .name = NAME,
    .device = DEVICE,
    .packed_bytes = packed_bytes,
    .packed_scales = packed_scales,
    .pack = pack,
    .head_bytes = head_bytes,
    .head_pack_scratch = head_pack_scratch,
    .head_pack = head_pack,
    .probe_read = probe_read,
    .probe_int8 = probe_int8,
    .operations =
        {
            [OP_EMBED] = OPERATION(embed, NULL),
            [OP_NORM_QUANT] = OPERATION(norm_quant, norm_quant_need),
            [OP_TERNARY_MATMUL] = STREAMING(ternary_matmul),
            [OP_ROPE_APPEND] = OPERATION(rope_append, NULL),
            [OP_ATTENTION] = OPERATION(attention, attention_need),
            [OP_GLU_NORM_QUANT] = OPERATION(glu_norm_quant, glu_norm_quant_need),
            [OP_NORM_ROWS] = OPERATION(norm_rows, NULL),
            [OP_DENSE_MATMUL] = OPERATION(dense_matmul, NULL),
            [OP_SAMPLE] = OPERATION(sample, sample_need),
            [OP_QUANTIZE] = OPERATION(quantize, quantize_need),
            [OP_HEAD_SAMPLE] = STREAMING(head_sample),
            [OP_GROUP_MATMUL] = OPERATION(group_matmul, group_matmul_need),
            [OP_TABLE_EMBED] = OPERATION(table_embed, NULL),
            [OP_TABLE_MATMUL] = STREAMING(table_matmul),
            [OP_ADD_BIAS] = OPERATION(add_bias, NULL),
            [OP_CENTER_ROWS] = OPERATION(center_rows, NULL),
            [OP_CAUSAL_CONV] = OPERATION(causal_conv, NULL),
            [OP_DELTA_GATES] = OPERATION(delta_gates, delta_gates_need),
            [OP_DELTA_RULE] = OPERATION(delta_rule, delta_rule_need),
            [OP_GATED_QUANT] = OPERATION(gated_quant, gated_quant_need),
            [OP_ROUTE] = OPERATION(route, route_need),
            [OP_EXPERT_MATMUL] = OPERATION(expert_matmul, expert_matmul_need),
            [OP_NORM_TOKENS] = OPERATION(norm_tokens, NULL),
#ifdef ONE_BIT
            [OP_BINARY_MATMUL] = OPERATION(binary_matmul, binary_matmul_need),
#endif
        },
};
