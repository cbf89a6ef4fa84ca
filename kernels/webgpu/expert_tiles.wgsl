// Groups a step's pairs of token and expert by expert, for products of several rows with the same matrix. One workgroup.
//
// `order` has the pairs, those of an expert next to each other; each tile has its expert, its first place in `order`, and its pairs,
// TOKENS at most. Tiles that are not needed have none.
struct Args { top: u32, tile_count: u32 }
@group(0) @binding(0) var<storage, read> step: array<i32>;
@group(0) @binding(1) var<storage, read> ids: array<u32>;
@group(0) @binding(2) var<storage, read_write> order: array<u32>;
@group(0) @binding(3) var<storage, read_write> tiles: array<u32>;
@group(0) @binding(4) var<uniform> args: Args;

// First the number of pairs of each expert, then the place of its next one.
var<workgroup> next: array<atomic<u32>, EXPERTS>;

@compute @workgroup_size(WG)
fn expert_tiles(g: Group) {
    let pairs = u32(step[STEP_TOKENS]) * args.top;
    for (var e = g.lane; e < u32(EXPERTS); e += u32(WG)) { atomicStore(&next[e], 0u); }
    workgroupBarrier();
    for (var i = g.lane; i < pairs; i += u32(WG)) { atomicAdd(&next[ids[i]], 1u); }
    workgroupBarrier();
    if (g.lane == 0u) {
        var at = 0u;
        var tile = 0u;
        for (var e = 0u; e < u32(EXPERTS); e++) {
            let count = atomicLoad(&next[e]);
            atomicStore(&next[e], at);
            for (var begin = 0u; begin < count; begin += u32(TOKENS)) {
                tiles[3u * tile] = e;
                tiles[3u * tile + 1u] = at + begin;
                tiles[3u * tile + 2u] = min(count - begin, u32(TOKENS));
                tile++;
            }
            at += count;
        }
        for (; tile < args.tile_count; tile++) { tiles[3u * tile + 2u] = 0u; }
    }
    workgroupBarrier();
    for (var i = g.lane; i < pairs; i += u32(WG)) { order[atomicAdd(&next[ids[i]], 1u)] = i; }
}
