// Rows of x for digits_matmul.comp: each element as three int8 digits of 128, of 22 bits below the greatest magnitude of its GROUP
// columns, and the value of a unit of them for each group. One work-group a row.
layout(constant_id = 1) const int COLS = 128;
layout(constant_id = 2) const int GROUP = 128;
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, uvec4, x);
BUFFER(2, writeonly, uint, digits);
BUFFER(3, writeonly, float, units);
const uint COUNT = COLS / GROUP, QUADS = COLS / 4;
const float GREATEST = 2080768.0;     // 127 * 128 * 128
const float MIN_LARGEST = 2.5e-32;    // below it a group is zeros: a unit would be no normal number
shared uint largest[COUNT];  // the bits of magnitudes order as they do, those of infinities and of what is no number last

uint bytes(ivec4 v) {
    uvec4 q = uvec4(v);
    return bitfieldInsert(bitfieldInsert(bitfieldInsert(q.x, q.y, 8, 8), q.z, 16, 8), q.w, 24, 8);
}

KERNEL(table_digits) {
    uint lane = LANE, r = gl_WorkGroupID.x;
    if (r >= STEP_ROWS) return;
    for (uint s = lane; s < COUNT; s += WG) largest[s] = 0;
    barrier();
    for (uint i = lane; i < QUADS; i += WG) {
        uvec4 bits = x[r * QUADS + i] & 0x7FFFFFFFu;
        atomicMax(largest[i * 4 / GROUP], max(max(bits.x, bits.y), max(bits.z, bits.w)));
    }
    barrier();
    for (uint i = lane; i < QUADS; i += WG) {
        uint bits = largest[i * 4 / GROUP];
        bool finite = bits < 0x7F800000u;
        float factor = finite && uintBitsToFloat(bits) >= MIN_LARGEST ? GREATEST / uintBitsToFloat(bits) : 0.0;
        vec4 v = finite ? uintBitsToFloat(x[r * QUADS + i]) : vec4(0.0);
        ivec4 whole = ivec4(roundEven(v * factor)), high = whole + 8192 >> 14, rest = whole - (high << 14), middle = rest + 64 >> 7;
        uint to = r * 3 * QUADS + i;
        digits[to] = bytes(high);
        digits[to + QUADS] = bytes(middle);
        digits[to + 2 * QUADS] = bytes(rest - (middle << 7));
        if (i * 4 % GROUP == 0) units[r * COUNT + i * 4 / GROUP] = !finite ? uintBitsToFloat(0x7FC00000u) : factor > 0.0 ? 1.0 / factor : 0.0;
    }
}
