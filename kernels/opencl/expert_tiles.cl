// Groups a step's pairs of token and expert by expert, for products of several rows with the same matrix. One work-group.
//
// `order` has the pairs, those of an expert next to each other; each tile has its expert, its first place in `order`, and its pairs,
// TOKENS at most. Tiles that are not needed have none.
kernel void expert_tiles(global const int *step, global const int *ids, global int *order, global int *tiles, int top, int most) {
    local int next[EXPERTS]; /* first the number of pairs of each expert, then the place of its next one */
    int item = get_local_id(0), pairs = STEP_TOKENS(step) * top;
    for (int e = item; e < EXPERTS; e += WG) next[e] = 0;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int i = item; i < pairs; i += WG) atomic_inc(&next[ids[i]]);
    barrier(CLK_LOCAL_MEM_FENCE);
    if (item == 0) {
        int at = 0, tile = 0;
        for (int e = 0; e < EXPERTS; e++) {
            int count = next[e];
            next[e] = at;
            for (int begin = 0; begin < count; begin += TOKENS, tile++) {
                tiles[3 * tile] = e;
                tiles[3 * tile + 1] = at + begin;
                tiles[3 * tile + 2] = min(count - begin, TOKENS);
            }
            at += count;
        }
        for (; tile < most; tile++) tiles[3 * tile + 2] = 0;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int i = item; i < pairs; i += WG) order[atomic_inc(&next[ids[i]])] = i;
}
