// Groups a step's pairs of token and expert by expert, for products of several rows with the same matrix. One threadgroup.
//
// `order` has the pairs, those of an expert next to each other; each tile has its expert, its first place in `order`, and its pairs,
// TOKENS at most. Tiles that are not needed have none.
[[kernel, max_total_threads_per_threadgroup(WG)]] void expert_tiles(
    device const int *step [[buffer(0)]], device const int *ids [[buffer(1)]], device int *order [[buffer(2)]],
    device int *tiles [[buffer(3)]], constant int &top [[buffer(4)]], constant int &count [[buffer(5)]], PLACE) {
    threadgroup atomic_int next[EXPERTS];  // first the number of pairs of each expert, then the place of its next one
    Place place = PLACED;
    int pairs = STEP_TOKENS(step) * top;
    for (int e = place.item; e < EXPERTS; e += WG) atomic_store_explicit(&next[e], 0, memory_order_relaxed);
    GROUP_BARRIER;
    for (int i = place.item; i < pairs; i += WG) atomic_fetch_add_explicit(&next[ids[i]], 1, memory_order_relaxed);
    GROUP_BARRIER;
    if (place.item == 0) {
        int at = 0, tile = 0;
        for (int e = 0; e < EXPERTS; e++) {
            int own = atomic_load_explicit(&next[e], memory_order_relaxed);
            atomic_store_explicit(&next[e], at, memory_order_relaxed);
            for (int begin = 0; begin < own; begin += TOKENS, tile++) {
                tiles[3 * tile] = e;
                tiles[3 * tile + 1] = at + begin;
                tiles[3 * tile + 2] = min(own - begin, TOKENS);
            }
            at += own;
        }
        for (; tile < count; tile++) tiles[3 * tile + 2] = 0;
    }
    GROUP_BARRIER;
    for (int i = place.item; i < pairs; i += WG) order[atomic_fetch_add_explicit(&next[ids[i]], 1, memory_order_relaxed)] = i;
}
