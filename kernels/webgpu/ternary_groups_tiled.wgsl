// ternary_matmul of weights with a scale for each group of columns, for many tokens: a tile of TILE_M tokens and TILE_N rows for a workgroup of
// 128, EACH_M by 4 of it an invocation. The columns of a group, at most 128 at a time, go through workgroup memory, where weights lie
// as bytes; the next are fetched while these are multiplied, X_LOADS vectors of activations by an invocation. Places are swizzled, so
// that what is stored together falls into different banks.
#include "ternary_group.wgsl"
const TILE_M = 8u * u32(EACH_M);
const TILE_N = 64u;
const UNITS = 2u * u32(PLANES);  // 16 columns each, of the bit pairs of a block that are one group's
var<workgroup> x_tile: array<array<vec4<u32>, TILE_M>, UNITS>;
var<workgroup> w_tile: array<array<vec4<u32>, TILE_N>, UNITS>;

fn w_place(unit: u32, n: u32) -> u32 { return n ^ (unit % 2u * 4u); }

// The place-th fetch of x: 16 columns of a token that meet group s's block b.
fn fetch_x(place: u32, m0: u32, tokens: u32, s: u32, b: u32) -> vec4<u32> {
    let m = min(m0 + place / UNITS, tokens - 1u);
    return load_x(m, (s / u32(EACH) * BLOCKS + b) * 8u + s % u32(EACH) * UNITS + place % UNITS);
}

@compute @workgroup_size(WG)
fn ternary_groups_tiled(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let tokens = u32(step[STEP_TOKENS]);
    let n0 = id.x * TILE_N;
    let m0 = id.y * TILE_M;
    if (m0 >= tokens) { return; }
    let my_n = lane % 16u;  // rows my_n + 16 i, tokens my_m + 8 t
    let my_m = lane / 16u;
    let code_row = min(n0 + lane / 2u, args.rows - 1u) * ROW + lane % 2u;
    var found: array<array<i32, EACH_M>, 4>;
    var sum: array<array<f32, EACH_M>, 4>;
    var next_x: array<vec4<u32>, X_LOADS>;
    var next_w: vec4<u32>;
    var s = 0u;  // the group, and its block
    var b = 0u;
    next_w = codes[code_row];
#repeat i X_LOADS
    next_x[i] = fetch_x(lane + i * u32(WG), m0, tokens, 0u, 0u);
#end
    while (s < COUNT) {
        workgroupBarrier();
#repeat i X_LOADS
        let place = lane + i * u32(WG);
        if (place < TILE_M * UNITS) { x_tile[place % UNITS][(place / UNITS) ^ (place % UNITS)] = next_x[i]; }
#end
#repeat p PLANES
        w_tile[2u * p + lane % 2u][w_place(lane, lane / 2u)] = weights_of(next_w, s % u32(EACH) * u32(PLANES) + p);
#end
        workgroupBarrier();
        let now = s;
        b += 1u;
        let ends = b == BLOCKS;
        if (ends) {
            b = 0u;
            s += 1u;
        }
        if (s < COUNT) {
            next_w = codes[code_row + 2u * (s / u32(EACH) * BLOCKS + b)];
#repeat i X_LOADS
            next_x[i] = fetch_x(lane + i * u32(WG), m0, tokens, s, b);
#end
        }
        for (var u = 0u; u < UNITS; u++) {
            var mine: array<vec4<u32>, EACH_M>;
#repeat t EACH_M
            mine[t] = x_tile[u][(my_m + 8u * t) ^ u];
#end
#repeat i 4
            let w = w_tile[u][w_place(u, my_n + 16u * i)];
#repeat t EACH_M
            found[i][t] += dot16(w, mine[t]);
#end
#end
        }
        if (ends) {
#repeat i 4
#repeat t EACH_M
            sum[i][t] = added(sum[i][t], term(found[i][t], min(n0 + my_n + 16u * i, args.rows - 1u), now));
            found[i][t] = 0;
#end
#end
        }
    }
#repeat i 4
#repeat t EACH_M
    let m = m0 + my_m + 8u * t;
    let n = n0 + my_n + 16u * i;
    if (m < tokens && n < args.rows) { store(m, n, sum[i][t]); }
#end
#end
}
