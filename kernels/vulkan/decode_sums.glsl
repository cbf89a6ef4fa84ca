// Products of decode_layer of weights with one scale a matrix.
#define FETCH_SCALES(i, scale, row, chunk, outs, cols, two)
#define TAKE_SCALES(i)
#define BEGIN_ROWS Sums all = NONE;
#define MULTIPLY(chunk, outs, cols, lanes, two) all = products(one, other, chunk, all, CHUNKS_OF(cols), PITCH_OF(cols), two);
#define RESULTS(scale, outs, cols, lanes, two) \
    results_of(sums_of_lanes(all, lane, lanes, two), unit, scale[n], (two) ? scale[n + (outs)] : 0.0)

vec2 results_of(ivec2 sums, float unit, float one, float other) { return vec2(scaled(sums.x, unit, one), scaled(sums.y, unit, other)); }
