/*
 * The native library as a process: it does what it is told on stdin, so that a test can drive kernels of another
 * processor or system. A request is a word that says what to do, and its arguments as 64-bit words.
 */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#if defined(_WIN32)
#include <fcntl.h>
#include <io.h>
#endif

enum { READ, WRITE, CALL };

typedef uint64_t word_t;
word_t bitnet_level(int), bitnet_level_name(word_t), bitnet_packed_bytes(word_t, int64_t, int64_t, int64_t, int64_t);
bool bitnet_level_runs(word_t), bitnet_one_bit(word_t);
word_t bitnet_op_size(void), bitnet_program_size(void), bitnet_pages_alloc(size_t), bitnet_pool_new(int);
void bitnet_pages_free(word_t, size_t), bitnet_pool_delete(word_t), bitnet_executable_delete(word_t);
void bitnet_pack(word_t, word_t, word_t);
word_t bitnet_executable_new(word_t, word_t, int, word_t), bitnet_executable_bytes(word_t);
void bitnet_executable_run(word_t, word_t, int32_t, word_t, word_t);
int64_t bitnet_executable_scored(word_t);
bool bitnet_executable_exact(word_t);
size_t bitnet_head_bytes(word_t, int64_t, int64_t);
bool bitnet_head_pack(word_t, word_t, int, word_t, word_t);
word_t bitnet_executable_kernel(word_t, int), bitnet_packed_scales(word_t, int64_t, int64_t, int64_t);

static void take(void *to, size_t size) {
    if (fread(to, 1, size, stdin) != size) exit(0); /* the test is over */
}

/* Numbered as bitnet.core.cpu.native.FUNCTIONS lists them. */
static word_t call(word_t function, const word_t *a) {
    switch (function) {
        case 0: return bitnet_level((int)a[0]);
        case 1: return bitnet_level_name(a[0]);
        case 2: return bitnet_level_runs(a[0]);
        case 3: return bitnet_packed_bytes(a[0], (int64_t)a[1], (int64_t)a[2], (int64_t)a[3], (int64_t)a[4]);
        case 4: return bitnet_op_size();
        case 5: return bitnet_program_size();
        case 6: return bitnet_pages_alloc(a[0]);
        case 7: return bitnet_pages_free(a[0], a[1]), 0;
        case 8: return bitnet_pool_new((int)a[0]);
        case 9: return bitnet_pool_delete(a[0]), 0;
        case 10: return bitnet_pack(a[0], a[1], a[2]), 0;
        case 11: return bitnet_executable_new(a[0], a[1], (int)a[2], a[3]);
        case 12: return bitnet_executable_delete(a[0]), 0;
        case 13: return bitnet_executable_bytes(a[0]);
        case 14: return bitnet_executable_run(a[0], a[1], (int32_t)a[2], a[3], a[4]), 0;
        case 15: return bitnet_executable_kernel(a[0], (int)a[1]);
        case 16: return bitnet_head_bytes(a[0], (int64_t)a[1], (int64_t)a[2]);
        case 17: return bitnet_head_pack(a[0], a[1], (int)a[2], a[3], a[4]);
        case 18: return (word_t)bitnet_executable_scored(a[0]);
        case 19: return bitnet_executable_exact(a[0]);
        case 20: return bitnet_packed_scales(a[0], (int64_t)a[1], (int64_t)a[2], (int64_t)a[3]);
        case 21: return bitnet_one_bit(a[0]);
        default: abort();
    }
}

int main(void) {
#if defined(_WIN32)
    _setmode(_fileno(stdin), _O_BINARY), _setmode(_fileno(stdout), _O_BINARY); /* else they are text */
#endif
    for (;;) {
        word_t request[8];
        take(request, sizeof request);
        if (request[0] == READ) {
            fwrite((const void *)(uintptr_t)request[1], 1, request[2], stdout);
        } else if (request[0] == WRITE) {
            take((void *)(uintptr_t)request[1], request[2]);
            continue;
        } else {
            const word_t result = call(request[1], request + 2);
            fwrite(&result, 1, sizeof result, stdout);
        }
        fflush(stdout);
    }
}
