// The best of numbered logits: the one of the greatest key (float_key), and of equals the lowest number.
const NONE = vec2(0u, 0xFFFFFFFFu);
var<workgroup> bests: array<vec2<u32>, WG>;

fn before(a: vec2<u32>, b: vec2<u32>) -> bool { return a.x > b.x || (a.x == b.x && a.y < b.y); }

// The best of the workgroup, in every invocation.
fn group_best(g: Group, mine: vec2<u32>) -> vec2<u32> {
    workgroupBarrier();
    bests[g.lane] = mine;
    for (var half = u32(WG) / 2u; half > 0u; half /= 2u) {
        workgroupBarrier();
        if (g.lane < half && before(bests[g.lane + half], bests[g.lane])) { bests[g.lane] = bests[g.lane + half]; }
    }
    return workgroupUniformLoad(&bests[0]);
}
