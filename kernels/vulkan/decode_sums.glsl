// Products of decode_layer of weights with one scale a matrix. The codes of the next rows are requested behind a product.
const bool EARLY = false;
#define FETCH_SCALES(i, scale, row, chunk, outs, cols, two)
#define TAKE_SCALES(i)
#define BEGIN_ROWS Sums all = NONE;
#define MULTIPLY(chunk, outs, cols, lanes, two) all = products(one, other, chunk, all, CHUNKS_OF(cols), PITCH_OF(cols), two);
#define END_ROWS(scale, outs, cols, lanes, two) \
    ivec2 sums = sums_of_lanes(all, lane, lanes, two); \
    vec2 results = vec2(0.0); \
    if (stores) results = vec2(scaled(sums.x, unit, scale[n]), (two) ? scaled(sums.y, unit, scale[n + (outs)]) : 0.0);
