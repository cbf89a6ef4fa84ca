// variants: DOT WIDE
// ternary_matmul of weights with a scale for each group of columns, for many tokens: a tile of TILE_M tokens and TILE_N rows for a work-group of
// 128, EACH_M by 4 of it an invocation. The columns of a group, at most 128 at a time, go through shared memory, where weights lie as
// bytes; the next are fetched while these are multiplied. Places are swizzled, so that what is stored together falls into different banks.
#include "ternary_group.glsl"
layout(constant_id = 6) const int EACH_M = 4;
layout(constant_id = 7) const int X_LOADS = 2;  // vectors of activations that an invocation fetches at a time: at most 4
const int TILE_M = 8 * EACH_M, TILE_N = 64, EACH_ALL = 4 * EACH_M;
const uint UNITS = 2 * PLANES;  // 16 columns each
shared uvec4 x_tile[UNITS * TILE_M];
shared uvec4 w_tile[UNITS * TILE_N];

uint x_place(uint unit, uint m) { return unit * TILE_M + (m ^ unit); }
uint w_place(uint unit, uint n) { return unit * TILE_N + (n ^ unit % 2 * 4); }

KERNEL(ternary_groups_tiled) {
    uint lane = LANE, n0 = gl_WorkGroupID.x * TILE_N, m0 = gl_WorkGroupID.y * TILE_M, tokens = STEP_TOKENS;
    if (m0 >= tokens) return;
    uint my_n = lane % 16, my_m = lane / 16;  // rows my_n + 16 i, tokens my_m + 8 t
    int found[EACH_ALL];  // of row i and token t: at EACH_M i + t
    float sum[EACH_ALL];
    [[unroll]] for (int o = 0; o < EACH_ALL; o++) {
        found[o] = 0;
        sum[o] = 0.0;
    }
    uvec4 next_x[X_LOADS], next_w;
    uint code_row = min(n0 + lane / 2, rows - 1) * ROW + lane % 2;
    uint s = 0, b = 0;  // the group and its block
#define FETCH { \
        uint block = s / EACH * BLOCKS + b; \
        next_w = codes[code_row + 2 * block]; \
        [[unroll]] for (uint i = 0; i < X_LOADS; i++) { \
            uint place = lane + i * 128, m = min(m0 + place / UNITS, tokens - 1); \
            if (place < TILE_M * UNITS) next_x[i] = load_x(m, block * 8 + s % EACH * UNITS + place % UNITS); \
        } \
    }
    FETCH
    while (s < COUNT) {
        barrier();
        [[unroll]] for (uint i = 0; i < X_LOADS; i++) {
            uint place = lane + i * 128;
            if (place < TILE_M * UNITS) x_tile[x_place(place % UNITS, place / UNITS)] = next_x[i];
        }
        [[unroll]] for (int p = 0; p < PLANES; p++)
            w_tile[w_place(2 * p + lane % 2, lane / 2)] = plane_of(next_w, int(s % EACH * PLANES) + p);
        barrier();
        uint now = s;
        bool ends = ++b == BLOCKS;
        if (ends) {
            b = 0;
            s++;
        }
        if (s < COUNT) FETCH
        [[unroll]] for (uint u = 0; u < UNITS; u++) {
            uvec4 w[4];
            [[unroll]] for (uint i = 0; i < 4; i++) w[i] = w_tile[w_place(u, my_n + 16 * i)];
            [[unroll]] for (uint t = 0; t < EACH_M; t++) {
                uvec4 v = x_tile[x_place(u, my_m + 8 * t)];
                [[unroll]] for (int i = 0; i < 4; i++) found[EACH_M * i + t] = dot16(w[i], v, found[EACH_M * i + t]);
            }
        }
        if (ends)
            [[unroll]] for (int o = 0; o < EACH_ALL; o++) {
                precise float next = sum[o] + term(found[o], min(n0 + my_n + 16 * (o / EACH_M), rows - 1), now);
                sum[o] = next;
                found[o] = 0;
            }
    }
    [[unroll]] for (int o = 0; o < EACH_ALL; o++) {
        uint m = m0 + my_m + 8 * (o % EACH_M), n = n0 + my_n + 16 * (o / EACH_M);
        if (m < tokens && n < rows) store(m, n, sum[o]);
    }
}
