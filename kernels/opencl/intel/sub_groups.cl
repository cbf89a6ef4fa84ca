// What ternary_gemm_sg needs of a driver's compiler, once: a device whose driver does not build this is given other kernels.
#include "intel/sub_groups.clh"

kernel __attribute__((reqd_work_group_size(SG, 1, 1), intel_reqd_sub_group_size(SG))) void sub_groups(
    global const int *parts, global int8 *at) {
    int lane = get_sub_group_local_id();
    at[lane] = MULTIPLY(LOAD_PART(parts), at[SG + lane], at[lane]);
}
