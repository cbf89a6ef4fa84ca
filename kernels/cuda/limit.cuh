// Gates at most `limit`, ups at most that in magnitude. What is no number stays so.
__device__ __forceinline__ float at_most(float v, float limit) { return v > limit ? limit : v; }
__device__ __forceinline__ float limited_product(float g, float u, float limit) { return act(at_most(g, limit)) * -at_most(-at_most(u, limit), limit); }
