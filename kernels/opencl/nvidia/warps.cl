// Each instruction that dense_decode and the kernels named _mma need of a driver's compiler, once: a device whose driver does not
// build this is given the others. One warp; `at` is read and written.
#include "nvidia/warps.clh"

kernel __attribute__((reqd_work_group_size(WARP, 1, 1))) OF_WARPS void warps(global uint4 *at) {
    local uint4 rows[2 * WARP];
    int lane = get_local_id(0);
    copy_async(rows + lane, at + lane, 1);
    copy_async(rows + WARP + lane, at + lane, 0);
    COPY_COMMIT;
    COPY_WAIT(0);
    barrier(CLK_LOCAL_MEM_FENCE);
    uint4 a = load_matrices(rows + lane), b = load_turned(rows + WARP + lane), c = stream(at + lane);
    int4 sums = mma_signed(mma_int8((int4)(0), a.x, a.y, a.z, a.w, b.x, transposed(c.x)), a.x, a.y, a.z, a.w, b.x, b.y);
    float4 more = mma_f16((float4)(0.0f), a.x, a.y, a.z, a.w, b.z, halves(half_of(c.y), power(half_of(c.z))));
    fence();
    at[lane] = as_uint4(sums) + as_uint4(more * warp_add(more.x) * warp_max(fabs(more.y))) + (uint4)(warp_sum(lane));
}
