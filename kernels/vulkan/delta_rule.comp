// The gated delta rule, token by token. A work-group COLUMNS columns of a head's matrix, through all tokens of a sequence: they depend on
// no other columns. PARTS invocations share the rows of a column, which they keep in registers, so that a step reads and writes the
// state once. The norms of q and k are factors, found with the first sums. Each product with q has its factor, as a
// device may flush to zero the smaller product without it.
layout(constant_id = 1) const int D_K = 128;
layout(constant_id = 2) const int D_V = 128;
layout(constant_id = 3) const int HEADS = 2;
layout(constant_id = 4) const int K_HEADS = 1;
layout(constant_id = 5) const int TILED = 0;
layout(constant_id = 6) const int COLUMNS = 32;
layout(constant_id = 7) const int PARTS = 4;
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, float, qkv);
BUFFER(2, readonly, float, gates);
BUFFER(3, , float, state);
BUFFER(4, writeonly, float, result);
layout(push_constant) uniform Push { int seq_begin, state_from, state_to; float eps; };
#include "states.glsl"

const int ROWS = (D_K + PARTS - 1) / PARTS;
const int WIDTH = 2 * K_HEADS * D_K + HEADS * D_V;
shared float keyed[PARTS * COLUMNS];    // each part's sum of k with the state
shared float queried[PARTS * COLUMNS];  // and of q
shared vec2 norms[PARTS];

KERNEL(delta_rule) {
    int lane = int(gl_LocalInvocationID.x), column = lane % COLUMNS, part = lane / COLUMNS;
    int c = int(gl_WorkGroupID.x) * COLUMNS + column, h = int(gl_WorkGroupID.y), seq = int(gl_WorkGroupID.z);
    if (seq >= STEP_SEQS) return;
    int end = step_data[seq_begin + seq + 1], source = state_source(seq);
    int k_head = TILED != 0 ? h % K_HEADS : h / (HEADS / K_HEADS);
    uint from = uint(max(source, 0) * HEADS + h) * D_K, to = uint(step_data[state_to + seq] * HEADS + h) * D_K;
    bool inside = c < D_V;
    float s[ROWS], k[ROWS], q[ROWS];
    [[unroll]] for (int i = 0; i < ROWS; i++) {
        int row = i * PARTS + part;
        s[i] = inside && row < D_K && source >= 0 ? state[(from + row) * D_V + c] : 0.0;
    }
    for (int m = step_data[seq_begin + seq]; m < end; m++) {
        uint queries = uint(m) * WIDTH + k_head * D_K, keys = queries + K_HEADS * D_K, gate = uint(m) * 2 * HEADS + h;
        float sum = 0.0;
        vec2 squares = vec2(0.0);
        [[unroll]] for (int i = 0; i < ROWS; i++) {
            int row = i * PARTS + part;
            q[i] = row < D_K ? qkv[queries + row] : 0.0;
            k[i] = row < D_K ? qkv[keys + row] : 0.0;
            squares += vec2(q[i] * q[i], k[i] * k[i]);
            sum += k[i] * s[i];
        }
        keyed[lane] = sum;
        if (column == 0) norms[part] = squares;
        barrier();
        sum = 0.0;
        squares = vec2(0.0);
        [[unroll]] for (int p = 0; p < PARTS; p++) {
            sum += keyed[p * COLUMNS + column];
            squares += norms[p];
        }
        float of_q = 1.0 / sqrt((squares.x + eps) * float(D_K)), of_k = 1.0 / sqrt(squares.y + eps);
        float decay = exp(gates[gate]), strength = gates[gate + HEADS];
        float value = inside ? qkv[uint(m) * WIDTH + 2 * K_HEADS * D_K + h * D_V + c] : 0.0;
        float change = strength * (value - decay * (of_k * sum)) * of_k;
        sum = 0.0;
        [[unroll]] for (int i = 0; i < ROWS; i++) {
            s[i] = decay * s[i] + k[i] * change;
            sum += q[i] * of_q * s[i];
        }
        queried[lane] = sum;
        barrier();
        if (part == 0 && inside) {
            sum = 0.0;
            for (int p = 0; p < PARTS; p++) sum += queried[p * COLUMNS + column];
            result[(uint(m) * HEADS + h) * D_V + c] = sum;
        }
    }
    if (!inside) return;
    [[unroll]] for (int i = 0; i < ROWS; i++) {
        int row = i * PARTS + part;
        if (row < D_K) state[(to + row) * D_V + c] = s[i];
    }
}
