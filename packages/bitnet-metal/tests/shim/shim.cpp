// Runs a kernel that was compiled for the CPU: the threads of a threadgroup are fibres, one running at a time, from one barrier (or
// function of a simdgroup) to the next. The compiler calls __asan_load4 and its like before each access (its own runtime is not
// linked): those look the address up among the launch's buffers, threadgroup memory, constants and the fibre's stack.
// Long, because barriers, functions of a simdgroup and checks of addresses share the state of the running fibre.
#include "shim.h"
#include "fibre.h"
#include "table.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

extern "C" const shim_kernel shim_table[];
extern "C" const uint32_t shim_table_size;

namespace {
enum { MAX_THREADS = 1024, LANES = 32, STRIDE = 64, STACK = 128 << 10, THREADGROUP_BYTES = 32 << 10, MAX_SHARED = 64, MAX_CONSTANT = 256 };
enum State { READY, AT_BARRIER, AT_SIMD_BARRIER, TOGETHER, DONE };

struct Fibre {
    void *sp;
    State state;
    int kind;
    uint32_t size, turn;  // of the last function of the simdgroup: size of its values, how many there were
    uint32_t quiet;       // epoch of simdgroup barriers
    shim_where where;
};
struct Region {
    const char *name;
    char *at;
    uint64_t size;
};
// Who used a byte of threadgroup memory last. Epochs count barriers; a thread is its index + 1, 0 nobody, MANY several.
struct Use {
    uint32_t epoch, quiet;
    uint16_t thread, simdgroup;
};
enum { MANY = 0xFFFF };
struct Trace {
    Use written, read;
    bool atomic;
};

Fibre fibres[MAX_THREADS];
char *stacks;
char values[MAX_THREADS / LANES][2][LANES * STRIDE];
Region shared[MAX_SHARED], constants[MAX_CONSTANT];
Trace *traces[MAX_SHARED];
uint32_t shared_count, constant_count, epoch;
uint64_t shared_bytes;
alignas(16) char dynamic[THREADGROUP_BYTES];
uint32_t dynamic_bytes;

void **buffers;
const uint64_t *sizes;
uint32_t buffer_count;
uint16_t guesses[4096];  // by address: the buffer that was there last
const shim_kernel *kernel;
Fibre *now;
void *scheduler;
char *message;
uint32_t message_size;
int result;

void leave() {
    void *unused;
    shim_switch(&unused, scheduler);
}

__attribute__((format(printf, 2, 3))) void say(int code, const char *format, ...) {
    if (result) return;
    result = code;
    if (!message_size) return;
    char text[512];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    if (now) {
        const shim_where &w = now->where;
        snprintf(message, message_size, "%s, threadgroup (%u, %u, %u), thread %u: %s", kernel->name, w.group[0], w.group[1], w.group[2],
                 w.index, text);
    } else {
        snprintf(message, message_size, "%s: %s", kernel ? kernel->name : "no kernel", text);
    }
}
#define FAIL(...) \
    do { \
        say(__VA_ARGS__); \
        if (now) leave(); \
    } while (0)

bool inside(const Region &r, const char *at, uint64_t size) { return at >= r.at && at + size <= r.at + r.size; }

// Whether `by` has a barrier behind the use `was`.
bool ordered(const Use &was, const Fibre &by) {
    if (!was.thread || was.epoch != epoch || was.thread == by.where.index + 1) return true;
    return was.thread != MANY && was.simdgroup == by.where.simdgroup && was.quiet < by.quiet;
}

void trace(uint32_t region, uint64_t offset, uint64_t size, bool writes, bool atomic) {
    const Use mine = {epoch, now->quiet, (uint16_t)(now->where.index + 1), (uint16_t)now->where.simdgroup};
    for (uint64_t i = offset; i < offset + size; i++) {
        Trace &t = traces[region][i];
        bool both = atomic && t.atomic;
        if (!both && (!ordered(t.written, *now) || (writes && !ordered(t.read, *now)))) {
            const Use &other = ordered(t.written, *now) ? t.read : t.written;
            FAIL(SHIM_RACE, "%s byte %llu of threadgroup memory `%s`, which thread %d %s without a barrier between",
                 writes ? "writes" : "reads", (unsigned long long)i, shared[region].name, other.thread == MANY ? -1 : other.thread - 1,
                 &other == &t.read ? "reads" : "writes");
        }
        if (writes) {
            t.written = mine;
            t.atomic = atomic;
        } else if (t.read.epoch == epoch && t.read.thread && t.read.thread != mine.thread) {
            if (t.read.simdgroup != mine.simdgroup) t.read.thread = MANY;
            else if (t.read.quiet < mine.quiet) t.read = mine;
            else t.read.thread = t.read.thread == MANY ? MANY : mine.thread, t.read.simdgroup = mine.simdgroup;
        } else {
            t.read = mine;
        }
    }
}

void look_up(const char *at, uint64_t size, bool writes, bool atomic) {
    if (!now) return;
    const char *stack = stacks + (uint64_t)now->where.index * STACK;
    if (at >= stack && at + size <= stack + STACK) return;
    if (!writes && (inside({"", (char *)fibres, sizeof fibres}, at, size) || inside({"", (char *)values, sizeof values}, at, size))) return;
    uint16_t &guess = guesses[(uintptr_t)at / 64 % 4096];
    if (guess < buffer_count && inside({"", (char *)buffers[guess], sizes[guess]}, at, size)) return;
    for (uint32_t i = 0; i < shared_count; i++) {
        if (!inside(shared[i], at, size)) continue;
        trace(i, at - shared[i].at, size, writes, atomic);
        return;
    }
    for (uint32_t i = 0; i < buffer_count; i++) {
        if (!buffers[i] || !inside({"", (char *)buffers[i], sizes[i]}, at, size)) continue;
        guess = (uint16_t)i;
        return;
    }
    if (!writes) {
        for (uint32_t i = 0; i < constant_count; i++) {
            if (inside(constants[i], at, size)) return;
        }
    }
    const char *near = "nothing it knows";
    long long from = 0;
    uint64_t best = ~(uint64_t)0, length = 0;
    char name[32];
    for (uint32_t i = 0; i < shared_count + buffer_count; i++) {
        bool of_group = i < shared_count;
        const char *base = of_group ? shared[i].at : (char *)buffers[i - shared_count];
        uint64_t bytes = of_group ? shared[i].size : sizes[i - shared_count];
        if (!base) continue;
        uint64_t apart = at < base ? base - at : at >= base + bytes ? at - (base + bytes) : 0;
        if (apart >= best) continue;
        best = apart, from = at - base, length = bytes;
        if (!of_group) snprintf(name, sizeof name, "buffer(%u)", i - shared_count);
        near = of_group ? shared[i].name : name;
    }
    FAIL(SHIM_OUT_OF_BOUNDS, "%s %llu bytes at %lld of %s, which has %llu", writes ? "writes" : "reads", (unsigned long long)size, from,
         near, (unsigned long long)length);
}
}  // namespace

extern "C" {
void shim_entry() {
    kernel->run(buffers, &now->where);
    now->state = DONE;
    leave();
    abort();
}

const shim_where *shim_here() { return &now->where; }
void shim_access(const void *at, uint64_t size, int writes, int atomic) {
    if ((uintptr_t)at % size) FAIL(SHIM_MISALIGNED, "an atomic operation on %llu bytes at %p", (unsigned long long)size, at);
    look_up((const char *)at, size, writes != 0, atomic != 0);
}

void shim_threadgroup(const char *name, void *at, uint64_t size) {
    for (uint32_t i = 0; i < shared_count; i++)
        if (shared[i].at == at) return;
    if (shared_count == MAX_SHARED) FAIL(SHIM_ARGUMENTS, "more than %d variables in threadgroup memory", MAX_SHARED);
    shared_bytes += size;
    if (shared_bytes + dynamic_bytes > THREADGROUP_BYTES)
        FAIL(SHIM_ARGUMENTS, "threadgroup memory of %llu bytes and more; a Mac has %d", (unsigned long long)shared_bytes + dynamic_bytes,
             THREADGROUP_BYTES);
    memset(at, 0xFF, size);  // NaN, and no likely index
    traces[shared_count] = (Trace *)calloc(size, sizeof(Trace));
    shared[shared_count++] = {name, (char *)at, size};
}
void *shim_dynamic() { return dynamic; }

void shim_barrier(int simdgroup_only) {
    now->state = simdgroup_only ? AT_SIMD_BARRIER : AT_BARRIER;
    shim_switch(&now->sp, scheduler);
}

const char *shim_together(int kind, const void *value, uint32_t size) {
    if (size > STRIDE) abort();
    char *all = values[now->where.simdgroup][now->turn++ % 2];
    memcpy(all + now->where.lane * STRIDE, value, size);
    now->kind = kind, now->size = size, now->state = TOGETHER;
    shim_switch(&now->sp, scheduler);
    return all;
}

// What the compiler calls.
// An access of a size of its own is one of a type whose alignment is its size; others come to loadN and storeN.
void natural(const char *at, uint64_t size, bool writes) {
    if ((uintptr_t)at % size && now && (at < stacks || at >= stacks + (uint64_t)STACK * MAX_THREADS))
        FAIL(SHIM_MISALIGNED, "%s %llu bytes at %p", writes ? "writes" : "reads", (unsigned long long)size, (const void *)at);
    look_up(at, size, writes, false);
}
#define ACCESS(size) \
    void __asan_load##size(const char *at) { natural(at, size, false); } \
    void __asan_store##size(const char *at) { natural(at, size, true); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
void __asan_loadN(const char *at, uint64_t size) { look_up(at, size, false, false); }
void __asan_storeN(const char *at, uint64_t size) { look_up(at, size, true, false); }
void *__asan_memcpy(char *to, const char *from, uint64_t size) {
    look_up(from, size, false, false);
    look_up(to, size, true, false);
    return memcpy(to, from, size);
}
void *__asan_memset(char *to, int value, uint64_t size) {
    look_up(to, size, true, false);
    return memset(to, value, size);
}
void *__asan_memmove(char *to, const char *from, uint64_t size) {
    look_up(from, size, false, false);
    look_up(to, size, true, false);
    return memmove(to, from, size);
}
void __asan_init() {}
void __asan_version_mismatch_check_v8() {}
void __asan_handle_no_return() {}
struct asan_global {
    char *at;
    uint64_t size, with_room;
    const char *name;
    const void *others[4];
};
void __asan_register_globals(asan_global *all, uint64_t count) {
    for (uint64_t i = 0; i < count && constant_count < MAX_CONSTANT; i++) constants[constant_count++] = {all[i].name, all[i].at, all[i].size};
}
void __asan_unregister_globals(asan_global *, uint64_t) { constant_count = 0; }
void __asan_register_elf_globals(uint64_t *flag, asan_global *first, asan_global *last) {
    if (*flag) return;
    *flag = 1;
    __asan_register_globals(first, last - first);
}
void __asan_unregister_elf_globals(uint64_t *, void *, void *) { constant_count = 0; }
#define HANDLER(name, code, text) \
    void __ubsan_handle_##name##_minimal() { FAIL(code, text); } \
    void __ubsan_handle_##name##_minimal_abort() { FAIL(code, text); }
HANDLER(out_of_bounds, SHIM_OUT_OF_BOUNDS, "an index past its array")
HANDLER(local_out_of_bounds, SHIM_OUT_OF_BOUNDS, "an index past its array")
HANDLER(shift_out_of_bounds, SHIM_ARITHMETIC, "a shift by a negative number or by the width of its type and more")
HANDLER(divrem_overflow, SHIM_ARITHMETIC, "an integer division by zero, or one that overflows")
HANDLER(add_overflow, SHIM_ARITHMETIC, "a signed sum that overflows")
HANDLER(sub_overflow, SHIM_ARITHMETIC, "a signed difference that overflows")
HANDLER(mul_overflow, SHIM_ARITHMETIC, "a signed product that overflows")
HANDLER(negate_overflow, SHIM_ARITHMETIC, "a negation that overflows")
HANDLER(float_cast_overflow, SHIM_ARITHMETIC, "a float that the integer it is converted to cannot hold")
HANDLER(type_mismatch, SHIM_MISALIGNED, "an access that its type's alignment forbids")

int shim_kernels(const char **names, uint32_t *max_threads, uint32_t capacity) {
    for (uint32_t i = 0; i < shim_table_size && i < capacity; i++) {
        names[i] = shim_table[i].name;
        max_threads[i] = shim_table[i].max_threads;
    }
    return shim_table_size;
}
}  // extern "C"

namespace {
// Runs a simdgroup's threads until each has ended or is at a barrier of the threadgroup.
void run_simdgroup(Fibre *first, uint32_t count) {
    for (;;) {
        for (uint32_t i = 0; i < count; i++) {
            if (first[i].state != READY) continue;
            now = &first[i];
            shim_switch(&scheduler, now->sp);
            if (result) return;
        }
        uint32_t waiting = 0, same = 0;
        const Fibre *one = nullptr;
        for (uint32_t i = 0; i < count; i++) {
            if (first[i].state != TOGETHER && first[i].state != AT_SIMD_BARRIER) continue;
            if (!one) one = &first[i];
            waiting++;
            same += first[i].state == one->state && (one->state != TOGETHER || (first[i].kind == one->kind && first[i].size == one->size));
        }
        if (!waiting) return;
        if (waiting != count || same != count) {
            now = (Fibre *)one;
            say(SHIM_BARRIER, "is at a function of its simdgroup (kind %d) that only %u of %u threads reach", one->kind, same, count);
            return;
        }
        for (uint32_t i = 0; i < count; i++) {
            if (first[i].state == AT_SIMD_BARRIER) first[i].quiet++;
            first[i].state = READY;
        }
    }
}

void run_group(uint32_t threads) {
    for (;;) {
        for (uint32_t i = 0; i < threads; i += LANES) {
            run_simdgroup(fibres + i, threads - i < LANES ? threads - i : LANES);
            if (result) return;
        }
        uint32_t waiting = 0;
        for (uint32_t i = 0; i < threads; i++) {
            if (fibres[i].state == AT_BARRIER) {
                waiting++;
                now = &fibres[i];
            }
        }
        if (!waiting) return;
        if (waiting != threads) {
            say(SHIM_BARRIER, "is at a barrier that only %u of %u threads reach", waiting, threads);
            return;
        }
        epoch++;
        for (uint32_t i = 0; i < threads; i++) fibres[i].state = READY;
    }
}

void prepare(uint32_t index, const uint32_t group[3], const uint32_t groups[3], const uint32_t threads[3], uint32_t total) {
    Fibre &f = fibres[index];
    shim_where &w = f.where;
    for (int d = 0; d < 3; d++) w.group[d] = group[d], w.groups[d] = groups[d], w.threads[d] = threads[d];
    w.position[0] = index % threads[0], w.position[1] = index / threads[0] % threads[1], w.position[2] = index / threads[0] / threads[1];
    w.index = index, w.lane = index % LANES, w.simdgroup = index / LANES, w.simdgroups = (total + LANES - 1) / LANES;
    w.width = total - index / LANES * LANES < LANES ? total - index / LANES * LANES : (uint32_t)LANES;
    f.state = READY, f.turn = 0, f.quiet = 1;
    void **top = (void **)(stacks + (uint64_t)(index + 1) * STACK - 64) - FRAME;
    memset(top, 0, FRAME * sizeof(void *));
    top[RETURN_TO] = (void *)shim_start;
    f.sp = top;
}

int checked(const char *name, uint32_t threads, const uint32_t groups[3]) {
    kernel = nullptr;
    for (uint32_t i = 0; i < shim_table_size; i++)
        if (!strcmp(shim_table[i].name, name)) kernel = &shim_table[i];
    if (!kernel) {
        say(SHIM_NO_KERNEL, "no kernel is called %s", name);
        return result;
    }
    if (!threads || threads > kernel->max_threads || !groups[0] || !groups[1] || !groups[2])
        say(SHIM_ARGUMENTS, "%u threads by (%u, %u, %u) groups; it takes 1 to %u threads, and a group at least", threads, groups[0],
            groups[1], groups[2], kernel->max_threads);
    for (uint32_t i = 0; i < kernel->arguments; i++) {
        if (kernel->least[i] == ~(uint64_t)0) continue;
        if (i >= buffer_count || !buffers[i]) say(SHIM_ARGUMENTS, "buffer(%u) is not set", i);
        else if (sizes[i] < kernel->least[i])
            say(SHIM_ARGUMENTS, "buffer(%u) has %llu bytes, and its type %llu", i, (unsigned long long)sizes[i],
                (unsigned long long)kernel->least[i]);
    }
    return result;
}
}  // namespace

static int launch(const char *name, void **given, const uint64_t *given_sizes, uint32_t count, const uint32_t groups[3],
                  const uint32_t threads[3], uint32_t threadgroup_bytes, char *error, uint32_t error_size) {
    result = 0, message = error, message_size = error_size, now = nullptr;
    buffers = given, sizes = given_sizes, buffer_count = count;
    dynamic_bytes = threadgroup_bytes;
    if (error_size) error[0] = 0;
    uint64_t total = (uint64_t)threads[0] * threads[1] * threads[2];
    if (checked(name, total > MAX_THREADS ? 0 : (uint32_t)total, groups)) return result;
    if (!stacks) {
        void *made = mmap(nullptr, (size_t)STACK * MAX_THREADS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (made == MAP_FAILED) {
            say(SHIM_ARGUMENTS, "no memory for the stacks of its threads");
            return result;
        }
        stacks = (char *)made;
    }
    epoch = 1;
    for (uint64_t g = 0; g < (uint64_t)groups[0] * groups[1] * groups[2] && !result; g++) {
        const uint32_t group[3] = {(uint32_t)(g % groups[0]), (uint32_t)(g / groups[0] % groups[1]), (uint32_t)(g / groups[0] / groups[1])};
        for (uint32_t i = 0; i < total; i++) prepare(i, group, groups, threads, (uint32_t)total);
        for (uint32_t i = 0; i < shared_count; i++) memset(shared[i].at, 0xFF, shared[i].size);
        epoch++;  // who used threadgroup memory before does not matter
        run_group((uint32_t)total);
    }
    now = nullptr;
    for (uint32_t i = 0; i < shared_count; i++) free(traces[i]);
    shared_count = 0, shared_bytes = 0;
    return result;
}

extern "C" int shim_launch(const char *name, void **given, const uint64_t *given_sizes, uint32_t count, const uint32_t groups[3],
                           const uint32_t threads[3], uint32_t threadgroup_bytes, char *error, uint32_t error_size) {
    static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&one);
    int code = launch(name, given, given_sizes, count, groups, threads, threadgroup_bytes, error, error_size);
    pthread_mutex_unlock(&one);
    return code;
}
