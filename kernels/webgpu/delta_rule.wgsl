// The gated delta rule, token by token. A workgroup COLUMNS columns of a head's matrix, through all tokens of a sequence: they depend on
// no other columns. PARTS invocations share the ROWS rows of a column, which they keep in registers, so that a step reads and writes the
// state once. The norms of q and k are factors, found with the first sums. Each product with q has its factor, as a
// device may flush to zero the smaller product without it.
struct Args { seq_begin: i32, state_from: i32, state_to: i32, eps: f32 }
@group(0) @binding(0) var<storage, read> step: array<i32>;
@group(0) @binding(1) var<storage, read> qkv: array<f32>;
@group(0) @binding(2) var<storage, read> gates: array<f32>;
@group(0) @binding(3) var<storage, read_write> state: array<f32>;
@group(0) @binding(4) var<storage, read_write> out: array<f32>;
@group(0) @binding(5) var<uniform> args: Args;
#include "states.wgsl"
const WIDTH = u32(2 * K_HEADS * D_K + HEADS * D_V);
var<workgroup> keyed: array<f32, PARTS * COLUMNS>;    // each part's sum of k with the state
var<workgroup> queried: array<f32, PARTS * COLUMNS>;  // and of q
var<workgroup> norms: array<vec2<f32>, PARTS>;

@compute @workgroup_size(WG)
fn delta_rule(grid: Grid, g: Group) {
    let column = g.lane % u32(COLUMNS);
    let part = i32(g.lane / u32(COLUMNS));
    let c = grid.id.x * u32(COLUMNS) + column;
    let h = i32(grid.id.y);
    let sequence = i32(grid.id.z);
    if (sequence >= step[STEP_SEQS]) { return; }
    let end = step[args.seq_begin + sequence + 1];
    let source = state_source(sequence);
#if TILED
    let k_head = h % K_HEADS;
#else
    let k_head = h / (HEADS / K_HEADS);
#endif
    let row0 = u32(max(source, 0) * HEADS + h) * u32(D_K);
    let to = u32(step[args.state_to + sequence] * HEADS + h) * u32(D_K);
    let inside = c < u32(D_V);
    var s: array<f32, ROWS>;
    var k: array<f32, ROWS>;
    var q: array<f32, ROWS>;
#repeat i ROWS
    let row = i * u32(PARTS) + u32(part);
    s[i] = 0.0;
    if (inside && row < u32(D_K) && source >= 0) { s[i] = state[(row0 + row) * u32(D_V) + c]; }
#end
    for (var m = step[args.seq_begin + sequence]; m < end; m++) {
        let queries = u32(m) * WIDTH + u32(k_head * D_K);
        let keys = queries + u32(K_HEADS * D_K);
        var sum = 0.0;
        var squares = vec2(0.0);
#repeat i ROWS
        let row = i * u32(PARTS) + u32(part);
        let there = row < u32(D_K);
        q[i] = select(0.0, qkv[queries + min(row, u32(D_K - 1))], there);
        k[i] = select(0.0, qkv[keys + min(row, u32(D_K - 1))], there);
        squares += vec2(q[i] * q[i], k[i] * k[i]);
        sum += k[i] * s[i];
#end
        keyed[g.lane] = sum;
        if (column == 0u) { norms[part] = squares; }
        workgroupBarrier();
        sum = 0.0;
        squares = vec2(0.0);
#repeat p PARTS
        sum += keyed[p * u32(COLUMNS) + column];
        squares += norms[p];
#end
        let of_q = 1.0 / sqrt((squares.x + args.eps) * f32(D_K));
        let of_k = 1.0 / sqrt(squares.y + args.eps);
        let gate = u32(m * 2 * HEADS + h);
        let decay = exp(gates[gate]);
        let value = select(0.0, qkv[u32(m) * WIDTH + u32(2 * K_HEADS * D_K + h * D_V) + min(c, u32(D_V - 1))], inside);
        let change = gates[gate + u32(HEADS)] * (value - decay * (of_k * sum)) * of_k;
        sum = 0.0;
#repeat i ROWS
        s[i] = decay * s[i] + k[i] * change;
        sum += q[i] * of_q * s[i];
#end
        queried[g.lane] = sum;
        workgroupBarrier();
        if (part == 0 && inside) {
            sum = 0.0;
#repeat p PARTS
            sum += queried[p * u32(COLUMNS) + column];
#end
            out[u32(m * HEADS + h) * u32(D_V) + c] = sum;
        }
    }
    if (!inside) { return; }
#repeat i ROWS
    let row = i * u32(PARTS) + u32(part);
    if (row < u32(D_K)) { state[(to + row) * u32(D_V) + c] = s[i]; }
#end
}
