// What the kernels for AMD's matrix units ask of a compiler: a device whose driver does not build this is given the others. One wave.
#include "amd/matrix.clh"

kernel __attribute__((reqd_work_group_size(MATRIX_WAVE, 1, 1))) OF_WAVES void waves(global unit *at) {
    int lane = get_local_id(0);
    unit a[PLANES * UNITS];
    for (int i = 0; i < PLANES * UNITS; i++) a[i] = at[i * MATRIX_WAVE + lane];
    sums16 sums = multiplied(a, a, (sums16)(0));
    for (int i = 0; i < D_ROWS; i++) ((global int *)at)[(size_t)D_ROW(i, lane) * 16 + lane % 16] = sums[i];
    halves16 b = as_part((floats16)(column_add(lane, lane)), lane);
    floats16 found = multiplied_halves(b, b, (floats16)(column_max(lane, lane)));
    for (int i = 0; i < D_ROWS; i++) ((global float *)at)[(size_t)(16 + D_ROW(i, lane)) * 16 + lane % 16] = found[i];
}
