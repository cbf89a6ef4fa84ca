// Products of rows with the matrices of the experts that they are routed to, and their sums. A pair is a token and one of its experts.
//
// Each work-group has ROWS rows of one expert's matrices and up to TOKENS pairs of that expert: one, or those of a tile of expert_tiles.
// LANES work-items share a row; each takes blocks of 128 columns (32 bytes of codes, as in ternary_groups.cl) and adds its integer sums
// to those of the groups of columns, in any order, as they are exact.
#pragma OPENCL FP_CONTRACT OFF  // the contract rounds each product and each sum separately

#define COUNT (COLS / GROUP) /* groups of a row; 1 where a row or a matrix has one scale */
#define BLOCKS (ROW_BYTES / 32)
#define ROWS (WG / LANES)

inline int dot16(uint4 c, uint4 x, int sum) {
    return dot4(c.w, x.w, dot4(c.z, x.z, dot4(c.y, x.y, dot4(c.x, x.x, sum))));
}

// The stacked matrices' row for column `n` of an expert's result: `parts` matrices of `rows` rows for each of the experts.
inline size_t matrix_row(int n, int expert, int experts, int rows) { return ((size_t)(n / rows) * experts + expert) * rows + n % rows; }

// `per`: pairs that share a row of x and its scale. `scaled`: `units` are f16 scales of groups; otherwise f32, one a row.
// Results of a pair begin at `first` of its `columns`.
kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void expert_matmul(
    global const int *step, global const char *x, global const float *scale, global const int *ids, global const uint4 *codes,
    global const float *units, global const int *order, global const int *tiles, global float *out, int top, int per, int experts,
    int rows, int parts, int first, int columns, int scaled, int grouped) {
    local int sums[ROWS * TOKENS * COUNT];
    int item = get_local_id(0), lane = item % LANES, slot = item / LANES, here = get_group_id(0) * ROWS, total = rows * parts;
    int begin = get_group_id(1), count = begin < STEP_TOKENS(step) * top, expert = 0;
    if (grouped) {
        count = tiles[3 * begin + 2];
        expert = count ? tiles[3 * begin] : 0;
        begin = tiles[3 * begin + 1];
    } else if (count) {
        expert = ids[begin];
    }
    int blocks = count ? BLOCKS : 0;  // not a return: PoCL 3.1 lets work-items into the loop behind the last barrier too soon then
    for (int i = item; i < ROWS * TOKENS * COUNT; i += WG) sums[i] = 0;
    barrier(CLK_LOCAL_MEM_FENCE);
    global const uint4 *row = codes + matrix_row(min(here + slot, total - 1), expert, experts, rows) * (ROW_BYTES / 16);
    for (int block = lane; block < blocks; block += LANES) {
        uint4 low = row[2 * block], high = row[2 * block + 1];
        for (int t = 0; t < count; t++) {
            size_t m = (grouped ? order[begin + t] : begin) / per;
            int found = 0;
            for (int pair = 0; pair < 4; pair++) {
                int k = block * 128 + pair * 32;
                uint4 v = load_x(x, m, k), w = load_x(x, m, k + 16);
                uint4 c = low >> (6 - 2 * pair) & 0x03030303u, d = high >> (6 - 2 * pair) & 0x03030303u;
                found += dot16(d, w, dot16(c, v, 0)) - dot16((uint4)(0x01010101u), w, dot16((uint4)(0x01010101u), v, 0));
                int s = (block * 128 + pair / (4 / EACH) * (128 / EACH)) / GROUP;
                if ((pair + 1) % (4 / EACH) == 0) {
                    if (s < COUNT) atomic_add(&sums[(slot * TOKENS + t) * COUNT + s], found);
                    found = 0;
                }
            }
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int i = item; i < ROWS * TOKENS; i += WG) {
        int t = i % TOKENS, n = here + i / TOKENS;
        if (t >= count || n >= total) continue;
        int pair = grouped ? order[begin + t] : begin;
        size_t of = matrix_row(n, expert, experts, rows);
        float unit = scale[pair / per], value;
        if (scaled) {
            value = 0.0f;
            for (int s = 0; s < COUNT; s++) value += (float)sums[i / TOKENS * TOKENS * COUNT + t * COUNT + s] * vload_half(of * COUNT + s, (global const half *)units);
            value *= unit;
        } else {
            value = (float)sums[i] * (unit * units[of]);
        }
        out[(size_t)pair * columns + first + n] = value;
    }
}

// Grid: [columns, tokens]. The results of a token's experts times their shares, added in the order of the router, then to `out`.
kernel void expert_sums(global const int *step, global const float *results, global const float *shares, global float *out, int top, int columns) {
    int n = get_global_id(0), m = get_group_id(1);
    if (n >= columns || m >= STEP_TOKENS(step)) return;
    float sum = 0.0f;
    for (int j = 0; j < top; j++) sum += results[((size_t)m * top + j) * columns + n] * shares[(size_t)m * top + j];
    out[(size_t)m * columns + n] += sum;
}
