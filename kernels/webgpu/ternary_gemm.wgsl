// The ternary product of many tokens: out[m, n] = f32(sum of x[m, k] w[n, k]) * (scale[m] * w_scale[n]), for the weight rows that
// are bound: `rows` of them, from row `first` of `total`. Packing as in ternary_gemv.
// A tile of SIDE * EACH_M tokens and SIDE * EACH_N rows a workgroup, EACH_M by EACH_N of it an invocation. STEPS times 64 of K
// go through workgroup memory at a time, where weights lie expanded to bytes; the next are fetched while these are multiplied.
// An invocation fetches X_LOADS times 16 activations, and expands two planes of 16 weights. SLICES of SIDE² invocations share what is there.
// GROUP: a scale for each GROUP of columns, of which PARTS are in workgroup memory at a time, or one for RUNS times; SLICES is 1.
struct Args { cols: u32, rows: u32, first: u32, total: u32 }
@group(0) @binding(0) var<storage, read> step: array<i32>;
#if ALIGNED
@group(0) @binding(1) var<storage, read> x: array<vec4<u32>>;
#else
@group(0) @binding(1) var<storage, read> x: array<u32>;
#endif
@group(0) @binding(2) var<storage, read> scale: array<f32>;
@group(0) @binding(3) var<storage, read> codes: array<vec4<u32>>;
#if GROUP
@group(0) @binding(4) var<storage, read> w_scale: array<u32>;  // two f16 each
#include "group_scales.wgsl"
#else
@group(0) @binding(4) var<storage, read> w_scale: array<f32>;
#endif
@group(0) @binding(5) var<storage, read_write> out: array<f32>;
@group(0) @binding(6) var<uniform> args: Args;

const ACROSS = u32(SIDE);
const SQUARE = ACROSS * ACROSS;  // WG = SQUARE * SLICES
const TILE_M = ACROSS * u32(EACH_M);
const TILE_N = ACROSS * u32(EACH_N);
const UNITS = 4u * u32(STEPS);  // 16 columns each
const SHARE = UNITS / u32(SLICES * PARTS);
var<workgroup> x_tile: array<array<vec4<u32>, TILE_M>, UNITS>;
var<workgroup> w_tile: array<array<vec4<u32>, TILE_N>, UNITS>;
#if GROUP
var<workgroup> units_of: array<f32, TILE_N * u32(PARTS)>;
#endif
#if SPLIT
var<workgroup> parts: array<i32, u32(WG * EACH_M)>;
#endif

// Activations 16 at … 16 at + 15 of token m; zeros past K.
fn load_x(m: u32, at: u32) -> vec4<u32> {
#if ALIGNED
    if (at >= args.cols / 16u) { return vec4(0u); }
    return x[m * (args.cols / 16u) + at];
#else
    var words = vec4(0u);
    let width = args.cols / 4u;
#repeat i 4
    if (4u * at + i < width) { words[i] = x[m * width + 4u * at + i]; }
#end
    return words;
#endif
}

// Where token m of the tile lies in a unit: what is stored together falls into different banks.
fn x_place(m: u32, unit: u32) -> u32 { return m ^ (unit * (8u / min(UNITS, 8u)) % 8u); }

fn store(m: u32, n: u32, value: f32) {
    let to = m * args.total + args.first + n;
#if ADD
    out[to] += value;
#else
    out[to] = value;
#endif
}

@compute @workgroup_size(WG)
fn ternary_gemm(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let tokens = u32(step[STEP_TOKENS]);
    let m0 = id.y * TILE_M;
    let n0 = id.x * TILE_N;
    if (m0 >= tokens) { return; }
    let vecs = (args.cols + 127u) / 128u * 2u;
    let my_n = lane % ACROSS;  // rows my_n + SIDE i, tokens my_m + SIDE j
    let my_m = lane / ACROSS % ACROSS;
    let my_units = lane / SQUARE * SHARE;
    let w_row = lane % TILE_N;  // of which it expands units of one half of a block, of the planes from w_plane on
    let w_half = lane / TILE_N % 2u;
    let w_plane = lane / TILE_N / 2u * 2u;
    let from_codes = min(n0 + w_row, args.rows - 1u) * vecs;
    var sums: array<array<i32, EACH_M>, EACH_N>;
    var next_x: array<vec4<u32>, X_LOADS>;
    var next_w = codes[from_codes + min(w_plane / 4u * 2u + w_half, vecs - 1u)];
#repeat i X_LOADS
    next_x[i] = load_x(min(m0 + (lane + i * u32(WG)) / UNITS, tokens - 1u), (lane + i * u32(WG)) % UNITS);
#end
#if GROUP
    var totals: array<array<f32, EACH_M>, EACH_N>;
    let from_units = (args.first + min(n0 + lane % TILE_N, args.rows - 1u)) * COUNT;
    var next_unit = unit_of(from_units + min(lane / TILE_N, COUNT - 1u));
#endif
    let rounds = (args.cols + 16u * UNITS - 1u) / (16u * UNITS);
    for (var round = 0u; round < rounds; round++) {
        workgroupBarrier();
#repeat i X_LOADS
        let at = lane + i * u32(WG);
        if (at < UNITS * TILE_M) { x_tile[at % UNITS][x_place(at / UNITS, at % UNITS)] = next_x[i]; }
#end
#repeat i 2
        w_tile[(w_plane + i) * 2u + w_half][w_row] = weights_of(next_w, (round * u32(STEPS) * 2u + w_plane + i) % 4u);
#end
#if GROUP
        if (lane < TILE_N * u32(PARTS)) { units_of[lane] = next_unit; }
#endif
        workgroupBarrier();
        if (round + 1u < rounds) {
            let plane = (round + 1u) * u32(STEPS) * 2u + w_plane;
            next_w = codes[from_codes + min(plane / 4u * 2u + w_half, vecs - 1u)];
#repeat i X_LOADS
            let at = lane + i * u32(WG);
            next_x[i] = load_x(min(m0 + at / UNITS, tokens - 1u), (round + 1u) * UNITS + at % UNITS);
#end
#if GROUP
            next_unit = unit_of(from_units + min((round + 1u) / u32(RUNS) * u32(PARTS) + lane / TILE_N, COUNT - 1u));
#endif
        }
#repeat part PARTS
        for (var u = 0u; u < SHARE; u++) {
            let unit = my_units + part * SHARE + u;
            let from_m = x_place(my_m, unit);
            var mine: array<vec4<u32>, EACH_M>;
#repeat j EACH_M
            mine[j] = x_tile[unit][from_m + ACROSS * j];
#end
#repeat i EACH_N
            let w = w_tile[unit][my_n + ACROSS * i];
#repeat j EACH_M
            sums[i][j] += dot16(w, mine[j]);
#end
#end
        }
#if GROUP
        if ((round + 1u) % u32(RUNS) == 0u) {
#repeat i EACH_N
            let unit = units_of[part * TILE_N + my_n + ACROSS * i];
#repeat j EACH_M
            let term = rounded(f32(sums[i][j]) * unit, args.rows >> 31u);
            totals[i][j] = rounded(totals[i][j] + term, args.rows >> 31u);
            sums[i][j] = 0;
#end
#end
        }
#endif
#end
    }
#if SPLIT
#repeat i EACH_N
    workgroupBarrier();
#repeat j EACH_M
    parts[j * u32(WG) + lane] = sums[i][j];
#end
    workgroupBarrier();
    for (var at = lane; at < SQUARE * u32(EACH_M); at += u32(WG)) {
        let j = at / SQUARE;
        let n = n0 + at % ACROSS + ACROSS * i;
        let m = m0 + at % SQUARE / ACROSS + ACROSS * j;
        if (n < args.rows && m < tokens) {
            var sum = 0;
#repeat slice SLICES
            sum += parts[j * u32(WG) + slice * SQUARE + at % SQUARE];
#end
            store(m, n, scaled(sum, scale[m], w_scale[args.first + n], args.rows >> 31u));
        }
    }
#end
#else
#repeat i EACH_N
#repeat j EACH_M
    let n = n0 + my_n + ACROSS * i;
    let m = m0 + my_m + ACROSS * j;
    if (n < args.rows && m < tokens) {
#if GROUP
        store(m, n, rounded(from_zero(totals[i][j]) * scale[m], args.rows >> 31u));
#else
        store(m, n, scaled(sums[i][j], scale[m], w_scale[args.first + n], args.rows >> 31u));
#endif
    }
#end
#end
#endif
}
