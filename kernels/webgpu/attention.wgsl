// Causal attention of one token and head per workgroup, over the paged cache [blocks, BLOCK, kv_heads, DIM], in chunks of WG
// positions with a running maximum (Milakov and Gimelshein 2018). LANES invocations share a position's score, so that keys are
// read in order; values are read with an invocation for four dimensions, several positions at once.
// ROPE: the token is the only one of its step; q is rotated here, k too, and the new k and v are put in the cache here.
// SPLIT: a workgroup takes one of SPLITS equal parts of the positions; what reads them, or attention_merge, puts them together:
// out[m, head, split] is DIM sums, then their maximum and their total.
struct Args { token_seq: i32, seq_begin: i32, seq_len: i32, block_table: i32, max_blocks: i32, heads: i32, kv_heads: i32 }
@group(0) @binding(0) var<storage, read> step: array<i32>;
@group(0) @binding(1) var<storage, read> qkv: array<vec4<f32>>;
#if KV_F16
alias Quad = vec2<u32>;
#else
alias Quad = vec4<f32>;
#endif
#if ROPE
@group(0) @binding(2) var<storage, read_write> keys: array<Quad>;
@group(0) @binding(3) var<storage, read_write> values: array<Quad>;
#else
@group(0) @binding(2) var<storage, read> keys: array<Quad>;
@group(0) @binding(3) var<storage, read> values: array<Quad>;
#endif
@group(0) @binding(4) var<storage, read> cosines: array<vec2<f32>>;
@group(0) @binding(5) var<storage, read> sines: array<vec2<f32>>;
@group(0) @binding(6) var<storage, read_write> out: array<vec4<f32>>;
@group(0) @binding(7) var<uniform> args: Args;

const QUADS = u32(DIM / 4);
const LANES = 4u;
const GROUPS = u32(WG) / LANES;
const SPREAD = max(u32(WG) / QUADS, 1u);         // positions whose values are read at once
const EACH = (QUADS + u32(WG) - 1u) / u32(WG);  // quads of dimensions an invocation has

#if KV_F16
fn loaded(quad: Quad) -> vec4<f32> { return halves(quad); }
fn stored(value: vec4<f32>) -> Quad { return vec2(pack2x16float(value.xy), pack2x16float(value.zw)); }
#else
fn loaded(quad: Quad) -> vec4<f32> { return quad; }
fn stored(value: vec4<f32>) -> Quad { return value; }
#endif

var<workgroup> query: array<vec4<f32>, QUADS>;
var<workgroup> place: array<u32, WG>;
var<workgroup> weight: array<f32, WG>;
var<workgroup> parts: array<array<f32, WG>, LANES>;
var<workgroup> sums_of: array<vec4<f32>, SPREAD * QUADS>;
#if ROPE
var<workgroup> new_key: array<Quad, QUADS>;
var<workgroup> new_value: array<Quad, QUADS>;

fn element(quad: u32, i: u32) -> f32 { return qkv[quad + i / 4u][i % 4u]; }

// Quad i of a head at `from`, rotated.
fn rotated(from_quad: u32, i: u32, position: u32) -> vec4<f32> {
    let table = position * (QUADS * 2u);
    var result: vec4<f32>;
    for (var j = 0u; j < 4u; j++) {
        let d = 4u * i + j;
#if NEOX
        let second = d >= 2u * QUADS;
        let pair = d % (2u * QUADS);
        let other = select(d + 2u * QUADS, pair, second);
#else
        let second = d % 2u == 1u;
        let pair = d / 2u;
        let other = select(d + 1u, d - 1u, second);
#endif
        let c = cosines[(table + pair) / 2u][(table + pair) % 2u];
        let s = sines[(table + pair) / 2u][(table + pair) % 2u];
        let mine = element(from_quad, d);
        let theirs = element(from_quad, other);
        result[j] = select(mine * c - theirs * s, mine * c + theirs * s, second);
    }
    return result;
}
#endif

@compute @workgroup_size(WG)
fn attention(g: Group) {
    let m = g.id.x;
    if (m >= u32(step[0])) { return; }
    let head = g.id.y;
    let heads = u32(args.heads);
    let kv_heads = u32(args.kv_heads);
    let sequence = step[args.token_seq + i32(m)];
    let position = u32(step[args.seq_len + sequence] - step[args.seq_begin + sequence + 1] + i32(m));
    let table = u32(args.block_table + sequence * args.max_blocks);
    let ratio = heads / kv_heads;
    let kv_head = head / ratio;
    let row = m * (heads + 2u * kv_heads);
    let length = position + 1u;
#if SPLIT
    let share = (length + u32(SPLITS) - 1u) / u32(SPLITS);
    let begin = min(g.id.z * share, length);
    let end = min(begin + share, length);
#else
    let begin = 0u;
    let end = length;
#endif
    let root = 1.0 / sqrt(f32(DIM));
#if ROPE
    let here = ((u32(step[table + position / u32(BLOCK)]) * u32(BLOCK) + position % u32(BLOCK)) * kv_heads + kv_head) * QUADS;
    for (var i = g.lane; i < QUADS; i += u32(WG)) {
        query[i] = rotated((row + head) * QUADS, i, position) * root;
        let key = stored(rotated((row + heads + kv_head) * QUADS, i, position));
        let value = stored(qkv[(row + heads + kv_heads + kv_head) * QUADS + i]);
        new_key[i] = key;
        new_value[i] = value;
        if (head % ratio == 0u && g.id.z == 0u) {
            keys[here + i] = key;
            values[here + i] = value;
        }
    }
#else
    for (var i = g.lane; i < QUADS; i += u32(WG)) { query[i] = qkv[(row + head) * QUADS + i] * root; }
#endif
    var sums: array<vec4<f32>, EACH>;
    var largest = LOWEST;
    var total = 0.0;
    let group = g.lane / LANES;
    let lane = g.lane % LANES;
    let quad = g.lane % QUADS;
    let spread = g.lane / QUADS;
    for (var start = begin; start < end; start += u32(WG)) {
        let count = min(u32(WG), end - start);
        workgroupBarrier();
        if (g.lane < count) {
            let p = start + g.lane;
            place[g.lane] = ((u32(step[table + p / u32(BLOCK)]) * u32(BLOCK) + p % u32(BLOCK)) * kv_heads + kv_head) * QUADS;
        }
        workgroupBarrier();
        for (var t = group; t < count; t += GROUPS) {
            var score = 0.0;
            for (var i = lane; i < QUADS; i += LANES) {
#if ROPE
                var key = new_key[i];
                if (start + t < position) { key = keys[place[t] + i]; }
#else
                let key = keys[place[t] + i];
#endif
                score += dot(query[i], loaded(key));
            }
            parts[lane][t] = score;
        }
        workgroupBarrier();
        var score = LOWEST;
        if (g.lane < count) {
            score = 0.0;
            for (var i = 0u; i < LANES; i++) { score += parts[i][g.lane]; }
        }
        let before = largest;
        largest = max(largest, group_max(g, score));
        let w = select(0.0, exp(score - largest), g.lane < count);
        let correction = exp(before - largest);
        weight[g.lane] = w;
        total = total * correction + group_sum(g, w);  // its barriers publish `weight`
        for (var e = 0u; e < EACH; e++) {
            let i = quad + e * u32(WG);
            if (i >= QUADS || spread >= SPREAD) { continue; }
            var sum = sums[e] * correction;
            for (var t = spread; t < count; t += SPREAD) {
#if ROPE
                var value = new_value[i];
                if (start + t < position) { value = values[place[t] + i]; }
#else
                let value = values[place[t] + i];
#endif
                sum += weight[t] * loaded(value);
            }
            sums[e] = sum;
        }
    }
    workgroupBarrier();
    for (var e = 0u; e < EACH; e++) {
        if (quad + e * u32(WG) < QUADS && spread < SPREAD) { sums_of[spread * QUADS + quad + e * u32(WG)] = sums[e]; }
    }
    workgroupBarrier();
    for (var i = g.lane; i < QUADS; i += u32(WG)) {
        var sum = vec4(0.0);
        for (var t = 0u; t < SPREAD; t++) { sum += sums_of[t * QUADS + i]; }
#if SPLIT
        out[((m * heads + head) * u32(SPLITS) + g.id.z) * (QUADS + 1u) + i] = sum;
#else
        out[(m * heads + head) * QUADS + i] = sum / total;
#endif
    }
#if SPLIT
    if (g.lane == 0u) {
        out[((m * heads + head) * u32(SPLITS) + g.id.z) * (QUADS + 1u) + QUADS] = vec4(largest, total, 0.0, 0.0);
    }
#endif
}
