// A tile of TILE_M rows of x by TILE_N rows of W, on 8 by 8 matrices: a threadgroup of four simdgroups, two by two, each with the
// sums of a quarter. 32 columns at a time go through threadgroup memory; rows are PITCH apart, so that neighbouring rows are in
// different banks.
#define TILE_M 32
#define TILE_N 64
#define THREADS 128
#define PITCH 40
#define OUT_PITCH (TILE_N + 4)
#define EACH_M (TILE_M / 16)
#define EACH_N (TILE_N / 16)

struct Sums {
    simdgroup_float8x8 at[EACH_M][EACH_N];
};

// A simdgroup's first row of x, and its first row of W, in the tile.
inline int down(Place place) { return place.simdgroup / 2 * (TILE_M / 2); }
inline int across(Place place) { return place.simdgroup % 2 * (TILE_N / 2); }

inline void clear(thread Sums &sums) {
    for (int i = 0; i < EACH_M; i++)
        for (int j = 0; j < EACH_N; j++) sums.at[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}

// Adds the products of 32 columns.
template <typename T>
inline void multiply(thread Sums &sums, threadgroup const T *x, threadgroup const T *w, Place place) {
    for (int k = 0; k < 32; k += 8) {
        simdgroup_matrix<T, 8, 8> left[EACH_M], right[EACH_N];
        for (int i = 0; i < EACH_M; i++) simdgroup_load(left[i], x + (down(place) + 8 * i) * PITCH + k, PITCH);
        for (int j = 0; j < EACH_N; j++)
            simdgroup_load(right[j], w + (across(place) + 8 * j) * PITCH + k, PITCH, ulong2(0, 0), true);
        for (int i = 0; i < EACH_M; i++)
            for (int j = 0; j < EACH_N; j++) simdgroup_multiply_accumulate(sums.at[i][j], left[i], right[j], sums.at[i][j]);
    }
}

// Stores the tile where all threads can read it; rows of x are OUT_PITCH apart.
inline void spread(thread Sums &sums, threadgroup float *to, Place place) {
    GROUP_BARRIER;
    for (int i = 0; i < EACH_M; i++)
        for (int j = 0; j < EACH_N; j++)
            simdgroup_store(sums.at[i][j], to + (down(place) + 8 * i) * OUT_PITCH + across(place) + 8 * j, OUT_PITCH);
    GROUP_BARRIER;
}
