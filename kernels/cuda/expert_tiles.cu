// Groups a step's pairs of token and expert by expert, for products of several rows with the same matrix. One block.
//
// `order` has the pairs, those of an expert next to each other; each tile has its expert, its first place in `order`, and its pairs,
// TILE at most. Tiles that are not needed have none.
#define EACH ((EXPERTS + WARP - 1) / WARP) /* experts of a lane: neighbours */

extern "C" __global__ void __launch_bounds__(WG)
expert_tiles(const int *step, const int *ids, int *order, int *tiles, int top, int tile_count) {
    __shared__ int next[EXPERTS], used;  // first the number of pairs of each expert, then the place of its next one
    start_dependents();
    wait_for_before();
    int pairs = STEP_TOKENS(step) * top;
    for (int e = threadIdx.x; e < EXPERTS; e += WG) next[e] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < pairs; i += WG) atomicAdd(next + ids[i], 1);
    __syncthreads();
    if (threadIdx.x < WARP) {
        int first = threadIdx.x * EACH, last = min(first + EACH, EXPERTS), at = 0, tile = 0;
        for (int e = first; e < last; e++) at += next[e], tile += (next[e] + TILE - 1) / TILE;
        int count_here = at, tiles_here = tile;
        for (int i = 1; i < WARP; i *= 2) {  // sums of all lanes up to this one
            int a = __shfl_up_sync(FULL, at, i), t = __shfl_up_sync(FULL, tile, i);
            if (threadIdx.x >= i) at += a, tile += t;
        }
        if (threadIdx.x == WARP - 1) used = tile;
        at -= count_here, tile -= tiles_here;
        for (int e = first; e < last; e++) {
            int count = next[e];
            next[e] = at;
            for (int begin = 0; begin < count; begin += TILE, tile++) {
                tiles[3 * tile] = e, tiles[3 * tile + 1] = at + begin, tiles[3 * tile + 2] = min(count - begin, TILE);
            }
            at += count;
        }
    }
    __syncthreads();
    for (int tile = used + threadIdx.x; tile < tile_count; tile += WG) tiles[3 * tile + 2] = 0;
    for (int i = threadIdx.x; i < pairs; i += WG) order[atomicAdd(next + ids[i], 1)] = i;
}
