// Products of 16 weights and 16 activations, whose codes are the exponents of halves, as in ternary_decode: eight products fit a half
// exactly.
#define CODES 0x0C000C00u
#define UNIT 16384.0f /* 2^14: what one is of the sums */

// 16 activations as halves: of each word bytes 0 and 2 in `even`, 1 and 3 in `odd`; and their sum.
struct Chunk {
    half2 even[4], odd[4];
    int sum;
};

// Activations k to k + 15 of a row of x, k a multiple of 16; zero beyond COLS, which is a multiple of 4.
inline Chunk load_x(device const char *row, int k) {
    Chunk made;
    made.sum = 0;
    for (int word = 0; word < 4; word++) {
        char4 v = k + 4 * word < COLS ? *(device const char4 *)(row + k + 4 * word) : char4(0);
        made.even[word] = half2(half(v.x), half(v.z));
        made.odd[word] = half2(half(v.y), half(v.w));
        made.sum += sum4(v);
    }
    return made;
}

// UNIT parts of the products of 16 codes, at a bit pair of `c`, and 16 activations.
inline float2 products(uint4 c, int pair, Chunk x) {
    half2 sum = half2(half(0.0f), half(0.0f));
    for (int word = 0; word < 4; word++) {
        uint even = c[word] << uint(4 + 2 * pair), odd = pair < 2 ? c[word] >> uint(4 - 2 * pair) : c[word] << uint(2 * pair - 4);
        sum = fma(as_type<half2>(even & CODES), x.even[word], sum);
        sum = fma(as_type<half2>(odd & CODES), x.odd[word], sum);
    }
    return float2(sum);
}
