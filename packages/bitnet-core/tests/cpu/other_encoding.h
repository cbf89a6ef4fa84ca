/* Before the sources of the AVX2 level with VNNI: its `vpdpbusd` in AVX-512's encoding, and nothing else of AVX-512. */
#include <immintrin.h>

#define __AVXVNNI__ 1
#define _mm256_dpbusd_avx_epi32 _mm256_dpbusd_epi32
#undef __AVX512F__
#undef __AVX512VL__
#undef __AVX512VNNI__
