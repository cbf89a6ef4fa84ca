/* The levels that this processor and operating system support. */
#define _GNU_SOURCE /* syscall */
#include "level.h"

#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

static unsigned word(unsigned leaf, unsigned subleaf, int which) {
    unsigned out[4] = {0};
    if (!__get_cpuid_count(leaf, subleaf, &out[0], &out[1], &out[2], &out[3])) return 0;
    return out[which];
}

/* Registers that the operating system saves, from XCR0; none where it does not use XSAVE. */
static unsigned saved_registers(void) {
    if (!(word(1, 0, 2) & bit_OSXSAVE)) return 0;
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

static bool has_avx2(void) {
    const unsigned leaf1 = bit_FMA | bit_F16C | bit_AVX, leaf7 = bit_AVX2 | bit_BMI | bit_BMI2;
    const bool registers = (saved_registers() & 0x06) == 0x06; /* xmm, ymm */
    return registers && (word(1, 0, 2) & leaf1) == leaf1 && (word(7, 0, 1) & leaf7) == leaf7;
}

static bool has_avx512(void) {
    const unsigned ebx = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ | bit_AVX512CD;
    const bool registers = (saved_registers() & 0xe6) == 0xe6; /* and mask registers, zmm */
    return has_avx2() && registers && (word(7, 0, 1) & ebx) == ebx && (word(7, 0, 2) & bit_AVX512VNNI);
}

static bool has_vbmi(void) { return has_avx512() && (word(7, 0, 2) & bit_AVX512VBMI); }

/* AMX with int8, and GFNI, which every processor with AMX has. Linux saves AMX's 8 KB of registers only for programs
 * that ask for it once. */
static bool has_amx(void) {
#if defined(__linux__)
    const unsigned edx = 1u << 24 | 1u << 25; /* AMX-TILE, AMX-INT8 */
    if (!(word(7, 0, 2) & bit_GFNI)) return false;
    if ((word(7, 0, 3) & edx) != edx || (saved_registers() & 0x60000) != 0x60000) return false;
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
#else
    return false;
#endif
}

bool level_runs(const level_t *level) {
    if (level == &level_amx) return has_vbmi() && has_amx();
    if (level == &level_vbmi_avx512) return has_vbmi();
    if (level == &level_avx512) return has_avx512();
    if (level == &level_vnni_avx2) return has_avx2() && (word(7, 1, 0) & 1u << 4);
    if (level == &level_avx2) return has_avx2();
    return level == &level_scalar;
}

bool multipliers_are_few(void) {
    unsigned most, maker[3];
    return __get_cpuid(0, &most, &maker[0], &maker[2], &maker[1]) && memcmp(maker, "AuthenticAMD", sizeof maker) == 0;
}

#elif defined(__aarch64__)

#if defined(__linux__)
#include <sys/auxv.h>
static bool has_dot_product(void) { return getauxval(AT_HWCAP) & 1u << 20; } /* HWCAP_ASIMDDP */
#elif defined(__APPLE__)
#include <sys/sysctl.h>
static bool has_dot_product(void) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname("hw.optional.arm.FEAT_DotProd", &value, &size, NULL, 0) == 0 && value;
}
#elif defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
static bool has_dot_product(void) { return IsProcessorFeaturePresent(43); } /* PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE */
#else
static bool has_dot_product(void) { return false; }
#endif

bool level_runs(const level_t *level) {
    return level == &level_scalar || (level == &level_neon && has_dot_product());
}

#else

/* WebAssembly: who lacks an instruction refuses the whole library. */
bool level_runs(const level_t *level) { return level == &level_simd128; }

#endif

#if !defined(__x86_64__)
bool multipliers_are_few(void) { return false; }
#endif
