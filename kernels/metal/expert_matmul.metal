// Products of rows with the matrices of the experts that they are routed to, and their sums. A pair is a token and one of its experts.
//
// Each threadgroup has ROWS rows of one expert's matrices and up to TOKENS pairs of that expert: one, or those of a tile of expert_tiles.
// LANES threads share a row; each takes blocks of 128 columns (32 bytes of codes, as in ternary_groups) and adds its integer sums to
// those of the groups of columns, in any order, as they are exact.
#define COUNT (COLS / GROUP) /* groups of a row; 1 where a row or a matrix has one scale */
#define BLOCKS (ROW_BYTES / 32)
#define ROWS (WG / LANES)
#include "ternary_chunk.metal"

// The stacked matrices' row for column `n` of an expert's result: `parts` matrices of `rows` rows for each of the experts.
inline ulong matrix_row(int n, int expert, int experts, int rows) {
    return (ulong(n / rows) * ulong(experts) + ulong(expert)) * ulong(rows) + ulong(n % rows);
}

// `per`: pairs that share a row of x and its scale. `scaled`: `units` are f16 scales of groups; otherwise f32, one a row.
// Results of a pair begin at `first` of its `columns`.
[[kernel, max_total_threads_per_threadgroup(WG)]] void expert_matmul(
    device const int *step [[buffer(0)]], device const char *x [[buffer(1)]], device const float *scale [[buffer(2)]],
    device const int *ids [[buffer(3)]], device const uint4 *codes [[buffer(4)]], device const float *units [[buffer(5)]],
    device const int *order [[buffer(6)]], device const int *tiles [[buffer(7)]], device float *out [[buffer(8)]],
    constant int &top [[buffer(9)]], constant int &per [[buffer(10)]], constant int &experts [[buffer(11)]],
    constant int &rows [[buffer(12)]], constant int &parts [[buffer(13)]], constant int &first [[buffer(14)]],
    constant int &columns [[buffer(15)]], constant int &scaled [[buffer(16)]], constant int &grouped [[buffer(17)]], PLACE) {
    threadgroup atomic_int sums[ROWS * TOKENS * COUNT];
    Place place = PLACED;
    int lane = place.item % LANES, slot = place.item / LANES, here = int(group.x) * ROWS, total = rows * parts;
    int begin = int(group.y), count = begin < STEP_TOKENS(step) * top ? 1 : 0, expert = 0;
    if (grouped != 0) {
        count = tiles[3 * begin + 2];
        if (count != 0) expert = tiles[3 * begin];
        begin = tiles[3 * begin + 1];
    } else if (count != 0) {
        expert = ids[begin];
    }
    if (count == 0) return;
    for (int i = place.item; i < ROWS * TOKENS * COUNT; i += WG) atomic_store_explicit(&sums[i], 0, memory_order_relaxed);
    GROUP_BARRIER;
    device const uint4 *row = codes + matrix_row(min(here + slot, total - 1), expert, experts, rows) * (ROW_BYTES / 16);
    for (int block = lane; block < BLOCKS; block += LANES) {
        uint4 low = row[2 * block], high = row[2 * block + 1];
        for (int t = 0; t < count; t++) {
            device const char *from = x + ulong((grouped != 0 ? order[begin + t] : begin) / per) * COLS;
            float2 found = float2(0.0f, 0.0f);
            int ones = 0;
            for (int pair = 0; pair < 4; pair++) {
                int k = block * 128 + pair * 32;
                Chunk v = load_x(from, k), w = load_x(from, k + 16);
                found += products(low, pair, v) + products(high, pair, w);
                ones += v.sum + w.sum;
                if ((pair + 1) % (4 / EACH) != 0) continue;
                int s = (block * 128 + pair / (4 / EACH) * (128 / EACH)) / GROUP;
                int sum = int(found.x * UNIT) + int(found.y * UNIT) - ones;
                if (s < COUNT) atomic_fetch_add_explicit(&sums[(slot * TOKENS + t) * COUNT + s], sum, memory_order_relaxed);
                found = float2(0.0f, 0.0f);
                ones = 0;
            }
        }
    }
    GROUP_BARRIER;
    for (int i = place.item; i < ROWS * TOKENS; i += WG) {
        int t = i % TOKENS, n = here + i / TOKENS;
        if (t >= count || n >= total) continue;
        int pair = grouped != 0 ? order[begin + t] : begin;
        ulong of = matrix_row(n, expert, experts, rows);
        float unit = scale[pair / per], value = 0.0f;
        if (scaled != 0) {
            device const half *factors = (device const half *)units + of * COUNT;
            for (int s = 0; s < COUNT; s++) {
                float term = float(atomic_load_explicit(&sums[i * COUNT + s], memory_order_relaxed)) * float(factors[s]);
                value += term;
            }
            value *= unit;
        } else {
            value = float(atomic_load_explicit(&sums[i * COUNT], memory_order_relaxed)) * (unit * units[of]);
        }
        out[ulong(pair) * ulong(columns) + ulong(first + n)] = value;
    }
}

// Grid: [columns, tokens]. The results of a token's experts times their shares, added in the order of the router, then to `out`.
[[kernel, max_total_threads_per_threadgroup(WG)]] void expert_sums(
    device const int *step [[buffer(0)]], device const float *results [[buffer(1)]], device const float *shares [[buffer(2)]],
    device float *out [[buffer(3)]], constant int &top [[buffer(4)]], constant int &columns [[buffer(5)]], PLACE) {
    int n = int(group.x) * WG + int(index), m = int(group.y);
    if (n >= columns || m >= STEP_TOKENS(step)) return;
    float sum = 0.0f;
    for (int j = 0; j < top; j++) {
        ulong pair = ulong(m) * ulong(top) + ulong(j);
        float part = results[pair * ulong(columns) + ulong(n)] * shares[pair];
        sum += part;
    }
    ulong at = ulong(m) * ulong(columns) + ulong(n);
    float before = out[at];
    out[at] = before + sum;
}
