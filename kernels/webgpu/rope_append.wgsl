// Rotates q in place, stores rotated k, and v, in the cache. A workgroup per token and head (q heads, k heads, v heads). An
// invocation stores two dimensions at a time, which make whole words of an f16 cache. PAIRS: of a head that are rotated; 0: all.
// NORMS_LAST: heads of q and k are normed after their rotation.
#if NORMS_LAST
struct Args { token_seq: i32, seq_begin: i32, seq_len: i32, block_table: i32, max_blocks: i32, heads: i32, kv_heads: i32, eps: f32 }
#else
struct Args { token_seq: i32, seq_begin: i32, seq_len: i32, block_table: i32, max_blocks: i32, heads: i32, kv_heads: i32 }
#endif
@group(0) @binding(0) var<storage, read> step: array<i32>;
@group(0) @binding(1) var<storage, read_write> qkv: array<f32>;
#if KV_I8
@group(0) @binding(2) var<storage, read_write> keys: array<u32>;
@group(0) @binding(3) var<storage, read_write> values: array<u32>;
#else
#if KV_F16
@group(0) @binding(2) var<storage, read_write> keys: array<u32>;
@group(0) @binding(3) var<storage, read_write> values: array<u32>;
#else
@group(0) @binding(2) var<storage, read_write> keys: array<vec2<f32>>;
@group(0) @binding(3) var<storage, read_write> values: array<vec2<f32>>;
#endif
#endif
@group(0) @binding(4) var<storage, read> cosines: array<f32>;
@group(0) @binding(5) var<storage, read> sines: array<f32>;
#if NORMS_LAST
@group(0) @binding(6) var<storage, read> q_norm: array<f32>;
@group(0) @binding(7) var<storage, read> k_norm: array<f32>;
@group(0) @binding(8) var<uniform> args: Args;
#else
@group(0) @binding(6) var<uniform> args: Args;
#endif

#include "cache.wgsl"
#if PAIRS
const TURNED = PAIRS;
#else
const TURNED = DIM / 2;
#endif
// Between the members of a pair, and between one pair and the next.
#if NEOX
const APART = TURNED;
const NEXT = 1;
#else
const APART = 1;
const NEXT = 2;
#endif
#if KV_I8
var<workgroup> exact: array<vec2<f32>, DIM / 2>;  // a row before it becomes codes
var<workgroup> greatest: atomic<u32>;
#else
#if KV_F16
fn stored(value: vec2<f32>) -> u32 { return pack2x16float(value); }
#else
fn stored(value: vec2<f32>) -> vec2<f32> { return value; }
#endif
#endif

fn put_key(place: i32, i: i32, value: vec2<f32>) {
#if KV_I8
    exact[i] = value;
#else
    keys[place + i] = stored(value);
#endif
}

fn put_value(place: i32, i: i32, value: vec2<f32>) {
#if KV_I8
    exact[i] = value;
#else
    values[place + i] = stored(value);
#endif
}

// Pair i of the head at `row`, rotated; `angles` are its position's.
fn rotated_pair(row: i32, i: i32, angles: i32) -> vec2<f32> {
    let first = row + i * NEXT;
    let a = qkv[first];
    let b = qkv[first + APART];
    let c = cosines[angles + i];
    let s = sines[angles + i];
    return vec2(a * c - b * s, b * c + a * s);
}

// Dimension d of the head at `row`, rotated where it belongs to a pair; `angles` are its position's.
fn rotated(row: i32, d: i32, angles: i32) -> f32 {
    if (d >= 2 * TURNED) { return qkv[row + d]; }
    let pair = d / NEXT % TURNED;
    let both = rotated_pair(row, pair, angles);
    return select(both.y, both.x, d == pair * NEXT);
}

#if NORMS_LAST
// The root of the mean square of the head at `row`, rotated.
fn root_of(g: Group, row: i32, angles: i32) -> f32 {
    var squares = 0.0;
    for (var i = i32(g.lane); i < TURNED; i += WG) {
        let pair = rotated_pair(row, i, angles);
        squares += dot(pair, pair);
    }
    for (var i = 2 * TURNED + i32(g.lane); i < DIM; i += WG) { squares += qkv[row + i] * qkv[row + i]; }
    return sqrt(group_sum(g, squares) / f32(DIM) + args.eps);
}

fn normed(value: f32, d: i32, head: i32, root: f32) -> f32 {
    return value * select(k_norm[d], q_norm[d], head < args.heads) / root;
}
#else
fn root_of(g: Group, row: i32, angles: i32) -> f32 { return 1.0; }

fn normed(value: f32, d: i32, head: i32, root: f32) -> f32 { return value; }
#endif

@compute @workgroup_size(WG)
fn rope_append(grid: Grid, g: Group) {
    let m = i32(grid.id.x);
    if (m >= step[STEP_TOKENS]) { return; }
    let head = i32(grid.id.y);
    let sequence = step[args.token_seq + m];
    let position = step[args.seq_len + sequence] - step[args.seq_begin + sequence + 1] + m;
    let row = (m * (args.heads + 2 * args.kv_heads) + head) * DIM;
    let block = step[args.block_table + sequence * args.max_blocks + position / BLOCK];
    let is_value = head >= args.heads + args.kv_heads;
    let kv_head = head - args.heads - select(0, args.kv_heads, is_value);
    let place = ((block * BLOCK + position % BLOCK) * args.kv_heads + kv_head) * (DIM / 2);
    let angles = position * TURNED;
    let root = root_of(g, row, angles);
    if (head < args.heads) {
        for (var i = i32(g.lane); i < TURNED; i += WG) {
            let first = i * NEXT;
            let pair = rotated_pair(row, i, angles);
            qkv[row + first] = normed(pair.x, first, head, root);
            qkv[row + first + APART] = normed(pair.y, first + APART, head, root);
        }
#if NORMS_LAST
        for (var i = 2 * TURNED + i32(g.lane); i < DIM; i += WG) { qkv[row + i] = normed(qkv[row + i], i, head, root); }
#endif
        return;
    }
    for (var i = i32(g.lane); i < DIM / 2; i += WG) {
        let d = 2 * i;
        if (is_value) {
            put_value(place, i, vec2(qkv[row + d], qkv[row + d + 1]));
        } else {
            let key = vec2(normed(rotated(row, d, angles), d, head, root), normed(rotated(row, d + 1, angles), d + 1, head, root));
            put_key(place, i, key);
        }
    }
#if KV_I8
    if (g.lane == 0u) { atomicStore(&greatest, 0u); }
    workgroupBarrier();
    for (var i = i32(g.lane); i < DIM / 4; i += WG) {
        atomicMax(&greatest, magnitude_bits(vec4(exact[2 * i], exact[2 * i + 1])));
    }
    workgroupBarrier();
    let unit = row_unit(atomicLoad(&greatest));
    let rows = u32(BLOCK * args.kv_heads);
    let to = row_of(u32(block), u32(position % BLOCK * args.kv_heads + kv_head), rows);
    for (var i = i32(g.lane); i < DIM / 4; i += WG) {
        let codes = quantised(vec4(exact[2 * i], exact[2 * i + 1]) * unit.x);
        if (is_value) { values[to.codes + u32(i)] = codes; } else { keys[to.codes + u32(i)] = codes; }
    }
    if (g.lane == 0u) {
        if (is_value) { values[to.scale] = bitcast<u32>(unit.y); } else { keys[to.scale] = bitcast<u32>(unit.y); }
    }
#endif
}
