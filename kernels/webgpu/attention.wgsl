// Causal attention of one token over the paged cache: a workgroup takes TEAM query heads of one
// key/value head (at most LANES), so that these read each key and value once, in chunks of positions with a running maximum
// (Milakov and Gimelshein 2018). The keys and values of the next chunk are asked for as soon as their registers are free.
// KEYS: quads of a position's key that an invocation takes. VALUES: positions whose values it takes, and EACH: quads of these.
// ROPE: no other token of the step reads this one's k and v; q is rotated here, k too, and the new k and v are put in the cache here.
// ONE: the token is the only one of its step.
// SPLIT: a workgroup takes SHARE of the positions, one of SPLITS parts; the reader of the parts, or attention_merge, merges them:
// out[m, head, split] is DIM sums, then their maximum and their total.
struct Args { token_seq: i32, seq_begin: i32, seq_len: i32, block_table: i32, max_blocks: i32, heads: i32, kv_heads: i32 }
@group(0) @binding(0) var<storage, read> step: array<i32>;
@group(0) @binding(1) var<storage, read> qkv: array<vec4<f32>>;
#if KV_I8
alias Quad = vec2<u32>;  // codes, and the bits of their scale
alias Kept = u32;
#else
#if KV_F16
alias Quad = vec2<u32>;
#else
alias Quad = vec4<f32>;
#endif
alias Kept = Quad;
#endif
#if ROPE
@group(0) @binding(2) var<storage, read_write> keys: array<Kept>;
@group(0) @binding(3) var<storage, read_write> values: array<Kept>;
#else
@group(0) @binding(2) var<storage, read> keys: array<Kept>;
@group(0) @binding(3) var<storage, read> values: array<Kept>;
#endif
@group(0) @binding(4) var<storage, read> cosines: array<vec2<f32>>;
@group(0) @binding(5) var<storage, read> sines: array<vec2<f32>>;
@group(0) @binding(6) var<storage, read_write> out: array<vec4<f32>>;
@group(0) @binding(7) var<uniform> args: Args;

const QUADS = u32(DIM / 4);
const HEADS = u32(TEAM);
const LANES = 4u;                                // invocations that share a position's score
const CHUNK = u32(WG) / LANES;                   // positions at a time
const COLUMNS = min(QUADS, u32(WG));             // quads of values that are summed at once
const SPREAD = u32(WG) / COLUMNS;                // positions whose values are read at once
const PAD = HEADS * CHUNK + 8u;                  // padding that keeps the lanes' scores in different banks

#include "cache.wgsl"
#include "window.wgsl"
#if KV_I8
fn loaded(quad: Quad) -> vec4<f32> { return coded(quad); }
#else
#if KV_F16
fn loaded(quad: Quad) -> vec4<f32> { return halves(quad); }
fn stored(value: vec4<f32>) -> Quad { return vec2(pack2x16float(value.xy), pack2x16float(value.zw)); }
#else
fn loaded(quad: Quad) -> vec4<f32> { return quad; }
fn stored(value: vec4<f32>) -> Quad { return value; }
#endif
#endif

var<workgroup> query: array<vec4<f32>, HEADS * QUADS>;
#if KV_I8
var<workgroup> place: array<Row, 2u * CHUNK>;
fn key_of(at: u32, i: u32) -> Quad { return vec2(keys[place[at].codes + i], keys[place[at].scale]); }
fn value_of(at: u32, i: u32) -> Quad { return vec2(values[place[at].codes + i], values[place[at].scale]); }
#else
var<workgroup> place: array<u32, 2u * CHUNK>;
fn key_of(at: u32, i: u32) -> Quad { return keys[place[at] + i]; }
fn value_of(at: u32, i: u32) -> Quad { return values[place[at] + i]; }
#endif
var<workgroup> parts: array<f32, LANES * PAD>;
var<workgroup> scores: array<vec4<f32>, HEADS * CHUNK / 4u>;
var<workgroup> weights: array<f32, HEADS * CHUNK>;
var<workgroup> maxima: array<f32, HEADS>;
var<workgroup> sums_of: array<vec4<f32>, SPREAD * COLUMNS>;
#if ROPE
var<workgroup> new_key: array<Quad, QUADS>;
var<workgroup> new_value: array<Quad, QUADS>;
#if KV_I8
var<workgroup> new_rows: array<vec4<f32>, 2u * QUADS>;  // of k and of v, before they become codes

// Codes of row `which` and their scale.
fn codes_of(which: u32, i: u32) -> Quad {
    var greatest = 0u;
    for (var j = 0u; j < QUADS; j++) { greatest = max(greatest, magnitude_bits(new_rows[which * QUADS + j])); }
    let unit = row_unit(greatest);
    return vec2(quantised(new_rows[which * QUADS + i] * unit.x), bitcast<u32>(unit.y));
}
#endif

fn element(quad: u32, i: u32) -> f32 { return qkv[quad + i / 4u][i % 4u]; }

// Quad i of a head at `from`, rotated.
fn rotated(from_quad: u32, i: u32, position: u32) -> vec4<f32> {
    let table = position * (QUADS * 2u);
    var result: vec4<f32>;
#repeat j 4
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
#end
    return result;
}
#endif

// Stores at `at` the place in the cache of position p of the sequence with this table. Positions not reached yet get any place: what is
// read there has no effect, and loads need not wait for the sequence's length.
fn find_place(at: u32, table: u32, p: u32, kv_head: u32) {
    let near = min(p, u32(args.max_blocks * BLOCK) - 1u);
    let kv_heads = u32(args.kv_heads);
#if KV_I8
    let last = arrayLength(&keys) / (kv_heads * u32(BLOCK) * (QUADS + 1u)) - 1u;
    let block = min(u32(step[table + near / u32(BLOCK)]), last);
    place[at] = row_of(block, near % u32(BLOCK) * kv_heads + kv_head, kv_heads * u32(BLOCK));
#else
    let row = kv_heads * QUADS;
    let block = min(u32(step[table + near / u32(BLOCK)]), arrayLength(&keys) / (row * u32(BLOCK)) - 1u);
    place[at] = (block * u32(BLOCK) + near % u32(BLOCK)) * row + kv_head * QUADS;
#endif
}

@compute @workgroup_size(WG)
fn attention(grid: Grid, g: Group) {
    let m = grid.id.x;
    if (m >= u32(step[STEP_TOKENS])) { return; }
    let heads = u32(args.heads);
    let kv_heads = u32(args.kv_heads);
    let first_head = grid.id.y * HEADS;
    let ratio = heads / kv_heads;
    let kv_head = first_head / ratio;
#if ONE
    let sequence = 0;
    let position = u32(step[args.seq_len] - 1);
#else
    let sequence = step[args.token_seq + i32(m)];
    let position = u32(step[args.seq_len + sequence] - step[args.seq_begin + sequence + 1] + i32(m));
#endif
    let table = u32(args.block_table + sequence * args.max_blocks);
    let row = m * (heads + 2u * kv_heads);
    let length = position + 1u;
#if SPLIT
    let begin = window_begin(length) + grid.id.z * u32(SHARE);
    let end = min(begin + u32(SHARE), length);
#else
    let begin = window_begin(length);
    let end = length;
#endif
    let group = g.lane / LANES;
    let lane = g.lane % LANES;
    let column = g.lane % COLUMNS;
    let spread = g.lane / COLUMNS;
    var key: array<Quad, KEYS>;
    var value: array<Quad, VALUES * EACH>;
    if (g.lane < CHUNK) { find_place(g.lane, table, begin + g.lane, kv_head); }
    workgroupBarrier();
#repeat j KEYS
    key[j] = key_of(group, min(lane + j * LANES, QUADS - 1u));
#end
#repeat j VALUES
#repeat e EACH
    value[j * u32(EACH) + e] = value_of(min(spread + j * SPREAD, CHUNK - 1u), min(column + e * COLUMNS, QUADS - 1u));
#end
#end
    let root = 1.0 / sqrt(f32(DIM));
#if ROPE
    // The query heads, then the new key.
    for (var i = g.lane; i < (HEADS + 1u) * QUADS; i += u32(WG)) {
        let quad = i % QUADS;
        let is_key = i >= HEADS * QUADS;
        let turned = rotated((row + select(first_head + i / QUADS, heads + kv_head, is_key)) * QUADS, quad, position);
#if KV_I8
        if (is_key) { new_rows[quad] = turned; } else { query[i] = turned * root; }
#else
        if (is_key) { new_key[quad] = stored(turned); } else { query[i] = turned * root; }
#endif
    }
    let new_v = (row + heads + kv_heads + kv_head) * QUADS;
#if KV_I8
    for (var i = g.lane; i < QUADS; i += u32(WG)) { new_rows[QUADS + i] = qkv[new_v + i]; }
    workgroupBarrier();
    for (var i = g.lane; i < QUADS; i += u32(WG)) {
        new_key[i] = codes_of(0u, i);
        new_value[i] = codes_of(1u, i);
    }
#else
    for (var i = g.lane; i < QUADS; i += u32(WG)) { new_value[i] = stored(qkv[new_v + i]); }
#endif
    workgroupBarrier();
    if (first_head % ratio == 0u && grid.id.z == 0u) {
        let block = u32(step[table + position / u32(BLOCK)]);
#if KV_I8
        let here = row_of(block, position % u32(BLOCK) * kv_heads + kv_head, kv_heads * u32(BLOCK));
        for (var i = g.lane; i < QUADS; i += u32(WG)) {
            keys[here.codes + i] = new_key[i].x;
            values[here.codes + i] = new_value[i].x;
        }
        if (g.lane == 0u) {
            keys[here.scale] = new_key[0].y;
            values[here.scale] = new_value[0].y;
        }
#else
        let here = ((block * u32(BLOCK) + position % u32(BLOCK)) * kv_heads + kv_head) * QUADS;
        for (var i = g.lane; i < QUADS; i += u32(WG)) {
            keys[here + i] = new_key[i];
            values[here + i] = new_value[i];
        }
#endif
    }
#else
    for (var i = g.lane; i < HEADS * QUADS; i += u32(WG)) { query[i] = qkv[(row + first_head) * QUADS + i] * root; }
    workgroupBarrier();
#endif
    var sums: array<vec4<f32>, TEAM * EACH>;
    var before: array<f32, TEAM>;  // each head's maximum so far
#repeat h TEAM
    before[h] = LOWEST;
#end
    let my_head = g.lane / CHUNK;   // head whose scores this invocation weighs, one of a chunk; HEADS and more: none
    let my_place = g.lane % CHUNK;
    var largest = LOWEST;           // of my_head
    var total = 0.0;                // of this invocation's weights
    var now = 0u;  // half of `place` that holds the next chunk's places
    for (var start = begin; start < end; start += CHUNK) {
        let count = min(CHUNK, end - start);
        now ^= CHUNK;
        if (g.lane < CHUNK) { find_place(now + g.lane, table, start + CHUNK + g.lane, kv_head); }
#if ROPE
        if (start + group == position) {
#repeat j KEYS
            key[j] = new_key[min(lane + j * LANES, QUADS - 1u)];
#end
        }
#repeat j VALUES
        if (start + spread + j * SPREAD == position) {
#repeat e EACH
            value[j * u32(EACH) + e] = new_value[min(column + e * COLUMNS, QUADS - 1u)];
#end
        }
#end
#endif
#repeat h TEAM
        var score = 0.0;
#repeat j KEYS
        if (lane + j * LANES < QUADS) { score = fused_dot(query[h * QUADS + lane + j * LANES], loaded(key[j]), score); }
#end
        parts[lane * PAD + h * CHUNK + group] = score;
#end
        workgroupBarrier();
        let more = start + CHUNK < end;
        if (more) {
#repeat j KEYS
            key[j] = key_of(now + group, min(lane + j * LANES, QUADS - 1u));
#end
        }
        if (my_head < HEADS) {
            var score = LOWEST;
            if (my_place < count) {
                score = 0.0;
                for (var i = 0u; i < LANES; i++) { score += parts[i * PAD + g.lane]; }
            }
            scores[g.lane / 4u][g.lane % 4u] = score;
        }
        workgroupBarrier();
        if (my_head < HEADS) {
            var found = vec4(largest);
            for (var i = 0u; i < CHUNK / 4u; i++) { found = max(found, scores[my_head * (CHUNK / 4u) + i]); }
            let now = max(max(found.x, found.y), max(found.z, found.w));
            let w = select(0.0, exp(scores[g.lane / 4u][g.lane % 4u] - now), my_place < count);
            weights[g.lane] = w;
            total = total * exp(largest - now) + w;
            largest = now;
            if (my_place == 0u) { maxima[my_head] = now; }
        }
        workgroupBarrier();
#repeat h TEAM
        let correction = exp(before[h] - maxima[h]);
        before[h] = maxima[h];
#repeat e EACH
        sums[h * u32(EACH) + e] *= correction;
#end
#end
#repeat j VALUES
        let t = spread + j * SPREAD;
        if (t < count) {
#repeat e EACH
            let v = loaded(value[j * u32(EACH) + e]);
#repeat h TEAM
            sums[h * u32(EACH) + e] = fma(vec4(weights[h * CHUNK + t]), v, sums[h * u32(EACH) + e]);
#end
#end
        }
#end
        if (more) {
#repeat j VALUES
#repeat e EACH
            value[j * u32(EACH) + e] = value_of(now + min(spread + j * SPREAD, CHUNK - 1u), min(column + e * COLUMNS, QUADS - 1u));
#end
#end
        }
    }
    workgroupBarrier();
    if (my_head < HEADS) { scores[g.lane / 4u][g.lane % 4u] = total; }
#repeat h TEAM
    let head = m * heads + first_head + h;
#repeat e EACH
    workgroupBarrier();
    if (spread < SPREAD) { sums_of[g.lane] = sums[h * u32(EACH) + e]; }
    workgroupBarrier();
    let i = g.lane + e * COLUMNS;
    if (g.lane < COLUMNS && i < QUADS) {
        var sum = vec4(0.0);
        for (var s = 0u; s < SPREAD; s++) { sum += sums_of[s * COLUMNS + g.lane]; }
        var totals = vec4(0.0);
        for (var t = 0u; t < CHUNK / 4u; t++) { totals += scores[h * (CHUNK / 4u) + t]; }
        let all = dot(totals, vec4(1.0));
#if SPLIT
        let to = (head * u32(SPLITS) + grid.id.z) * (QUADS + 1u);
        out[to + i] = sum;
        if (i == 0u) { out[to + QUADS] = vec4(before[h], all, 0.0, 0.0); }
#else
        out[head * QUADS + i] = sum / all;
#endif
    }
#end
#end
}
