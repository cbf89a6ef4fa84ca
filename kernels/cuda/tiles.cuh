// Sizes of the kernels of tiles. A stage of the ring has BN tokens' activations, 128 bytes each, then BM rows' codes, 32 bytes each.
#include "wgmma.cuh"
#define NT (BN / 8)
#define BLOCKS (ROW_BYTES / 32)
#define STAGE (BN * 128 + BM * 32)
