// The gated delta rule, token by token. A threadgroup COLUMNS columns of a head's matrix, through all tokens of a sequence: they depend on
// no other columns. PARTS threads share the rows of a column, which they keep in registers, so that a step reads and writes the state
// once. The norms of q and k are factors, found with the first sums. Each product with q has its factor, as a
// device may flush to zero the smaller product without it.
#define ROWS ((D_K + PARTS - 1) / PARTS)
#define WIDTH (2 * K_HEADS * D_K + HEADS * D_V)

[[kernel, max_total_threads_per_threadgroup(COLUMNS *PARTS)]] void delta_rule(
    device const int *step [[buffer(0)]], constant int &seq_begin [[buffer(1)]], constant int &state_from [[buffer(2)]],
    constant int &state_to [[buffer(3)]], device const float *qkv [[buffer(4)]], device const float *gates [[buffer(5)]],
    device float *state [[buffer(6)]], device float *out [[buffer(7)]], constant float &eps [[buffer(8)]], PLACE) {
    threadgroup float found[PARTS][COLUMNS], result[PARTS][COLUMNS];
    threadgroup float2 norms[PARTS];
    int column = int(index) % COLUMNS, part = int(index) / COLUMNS;
    int c = int(group.x) * COLUMNS + column, h = int(group.y), seq = int(group.z);
    if (seq >= STEP_SEQS(step)) return;
    int begin = step[seq_begin + seq], end = step[seq_begin + seq + 1], source = STATE_SOURCE(step, state_from, state_to, seq);
    int k_head = TILED ? h % K_HEADS : h / (HEADS / K_HEADS);
    bool inside = c < D_V;
    float s[ROWS], k[ROWS], q[ROWS];
    for (int i = 0; i < ROWS; i++) {
        int row = i * PARTS + part;
        bool held = inside && row < D_K && source >= 0;
        s[i] = held ? state[((ulong(max(source, 0)) * HEADS + ulong(h)) * D_K + ulong(row)) * D_V + ulong(c)] : 0.0f;
    }
    for (int m = begin; m < end; m++) {
        device const float *tokens = qkv + ulong(m) * WIDTH, *queries = tokens + k_head * D_K, *keys = queries + K_HEADS * D_K;
        float sum = 0.0f;
        float2 squares = float2(0.0f, 0.0f);
        for (int i = 0; i < ROWS; i++) {
            int row = i * PARTS + part;
            q[i] = row < D_K ? queries[row] : 0.0f;
            k[i] = row < D_K ? keys[row] : 0.0f;
            squares += float2(q[i] * q[i], k[i] * k[i]);
            sum += k[i] * s[i];
        }
        found[part][column] = sum;
        if (column == 0) norms[part] = squares;
        GROUP_BARRIER;
        sum = 0.0f;
        squares = float2(0.0f, 0.0f);
        for (int p = 0; p < PARTS; p++) {
            sum += found[p][column];
            squares += norms[p];
        }
        float of_q = 1.0f / precise::sqrt((squares.x + eps) * float(D_K)), of_k = 1.0f / precise::sqrt(squares.y + eps);
        device const float *gate = gates + ulong(m) * 2 * HEADS + ulong(h);
        float decay = precise::exp(gate[0]), strength = gate[HEADS];
        float value = inside ? tokens[2 * K_HEADS * D_K + h * D_V + c] : 0.0f;
        float change = strength * (value - decay * (of_k * sum)) * of_k;
        sum = 0.0f;
        for (int i = 0; i < ROWS; i++) {
            s[i] = decay * s[i] + k[i] * change;
            sum += q[i] * of_q * s[i];
        }
        result[part][column] = sum;
        GROUP_BARRIER;
        if (part == 0 && inside) {
            sum = 0.0f;
            for (int p = 0; p < PARTS; p++) sum += result[p][column];
            out[(ulong(m) * HEADS + ulong(h)) * D_V + ulong(c)] = sum;
        }
    }
    ulong entry = ulong(step[state_to + seq]) * HEADS + ulong(h);
    for (int i = 0; i < ROWS; i++) {
        int row = i * PARTS + part;
        if (inside && row < D_K) state[(entry * D_K + ulong(row)) * D_V + ulong(c)] = s[i];
    }
}
