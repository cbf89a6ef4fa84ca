#version 450
// Put in front of every kernel here.
// Numbers a kernel is compiled for are specialisation constants, so that one SPIR-V module serves every shape; what a
// device can do is a macro (SUBGROUPS, DOT, COOPMAT), so that a module asks for no capability that is not there.
// Memory is words of 32 bits or vectors of them: no 8- or 16-bit type is needed, and loads are as wide as they can be.
#extension GL_EXT_control_flow_attributes : enable
#if SUBGROUPS
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_arithmetic : require
#extension GL_KHR_shader_subgroup_shuffle : require
#endif
#if DOT
#extension GL_EXT_spirv_intrinsics : require
#endif
#if COOPMAT || MATRICES
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_EXT_shader_explicit_arithmetic_types_int8 : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#endif

layout(constant_id = 0) const int WG = 128;  // invocations of a work-group
layout(local_size_x_id = 0) in;

#define KERNEL(name) void main()
#define BUFFER(at, access, type, name) layout(std430, binding = at) access buffer Buffer_##name { type name[]; }

// F(0) F(1) ..., so that variables which F names by number stay in registers: drivers unroll loops only up to some length.
#define REPEAT_4(F) F(0) F(1) F(2) F(3)
#define REPEAT_8(F) REPEAT_4(F) F(4) F(5) F(6) F(7)
#define REPEAT_16(F) REPEAT_8(F) F(8) F(9) F(10) F(11) F(12) F(13) F(14) F(15)

// The step buffer's header: tokens (M), sequences (S), rows (R), decode steps done in this run.
#define STEP_TOKENS step_data[0]
#define STEP_SEQS step_data[1]
#define STEP_ROWS step_data[2]
#define STEP_DONE step_data[3]
#define STEP_LOGPROBS step_data[6]

#define INFINITY uintBitsToFloat(0x7F800000u)
const float QUANT_FLOOR = 1e-5;

// Sum and greatest over the work-group, the same in every invocation.
#if SUBGROUPS
layout(constant_id = 99) const int SUBGROUP = 32;  // invocations of one
const int SUBS = WG / SUBGROUP;
shared vec2 reduce_parts[SUBS];
// The subgroups' results are merged without another round of shuffles, which took three times as long (measurements: Vulkan).
vec2 group_sum_max(float sum, float largest) {
    sum = subgroupAdd(sum);
    largest = subgroupMax(largest);
    barrier();
    if (gl_SubgroupInvocationID == 0) reduce_parts[gl_SubgroupID] = vec2(sum, largest);
    barrier();
    vec2 all = reduce_parts[0];
    [[unroll]] for (int i = 1; i < SUBS; i++) all = vec2(all.x + reduce_parts[i].x, max(all.y, reduce_parts[i].y));
    return all;
}
#define LANE int(gl_SubgroupID * SUBGROUP + gl_SubgroupInvocationID)
#else
shared vec2 reduce_parts[WG];
vec2 group_sum_max(float sum, float largest) {
    int lane = int(gl_LocalInvocationID.x);
    barrier();
    reduce_parts[lane] = vec2(sum, largest);
    for (int n = WG; n > 1;) {
        int upper = (n + 1) / 2;
        barrier();
        if (lane + upper < n) {
            vec2 a = reduce_parts[lane], b = reduce_parts[lane + upper];
            reduce_parts[lane] = vec2(a.x + b.x, max(a.y, b.y));
        }
        n = upper;
    }
    barrier();
    return reduce_parts[0];
}
#define LANE int(gl_LocalInvocationID.x)
#endif

// Sum of four products of signed bytes, added to `sum`.
#if DOT
spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6018, 6019], id = 4450)
int packed_dot(int a, int b, spirv_literal int form);
int dot4(uint a, uint b, int sum) { return sum + packed_dot(int(a), int(b), 0); }
#else
int dot4(uint a, uint b, int sum) {
    int x = int(a), y = int(b);
    sum += bitfieldExtract(x, 0, 8) * bitfieldExtract(y, 0, 8);
    sum += bitfieldExtract(x, 8, 8) * bitfieldExtract(y, 8, 8);
    sum += bitfieldExtract(x, 16, 8) * bitfieldExtract(y, 16, 8);
    return sum + (x >> 24) * (y >> 24);
}
#endif

// Four weights' codes of a bit pair (0 the lowest) of a word, and the same as signed bytes: 0, 1, 2 become -1, 0, 1.
uint codes_of(uint word, int pair) { return (word >> (2 * pair)) & 0x03030303u; }
uint weights_of(uint word, int pair) { return ((codes_of(word, pair) | 0x80808080u) - 0x01010101u) ^ 0x80808080u; }

float max4(vec4 v) { return max(max(v.x, v.y), max(v.z, v.w)); }

// Factor of absmax quantisation. Vulkan's division may be off by 2.5 ulp, but ties at 127 have to be exact.
float quant_factor(float largest) { return largest == 127.0 ? 1.0 : 127.0 / largest; }

// Four numbers as bytes, to nearest even: at most 127 before rounding, they take the lowest bits of the sum with 1.5 * 2^23.
uint quantised(vec4 y) {
    precise vec4 rounded = y + 12582912.0;
    uvec4 q = floatBitsToUint(rounded);
    return bitfieldInsert(bitfieldInsert(bitfieldInsert(q.x, q.y, 8, 8), q.z, 16, 8), q.w, 24, 8);
}

// f32 to the bits of f16, to nearest even; how packHalf2x16 rounds is left to the device.
uint half_bits(float value) {
    uint bits = floatBitsToUint(value), sign = bits >> 16 & 0x8000u;
    bits &= 0x7FFFFFFFu;
    if (bits >= 0x47800000u) return sign | (bits > 0x7F800000u ? 0x7E00u : 0x7C00u);
    if (bits < 0x38800000u) return sign | floatBitsToUint(uintBitsToFloat(bits) + 0.5) - 0x3F000000u;
    return sign | (bits - 0x38000000u + 0xFFFu + (bits >> 13 & 1u)) >> 13;
}
uint half_pair(float a, float b) { return half_bits(a) | half_bits(b) << 16; }

// Position in its sequence of token m.
#define TOKEN_POSITION(m) \
    (step_data[seq_len + step_data[token_seq + m]] - step_data[seq_begin + step_data[token_seq + m] + 1] + m)
