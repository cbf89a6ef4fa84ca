// Rows of x for the head of a ternary table: each element as three int8 digits of 128, of 22 bits below the greatest magnitude of its
// GROUP columns, and the value of a unit of them. One work-group a row; WG is a multiple of the GROUP / 4 work-items of a group.
#include "nvidia/warps.clh"

#define LANES (GROUP / 4)
#define GREATEST 2080768.0f /* 127 * 128 * 128 */
#define MIN_LARGEST 2.5e-32f      /* below it a group is zeros: a unit would be no normal number */

kernel __attribute__((reqd_work_group_size(WG, 1, 1))) OF_WARPS void table_digits(
    global const int *step, global const float4 *x, global char4 *digits, global float *units) {
    int r = get_group_id(0);
    if (r >= STEP_ROWS(step)) return;
    for (int first = 0; first < COLS / 4; first += WG) {
        int k = first + get_local_id(0);
        float4 v = k < COLS / 4 ? x[(size_t)r * (COLS / 4) + k] : (float4)(0.0f);
        // The bits of magnitudes order as they do, those of infinities and of what is no number last.
        uint largest = max(max(as_uint(fabs(v.x)), as_uint(fabs(v.y))), max(as_uint(fabs(v.z)), as_uint(fabs(v.w))));
        for (int i = LANES / 2; i > 0; i /= 2) largest = max(largest, as_uint(shuffle_xor(as_float(largest), i)));
        int finite = largest < 0x7F800000u;
        float factor = finite && as_float(largest) >= MIN_LARGEST ? GREATEST / as_float(largest) : 0.0f;
        if (!finite) v = (float4)(0.0f);
        int4 whole = convert_int4_rte(v * factor), high = whole + 8192 >> 14, rest = whole - (high << 14), middle = rest + 64 >> 7;
        if (k >= COLS / 4) continue;
        global char4 *to = digits + (size_t)r * 3 * (COLS / 4) + k;
        to[0] = convert_char4(high), to[COLS / 4] = convert_char4(middle), to[2 * (COLS / 4)] = convert_char4(rest - (middle << 7));
        if (k % LANES == 0)
            units[(size_t)r * (COLS / GROUP) + k / LANES] = !finite ? as_float(0x7FC00000) : factor > 0.0f ? as_float(largest) / GREATEST : 0.0f;
    }
}
