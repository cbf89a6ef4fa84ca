// Causal attention of many tokens over the paged cache: a workgroup of 256 takes a tile of query rows, each a token and one of TEAM
// query heads of one key/value head, against KEYS positions at a time, with a running maximum (Milakov and Gimelshein 2018). Keys
// and queries go through workgroup memory DEPTH quads of dimensions at a time, values STAGE positions at a time; the next are
// fetched while these are multiplied. A tile that holds the tokens of several sequences takes these one after the other.
// An invocation has EACH rows by EACH_D quads of dimensions of the tile, and fetches Q_LOADS, K_LOADS and V_LOADS quads. PARTS
// invocations share a row's softmax, each with EACH_P quads of weights.
struct Args { token_seq: i32, seq_begin: i32, seq_len: i32, block_table: i32, max_blocks: i32, heads: i32, kv_heads: i32 }
@group(0) @binding(0) var<storage, read> step: array<i32>;
@group(0) @binding(1) var<storage, read> qkv: array<vec4<f32>>;
#if KV_I8
@group(0) @binding(2) var<storage, read> keys: array<u32>;
@group(0) @binding(3) var<storage, read> values: array<u32>;
#else
#if KV_F16
@group(0) @binding(2) var<storage, read> keys: array<vec2<u32>>;
@group(0) @binding(3) var<storage, read> values: array<vec2<u32>>;
#else
@group(0) @binding(2) var<storage, read> keys: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> values: array<vec4<f32>>;
#endif
#endif
@group(0) @binding(4) var<storage, read_write> out: array<vec4<f32>>;
@group(0) @binding(5) var<uniform> args: Args;

const QUADS = u32(DIM / 4);
const SIDE = 16u;                                // WG = SIDE * SIDE
const ROWS = SIDE * u32(EACH);                   // rows of the tile, of which an invocation has EACH
const TOKENS = ROWS / u32(TEAM);
const KEYS = 64u;
const SLICE = u32(DEPTH);                       // quads of queries and keys at a time
const SPAN = u32(STAGE);                        // positions of values at a time
const PITCH = KEYS / 4u + 1u;
const Q_PITCH = ROWS + 2u;
const K_PITCH = KEYS + 2u;
const K_FROM = SLICE * Q_PITCH;
const START = -1.0e30;                           // greater than LOWEST, which masks, and less than any score

var<workgroup> tile: array<vec4<f32>, max(SLICE * (Q_PITCH + K_PITCH), SPAN * QUADS)>;
var<workgroup> weights: array<vec4<f32>, ROWS * PITCH>;
var<workgroup> of_part: array<f32, WG>;
var<workgroup> correction_of: array<f32, ROWS>;

#include "cache.wgsl"
#include "window.wgsl"
// sum + weight * value. What is behind a token's window may be NaN.
fn weighed(weight: f32, value: vec4<f32>, sum: vec4<f32>) -> vec4<f32> {
#if WINDOW
    return select(fma(vec4(weight), value, sum), sum, weight == 0.0);
#else
    return fma(vec4(weight), value, sum);
#endif
}

// Quad i of the key and the value at position p of a chunk.
#if KV_I8
var<workgroup> place: array<Row, KEYS>;
fn load_key(p: u32, i: u32) -> vec4<f32> { return coded(vec2(keys[place[p].codes + i], keys[place[p].scale])); }
fn load_value(p: u32, i: u32) -> vec4<f32> { return coded(vec2(values[place[p].codes + i], values[place[p].scale])); }
#else
var<workgroup> place: array<u32, KEYS>;
#if KV_F16
fn load_key(p: u32, i: u32) -> vec4<f32> { return halves(keys[place[p] + i]); }
fn load_value(p: u32, i: u32) -> vec4<f32> { return halves(values[place[p] + i]); }
#else
fn load_key(p: u32, i: u32) -> vec4<f32> { return keys[place[p] + i]; }
fn load_value(p: u32, i: u32) -> vec4<f32> { return values[place[p] + i]; }
#endif
#endif

// This invocation's quads of the values of SPAN positions from t on.
fn fetch_values(g: Group, t: u32) -> array<vec4<f32>, V_LOADS> {
    var fetched: array<vec4<f32>, V_LOADS>;
#repeat i V_LOADS
    let at = min(g.lane + i * u32(WG), SPAN * QUADS - 1u);
    fetched[i] = load_value(t + at / QUADS, at % QUADS);
#end
    return fetched;
}

@compute @workgroup_size(WG)
fn attention_prefill(grid: Grid, g: Group) {
    let tokens = u32(step[STEP_TOKENS]);
    let m0 = (grid.count.x - 1u - grid.id.x) * TOKENS;  // those that attend to most come first
    if (m0 >= tokens) { return; }
    let most = min(m0 + TOKENS, tokens);
    let heads = u32(args.heads);
    let kv_heads = u32(args.kv_heads);
    let first_head = grid.id.y * u32(TEAM);
    let kv_head = first_head / (heads / kv_heads);
    let root = 1.0 / sqrt(f32(DIM));
    let my_c = g.lane % SIDE;      // positions my_c + 16 j, then quads of dimensions my_c + 16 e
    let my_r = g.lane / SIDE;      // rows my_r + 16 i
    let row = g.lane / u32(PARTS); // row of whose softmax this invocation has a part
    let part = g.lane % u32(PARTS);
    var largest = START;           // of `row`
    var total = 0.0;               // of this invocation's part
    var sums: array<array<vec4<f32>, EACH_D>, EACH>;

    var first = m0;
    while (first < most) {  // a sequence's tokens `first` to `last - 1` of the tile
        let sequence = step[args.token_seq + i32(first)];
        let last = min(most, u32(step[args.seq_begin + sequence + 1]));
        let offset = step[args.seq_len + sequence] - step[args.seq_begin + sequence + 1];  // position less token
        let length = u32(offset + i32(last));
        let table = u32(args.block_table + sequence * args.max_blocks);
        for (var start = window_begin(u32(offset + i32(first) + 1)); start < length; start += KEYS) {
            workgroupBarrier();
            if (g.lane < KEYS) {
                let p = min(start + g.lane, length - 1u);
                let block = u32(step[table + p / u32(BLOCK)]);
#if KV_I8
                place[g.lane] = row_of(block, p % u32(BLOCK) * kv_heads + kv_head, kv_heads * u32(BLOCK));
#else
                place[g.lane] = ((block * u32(BLOCK) + p % u32(BLOCK)) * kv_heads + kv_head) * QUADS;
#endif
            }
            workgroupBarrier();

            var dots = array<array<f32, 4>, EACH>();  // in a loop, wgpu zeroes only variables with an explicit zero
            var next_q: array<vec4<f32>, Q_LOADS>;
            var next_k: array<vec4<f32>, K_LOADS>;
            for (var d = 0u; d < QUADS + SLICE; d += SLICE) {
                if (d > 0u) {
                    workgroupBarrier();
#repeat i Q_LOADS
                    let at = g.lane + i * u32(WG);
                    if (at < SLICE * ROWS) { tile[at % SLICE * Q_PITCH + at / SLICE] = next_q[i]; }
#end
#repeat i K_LOADS
                    let at = g.lane + i * u32(WG);
                    tile[K_FROM + at % SLICE * K_PITCH + at / SLICE] = next_k[i];
#end
                    workgroupBarrier();
                }
                if (d < QUADS) {
                    let quad = d + g.lane % SLICE;
                    let inside = quad < QUADS;
                    let near = min(quad, QUADS - 1u);
#repeat i Q_LOADS
                    let r = (g.lane + i * u32(WG)) / SLICE;
                    let m = min(m0 + r / u32(TEAM), most - 1u);
                    let q = qkv[(m * (heads + 2u * kv_heads) + first_head + r % u32(TEAM)) * QUADS + near] * root;
                    next_q[i] = select(vec4(0.0), q, inside);
#end
#repeat i K_LOADS
                    next_k[i] = select(vec4(0.0), load_key((g.lane + i * u32(WG)) / SLICE, near), inside);
#end
                }
                if (d > 0u) {
                    for (var k = 0u; k < SLICE; k++) {
                        var q: array<vec4<f32>, EACH>;
#repeat i EACH
                        q[i] = tile[k * Q_PITCH + my_r + SIDE * i];
#end
#repeat j 4
                        let key = tile[K_FROM + k * K_PITCH + my_c + SIDE * j];
#repeat i EACH
                        dots[i][j] = fused_dot(q[i], key, dots[i][j]);
#end
#end
                    }
                }
            }
#repeat i EACH
            let r = my_r + SIDE * i;
            let m = m0 + r / u32(TEAM);
            let visible = u32(max(offset + i32(m) + 1, 0));
#repeat j 4
            let c = my_c + SIDE * j;
            let seen = m >= first && m < last && start + c < visible && start + c >= window_begin(visible);
            weights[r * PITCH + c / 4u][c % 4u] = select(LOWEST, dots[i][j], seen);
#end
#end
            workgroupBarrier();

            var next_v = fetch_values(g, 0u);  // on their way during the softmax
            var found = vec4(LOWEST);
#repeat i EACH_P
            found = max(found, weights[row * PITCH + part + u32(PARTS) * i]);
#end
            of_part[g.lane] = max(max(found.x, found.y), max(found.z, found.w));
            workgroupBarrier();
            let before = largest;
#repeat i PARTS
            largest = max(largest, of_part[row * u32(PARTS) + i]);
#end
            let correction = exp(before - largest);
            var added = vec4(0.0);
#repeat i EACH_P
            let w = exp(weights[row * PITCH + part + u32(PARTS) * i] - largest);
            weights[row * PITCH + part + u32(PARTS) * i] = w;
            added += w;
#end
            total = total * correction + dot(added, vec4(1.0));
            if (part == 0u) { correction_of[row] = correction; }

            let count = min(KEYS, length - start);
            for (var t = 0u; t < count; t += SPAN) {
                workgroupBarrier();
#repeat i V_LOADS
                let at = g.lane + i * u32(WG);
                if (at < SPAN * QUADS) { tile[at] = next_v[i]; }
#end
                workgroupBarrier();
                if (t + SPAN < count) { next_v = fetch_values(g, t + SPAN); }
                if (t == 0u) {
#repeat i EACH
#repeat e EACH_D
                    sums[i][e] *= correction_of[my_r + SIDE * i];
#end
#end
                }
                for (var s = 0u; s < SPAN; s += 4u) {
                    var w: array<vec4<f32>, EACH>;
#repeat i EACH
                    w[i] = weights[(my_r + SIDE * i) * PITCH + (t + s) / 4u];
#end
#repeat e EACH_D
                    let from_quad = s * QUADS + min(my_c + SIDE * e, QUADS - 1u);
                    let a = tile[from_quad];
                    let b = tile[from_quad + QUADS];
                    let c = tile[from_quad + 2u * QUADS];
                    let d = tile[from_quad + 3u * QUADS];
#repeat i EACH
                    sums[i][e] = weighed(w[i].w, d, weighed(w[i].z, c, weighed(w[i].y, b, weighed(w[i].x, a, sums[i][e]))));
#end
#end
                }
            }
        }
        first = last;
    }
    workgroupBarrier();
    of_part[g.lane] = total;
    workgroupBarrier();
#repeat i EACH
    let r = my_r + SIDE * i;
    let m = m0 + r / u32(TEAM);
    var all = 0.0;
#repeat p PARTS
    all += of_part[r * u32(PARTS) + p];
#end
#repeat e EACH_D
    let quad = my_c + SIDE * e;
    if (r < TOKENS * u32(TEAM) && m < most && quad < QUADS) {
        out[(m * heads + first_head + r % u32(TEAM)) * QUADS + quad] = sums[i][e] / all;
    }
#end
#end
}
