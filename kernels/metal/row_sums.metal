// The sum of each row of int8 activations that norm_quant has not computed; a product with codes w + 1 subtracts it.
// A threadgroup a row.
[[kernel, max_total_threads_per_threadgroup(WG)]] void row_sums(device const int *step [[buffer(0)]], device const char *x [[buffer(1)]],
                                                                device int *sums [[buffer(2)]], PLACE) {
    threadgroup float2 scratch[SIMDGROUPS];
    Place place = PLACED;
    int m = int(group.x);
    if (m >= STEP_TOKENS(step)) return;
    int sum = 0;
    for (int k = place.item; k < COLS / 4; k += WG) sum += sum4(((device const char4 *)(x + ulong(m) * COLS))[k]);
    float total = group_sum(float(sum), scratch, place);  // exact: below 2^24, as are its parts
    if (place.item == 0) sums[m] = int(total);
}
