// Loads of 16 bytes of the cache's rows, or of 8 codes in two words with the row's scale in the third.
#include "cache.glsl"
#define ROW_LOADS (DIM / (KV_F16 != 0 || KV_I8 != 0 ? 8 : 4))
#define LOAD_OF(name, cache) uvec4 name(uint block, uint row, uint column) { \
        if (KV_I8 == 0) return cache[(block * BLOCK_ROWS + row) * ROW_LOADS + column]; \
        uint word = block * BLOCK_WORDS + row * (DIM / 4) + 2 * column, scale = block * BLOCK_WORDS + BLOCK_CODES + row; \
        uvec4 codes = cache[word / 4]; \
        return uvec4((word & 2) != 0 ? codes.zw : codes.xy, cache[scale / 4][scale % 4], 0); \
    }
LOAD_OF(key_load, keys)
LOAD_OF(value_load, values)
