// Groups a step's pairs of token and expert by expert, for products of several rows with the same matrix. One work-group.
//
// `order` has the pairs, those of an expert next to each other; each tile has its expert, its first place in `order`, and its pairs,
// TOKENS at most. Tiles that are not needed have none.
layout(constant_id = 1) const int EXPERTS = 1;
layout(constant_id = 2) const int TOKENS = 8;
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, int, ids);
BUFFER(2, writeonly, int, order);
BUFFER(3, writeonly, int, tiles);
layout(push_constant) uniform Push { int top, tile_count; };
shared int next[EXPERTS];  // first the number of pairs of each expert, then the place of its next one

KERNEL(expert_tiles) {
    int item = LANE, pairs = STEP_TOKENS * top;
    for (int e = item; e < EXPERTS; e += WG) next[e] = 0;
    barrier();
    for (int i = item; i < pairs; i += WG) atomicAdd(next[ids[i]], 1);
    barrier();
    if (item == 0) {
        int at = 0, tile = 0;
        for (int e = 0; e < EXPERTS; e++) {
            int count = next[e];
            next[e] = at;
            for (int begin = 0; begin < count; begin += TOKENS) {
                tiles[3 * tile] = e;
                tiles[3 * tile + 1] = at + begin;
                tiles[3 * tile + 2] = min(count - begin, TOKENS);
                tile++;
            }
            at += count;
        }
        for (; tile < tile_count; tile++) tiles[3 * tile + 2] = 0;
    }
    barrier();
    for (int i = item; i < pairs; i += WG) order[atomicAdd(next[ids[i]], 1)] = i;
}
