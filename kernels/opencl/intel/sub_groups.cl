// What the kernels of this folder need of a driver's compiler, once: a device whose driver does not build this is given others.
#include "intel/sub_groups.clh"

kernel __attribute__((reqd_work_group_size(SG, 1, 1), intel_reqd_sub_group_size(SG))) void sub_groups(
    global const int *parts, global int8 *at) {
    int lane = get_sub_group_local_id();
    at[lane] = MULTIPLY(LOAD_PART(parts), at[SG + lane], at[lane]);
#if XMX
    at[2 * SG + lane] = as_int8(MULTIPLY_F16(LOAD_PART(parts), at[SG + lane], as_float8(at[lane])));
#endif
}
