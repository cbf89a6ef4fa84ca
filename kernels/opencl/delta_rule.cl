// The gated delta rule, token by token. A work-group COLUMNS columns of a head's matrix, through all tokens of a sequence: they depend on
// no other columns. PARTS work-items share the rows of a column, which they keep in registers, so that a step reads and writes the
// state once. The norms of q and k are factors, found with the first sums. What the next token brings is fetched while one is computed.
#define ROWS ((D_K + PARTS - 1) / PARTS)
#define WIDTH (2 * K_HEADS * D_K + HEADS * D_V)

kernel __attribute__((reqd_work_group_size(COLUMNS *PARTS, 1, 1))) void delta_rule(
    global const int *step, int seq_begin, int state_from, int state_to, global const float *qkv, global const float *gates,
    global float *state, global float *out, float eps) {
    local float found[PARTS][COLUMNS], result[PARTS][COLUMNS];
    local float2 norms[PARTS];
    int column = get_local_id(0) % COLUMNS, part = get_local_id(0) / COLUMNS;
    int c = get_group_id(0) * COLUMNS + column, h = get_group_id(1), seq = get_group_id(2);
    int there = seq < STEP_SEQS(step);  // not a return: see norm_rows.cl
    int begin = there ? step[seq_begin + seq] : 0, end = there ? step[seq_begin + seq + 1] : 0;
    int source = there ? STATE_SOURCE(step, state_from, state_to, seq) : -1, inside = there && c < D_V;
    int k_head = TILED ? h % K_HEADS : h / (HEADS / K_HEADS);
    float s[ROWS], k[ROWS], q[ROWS];
    float next_k[ROWS], next_q[ROWS], next_value, next_decay, next_strength;
#define FETCH(m)                                                                                                                  \
    {                                                                                                                             \
        global const float *tokens = qkv + (size_t)(m) * WIDTH, *queries = tokens + k_head * D_K, *keys = queries + K_HEADS * D_K;       \
        UNROLL                                                                                                                    \
        for (int i = 0; i < ROWS; i++) {                                                                                          \
            int row = i * PARTS + part;                                                                                           \
            next_q[i] = row < D_K ? queries[row] : 0.0f;                                                                          \
            next_k[i] = row < D_K ? keys[row] : 0.0f;                                                                             \
        }                                                                                                                         \
        next_value = inside ? tokens[2 * K_HEADS * D_K + h * D_V + c] : 0.0f;                                                     \
        next_decay = gates[(size_t)(m) * 2 * HEADS + h], next_strength = gates[(size_t)(m) * 2 * HEADS + HEADS + h];              \
    }
    FETCH(begin)
    UNROLL
    for (int i = 0; i < ROWS; i++) {
        int row = i * PARTS + part;
        int held = inside && row < D_K && source >= 0;
        s[i] = held ? state[(((size_t)source * HEADS + h) * D_K + row) * D_V + c] : 0.0f;
    }
    for (int m = begin; m < end; m++) {
        float sum = 0.0f;
        float2 squares = (float2)(0.0f, 0.0f);
        UNROLL
        for (int i = 0; i < ROWS; i++) {
            q[i] = next_q[i], k[i] = next_k[i];
            squares += (float2)(q[i] * q[i], k[i] * k[i]);
            sum += k[i] * s[i];
        }
        float value = next_value, decay = exp(next_decay), strength = next_strength;
        if (m + 1 < end) FETCH(m + 1)
        found[part][column] = sum;
        if (column == 0) norms[part] = squares;
        barrier(CLK_LOCAL_MEM_FENCE);
        sum = 0.0f;
        squares = (float2)(0.0f, 0.0f);
        UNROLL
        for (int p = 0; p < PARTS; p++) {
            sum += found[p][column];
            squares += norms[p];
        }
        float of_q = 1.0f / sqrt((squares.x + eps) * D_K), of_k = 1.0f / sqrt(squares.y + eps);
        float change = strength * (value - decay * (of_k * sum)) * of_k;
        sum = 0.0f;
        UNROLL
        for (int i = 0; i < ROWS; i++) {
            s[i] = decay * s[i] + k[i] * change;
            sum += q[i] * s[i];
        }
        result[part][column] = sum;
        barrier(CLK_LOCAL_MEM_FENCE);
        if (part == 0 && inside) {
            sum = 0.0f;
            for (int p = 0; p < PARTS; p++) sum += result[p][column];
            out[((size_t)m * HEADS + h) * D_V + c] = sum * of_q;
        }
    }
    if (!inside) return;
    UNROLL
    for (int i = 0; i < ROWS; i++) {
        int row = i * PARTS + part;
        if (row < D_K) state[(((size_t)step[state_to + seq] * HEADS + h) * D_K + row) * D_V + c] = s[i];
    }
}
