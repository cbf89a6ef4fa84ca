// A workgroup chooses the token of one row. The threshold of top-k is found by bisection over the order-preserving integer form
// of floats, so that no sort is needed and ties are all kept. That of top-p is not looked for: a token is drawn from all, and
// stays if the more likely ones have less than the wanted mass; else only those are left, and another is drawn (decision 0026).
struct Args {
    rows: i32, temperature: i32, top_k: i32, top_p: i32, min_p: i32, seed_lo: i32, seed_hi: i32,
    token_seq: i32, seq_begin: i32, seq_len: i32, n: i32,
}
@group(0) @binding(0) var<storage, read> step: array<i32>;
@group(0) @binding(1) var<storage, read> logits: array<f32>;
@group(0) @binding(2) var<storage, read_write> out: array<i32>;
@group(0) @binding(3) var<uniform> args: Args;

var<workgroup> best_value: array<f32, WG>;
var<workgroup> best_index: array<i32, WG>;

fn multiply_high(a: u32, b: u32) -> u32 {
    let al = a & 0xFFFFu;
    let ah = a >> 16u;
    let bl = b & 0xFFFFu;
    let bh = b >> 16u;
    let middle = ah * bl + ((al * bl) >> 16u);
    return ah * bh + (middle >> 16u) + (((middle & 0xFFFFu) + al * bh) >> 16u);
}

// -ln(1 - t). WGSL's log may be off by 2^-21 near 1, where the winners are and where a relative error counts: there the series
// of 2 atanh(t / (2 - t)) is summed instead.
fn minus_log_of_rest(t: f32) -> f32 {
    if (t > 0.5) { return -log(1.0 - t); }
    let s = t / (2.0 - t);
    let q = s * s;
    var sum = 1.0 / 17.0;
    for (var k = 15.0; k > 0.0; k -= 2.0) { sum = sum * q + 1.0 / k; }
    return 2.0 * s * sum;
}

// Gumbel variates of the tokens v ... v + 3, v a multiple of 4: the lanes of Philox4x32-10 (Salmon et al. 2011) at counter
// (v / 4, position, 0, 0).
fn gumbels(seed_lo: u32, seed_hi: u32, v: u32, position: u32) -> vec4<f32> {
    var c = vec4(v >> 2u, position, 0u, 0u);
    var key = vec2(seed_lo, seed_hi);
    for (var round = 0; round < 10; round++) {
        let low = vec2(c.x * 0xD2511F53u, c.z * 0xCD9E8D57u);
        let high = vec2(multiply_high(c.x, 0xD2511F53u), multiply_high(c.z, 0xCD9E8D57u));
        c = vec4(high.y ^ c.y ^ key.x, low.y, high.x ^ c.w ^ key.y, low.x);
        key += vec2(0x9E3779B9u, 0xBB67AE85u);
    }
    // u = (n + 0.5) / 2^23, so 1 - u is exact too: a 23-bit number and a half take all bits of an f32.
    let rest = (vec4<f32>(vec4(0x7FFFFFu) - (c >> vec4(9u))) + 0.5) * 0x1p-23;
    return -log(vec4(minus_log_of_rest(rest.x), minus_log_of_rest(rest.y), minus_log_of_rest(rest.z), minus_log_of_rest(rest.w)));
}

// Logits at a time: all are requested before the first is used.
const BATCH = 8;
alias Batch = array<f32, BATCH>;

// z of the tokens first + lane, and so on in steps of WG; past the end, of the last one.
fn load(g: Group, row: i32, first: i32, inverse: f32) -> Batch {
    var batch: Batch;
#repeat j 8
    batch[j] = logits[row + min(first + i32(g.lane + j * u32(WG)), args.n - 1)] * inverse;
#end
    return batch;
}

var<workgroup> measured: f32;

// Sum over the tokens of a row with key >= least: of 1, or (mass) of e^(z - top). WGSL holds it for uniform.
fn measure(g: Group, row: i32, inverse: f32, least: u32, mass: bool, top: f32) -> f32 {
    var sum = 0.0;
    for (var first = 0; first < args.n; first += BATCH * WG) {
        let z = load(g, row, first, inverse);
#repeat j 8
        if (first + i32(g.lane + j * u32(WG)) < args.n && float_key(z[j]) >= least) { sum += select(1.0, exp(z[j] - top), mass); }
#end
    }
    let total = group_sum(g, sum);
    if (g.lane == 0u) { measured = total; }
    return workgroupUniformLoad(&measured);
}

// The greatest key that so many tokens reach.
fn threshold(g: Group, row: i32, inverse: f32, wanted: f32) -> u32 {
    var low = 0u;
    var high = 0xFFFFFFFFu;
    while (low < high) {
        let middle = low + (high - low) / 2u + 1u;
        let count = measure(g, row, inverse, middle, false, 0.0);
        if (count >= wanted) { low = middle; } else { high = middle - 1u; }
        if (count == wanted) { break; }
    }
    return low;
}

@compute @workgroup_size(WG)
fn sample(grid: Grid, g: Group) {
    let r = i32(grid.id.x);
    if (r >= step[STEP_ROWS]) { return; }
    let row = r * args.n;
    let temperature = bitcast<f32>(step[args.temperature + r]);
    let greedy = temperature == 0.0;
    let inverse = select(1.0 / temperature, 1.0, greedy);
    var least = 0u;
    var position = 0u;
    var floor_z = LOWEST;
    var top = LOWEST;
    var top_p = 1.0;
    var wanted = 0.0;
    if (!greedy) {
        let m = step[args.rows + r];
        let s = step[args.token_seq + m];
        position = u32(step[args.seq_len + s] - step[args.seq_begin + s + 1] + m + 1);
        for (var first = 0; first < args.n; first += BATCH * WG) {
            let z = load(g, row, first, inverse);
#repeat j 8
            top = max(top, z[j]);
#end
        }
        top = group_max(g, top);
        let top_k = step[args.top_k + r];
        top_p = bitcast<f32>(step[args.top_p + r]);
        let min_p = bitcast<f32>(step[args.min_p + r]);
        if (top_k > 0 && top_k < args.n) { least = threshold(g, row, inverse, f32(top_k)); }
        if (top_p < 1.0) { wanted = top_p * measure(g, row, inverse, least, true, top); }
        if (min_p > 0.0) { floor_z = top + log(min_p); }
    }
    loop {
        var best = LOWEST;
        var index = args.n;
        if (greedy) {
            for (var first = 0; first < args.n; first += BATCH * WG) {
                let z = load(g, row, first, inverse);
#repeat j 8
                let v = first + i32(g.lane + j * u32(WG));
                if (v < args.n && no_number(z[j])) {
                    index = -1;
                } else if (v < args.n && index >= 0 && (z[j] > best || index == args.n)) {
                    best = z[j];
                    index = v;
                }
#end
            }
        } else {
            for (var first = 4 * i32(g.lane); first < args.n; first += 4 * WG) {
                var z: vec4<f32>;
                var left: vec4<bool>;  // of these tokens
#repeat i 4
                z[i] = logits[row + min(first + i32(i), args.n - 1)] * inverse;
                left[i] = first + i32(i) < args.n && float_key(z[i]) >= least && !(z[i] < floor_z);
                if (no_number(z[i])) { index = -1; }
#end
                if (index < 0 || !any(left)) { continue; }
                z += gumbels(u32(step[args.seed_lo + r]), u32(step[args.seed_hi + r]), u32(first), position);
#repeat i 4
                if (left[i] && (z[i] > best || index == args.n)) {
                    best = z[i];
                    index = first + i32(i);
                }
#end
            }
        }
        best_value[g.lane] = best;
        best_index[g.lane] = index;
        for (var half = u32(WG) / 2u; half > 0u; half /= 2u) {
            workgroupBarrier();
            if (g.lane < half) {
                let other = best_value[g.lane + half];
                let other_index = best_index[g.lane + half];
                let mine = best_index[g.lane];
                if (mine >= 0 && other_index < args.n && (other_index < 0 || mine == args.n || other > best_value[g.lane] ||
                                                          (other == best_value[g.lane] && other_index < mine))) {
                    best_value[g.lane] = other;
                    best_index[g.lane] = other_index;
                }
            }
        }
        let chosen = workgroupUniformLoad(&best_index[0]);
        if (top_p >= 1.0 || chosen < 0 || chosen >= args.n) { break; }
        let more = float_key(logits[row + chosen] * inverse) + 1u;
        let mass = measure(g, row, inverse, more, true, top);  // of the tokens more likely than the chosen one
        if (mass == 0.0 || !(mass >= wanted)) { break; }
        least = more;
    }
    if (g.lane == 0u) { out[r] = best_index[0]; }
}
