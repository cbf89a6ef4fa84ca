// Metal's classes as far as the binding uses them. Command buffers run when they are waited for, one after the other, on the CPU:
// kernels are compiled by the shim beside this folder. Faults are put in by METAL_TEST_... of the environment.
#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "../shim/shim.h"
#include "objc.h"

namespace {
typedef uint64_t Size;
struct MTLSize {
    Size width, height, depth;
};
struct NSRange {
    Size location, length;
};
std::atomic<long long> allocated{0}, committed{0};
const Size PAGE = 16384;

struct Device : Object {
    std::string name;
    Device() : Object("MTLDevice"), name(setting_text("NAME", "Apple M2")) {}
};
struct Buffer : Object {
    Size length;
    char *data;
    explicit Buffer(Size n) : Object("MTLBuffer"), length(n), data((char *)aligned_alloc(PAGE, (n + PAGE - 1) / PAGE * PAGE)) {
        memset(data, 0xFF, (n + PAGE - 1) / PAGE * PAGE);  // NaN, and no likely index
        allocated += (long long)n;
    }
    void gone() override {
        allocated -= (long long)length;
        free(data);
        data = nullptr;
    }
};
struct Options : Object {
    bool fast = true;
    Size language = 0;
    Options() : Object("MTLCompileOptions") {}
};
struct Library : Object {
    void *handle;
    explicit Library(void *h) : Object("MTLLibrary"), handle(h) {}
};
struct Function : Object {
    Library *library;
    std::string name;
    uint32_t most;
    Function(Library *l, const std::string &n, uint32_t m) : Object("MTLFunction"), library(l), name(n), most(m) { retain(l); }
    void gone() override { release(library); }
};
struct Pipeline : Object {
    Function *function;
    explicit Pipeline(Function *f) : Object("MTLComputePipelineState"), function(f) { retain(f); }
    void gone() override { release(function); }
};
struct Dispatch {
    Pipeline *pipeline;
    std::vector<Buffer *> buffers;
    std::vector<Size> offsets;
    MTLSize groups, threads;
};
struct Queue;
struct Work : Object {
    Queue *queue;
    std::vector<Dispatch> dispatches;
    Size state = 0;
    bool encoding = false;
    Object *problem = nullptr;
    explicit Work(Queue *q);
    void gone() override;
    void run();
    void fail(long code, const std::string &text) {
        problem = error(code, text);
        state = 5;
    }
};
struct Queue : Object {
    std::vector<Work *> waiting;
    Queue() : Object("MTLCommandQueue") {}
    void gone() override {
        if (!waiting.empty()) wrong("a queue was released with work that nobody waited for");
    }
};
Work::Work(Queue *q) : Object("MTLCommandBuffer"), queue(q) { retain(q); }
void Work::gone() {
    for (Dispatch &d : dispatches) {
        release(d.pipeline);
        for (Buffer *b : d.buffers) release(b);
    }
    release(problem);
    release(queue);
}
struct Encoder : Object {
    Work *work;
    Pipeline *pipeline = nullptr;
    std::vector<Buffer *> buffers;
    std::vector<Size> offsets;
    bool ended = false;
    explicit Encoder(Work *w) : Object("MTLComputeCommandEncoder"), work(w) { retain(w); }
    void gone() override {
        if (!ended) wrong("an encoder was released before endEncoding");
        release(work);
    }
};
struct Array : Object {
    std::vector<Object *> all;
    Array() : Object("NSArray") {}
    void gone() override {
        for (Object *object : all) release(object);
    }
};

void Work::run() {
    long long number = ++committed, at = setting("FAIL_AT", 0);
    if (at && number >= at) return fail(setting("FAIL_CODE", 1), "a fault put in on purpose");
    for (Dispatch &d : dispatches) {
        std::vector<void *> data;
        std::vector<uint64_t> sizes;
        for (size_t i = 0; i < d.buffers.size(); i++) {
            data.push_back(d.buffers[i]->data + d.offsets[i]);
            sizes.push_back(d.buffers[i]->length - d.offsets[i]);
        }
        const uint32_t groups[3] = {(uint32_t)d.groups.width, (uint32_t)d.groups.height, (uint32_t)d.groups.depth};
        const uint32_t threads[3] = {(uint32_t)d.threads.width, (uint32_t)d.threads.height, (uint32_t)d.threads.depth};
        if (setting_text("LEAVE_OUT", "") == d.pipeline->function->name) continue;
        char said[1024] = "";
        auto launch = (decltype(&shim_launch))dlsym(d.pipeline->function->library->handle, "shim_launch");
        if (launch(d.pipeline->function->name.c_str(), data.data(), sizes.data(), (uint32_t)data.size(), groups, threads, 0, said, sizeof said)) {
            wrong("%s: %s", d.pipeline->function->name.c_str(), said);
            return fail(3, said);
        }
    }
    state = 4;
}

std::string all_of(FILE *file) {
    std::string text;
    char part[4096];
    for (size_t n; (n = fread(part, 1, sizeof part, file));) text.append(part, n);
    return text;
}
}  // namespace

EXPORT Object *MTLCopyAllDevices() {
    Array *found = new Array;
    if (!setting("NO_DEVICE", 0)) found->all.push_back(new Device);
    return found;
}
METHOD("NSArray", "count", Size, array_count, Array *self, const char *) { return self->all.size(); }
METHOD("NSArray", "objectAtIndex:", Object *, array_at, Array *self, const char *, Size i) { return self->all.at(i); }

METHOD("MTLDevice", "name", Object *, device_name, Device *self, const char *) { return autoreleased(string(self->name)); }
METHOD("MTLDevice", "registryID", uint64_t, device_id, Device *, const char *) { return 0x100000abc; }
METHOD("MTLDevice", "supportsFamily:", bool, device_family, Device *self, const char *, long family) {
    return self->name.compare(0, 7, "Apple M") == 0 && family >= 1001 && family <= 1008;
}
METHOD("MTLDevice", "recommendedMaxWorkingSetSize", uint64_t, device_memory, Device *, const char *) {
    return (uint64_t)setting("MEMORY", 8LL << 30);
}
METHOD("MTLDevice", "currentAllocatedSize", Size, device_used, Device *, const char *) { return (Size)allocated.load(); }
METHOD("MTLDevice", "maxBufferLength", Size, device_largest, Device *, const char *) { return (Size)setting("MAX_BUFFER", 4LL << 30); }
METHOD("MTLDevice", "maxThreadgroupMemoryLength", Size, device_local, Device *, const char *) { return 32768; }
METHOD("MTLDevice", "newCommandQueue", Object *, new_queue, Device *, const char *) { return new Queue; }
METHOD("MTLDevice", "newBufferWithLength:options:", Object *, new_buffer, Device *, const char *, Size length, Size options) {
    if (options) wrong("a buffer with options %llu", (unsigned long long)options);
    if (!length) wrong("a buffer without any bytes");
    if (!length || length > device_largest(nullptr, nullptr) || allocated + (long long)length > setting("MEMORY", 8LL << 30)) return nullptr;
    return new Buffer(length);
}
METHOD("MTLBuffer", "contents", void *, buffer_contents, Buffer *self, const char *) { return self->data; }

METHOD("class MTLCompileOptions", "alloc", Object *, new_options, Object *, const char *) { return new Options; }
METHOD("MTLCompileOptions", "setFastMathEnabled:", void, set_fast, Options *self, const char *, bool fast) { self->fast = fast; }
METHOD("MTLCompileOptions", "setLanguageVersion:", void, set_language, Options *self, const char *, Size v) { self->language = v; }
METHOD("MTLDevice", "newLibraryWithSource:options:error:", Object *, new_library, Device *, const char *, Object *source, Options *options, Object **problem) {
    if (options->fast) wrong("a source is compiled with fast math");
    if (options->language != (2 << 16 | 4)) wrong("a source is compiled as another language than MSL 2.4");
    char path[] = "/tmp/bitnet-metal-XXXXXX";
    int file = mkstemp(path);
    const std::string &text = text_of(source);
    if (file < 0 || write(file, text.data(), text.size()) != (ssize_t)text.size()) abort();
    close(file);
    FILE *compiler = popen((setting_text("COMPILER", "false") + " " + path + " 2>&1").c_str(), "r");
    std::string said = all_of(compiler);
    int status = pclose(compiler);
    unlink(path);
    while (!said.empty() && said.back() == '\n') said.pop_back();
    void *handle = status ? nullptr : dlopen(said.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle) return new Library(handle);
    *problem = autoreleased(error(3, status ? said : dlerror()));
    return nullptr;
}
METHOD("MTLLibrary", "newFunctionWithName:", Object *, new_function, Library *self, const char *, Object *name) {
    auto kernels = (decltype(&shim_kernels))dlsym(self->handle, "shim_kernels");
    uint32_t count = kernels(nullptr, nullptr, 0);
    std::vector<const char *> names(count);
    std::vector<uint32_t> most(count);
    kernels(names.data(), most.data(), count);
    for (uint32_t i = 0; i < count; i++)
        if (text_of(name) == names[i]) return new Function(self, names[i], most[i]);
    return nullptr;
}
METHOD("MTLDevice", "newComputePipelineStateWithFunction:error:", Object *, new_pipeline, Device *, const char *, Function *function, Object **problem) {
    if (setting_text("NO_PIPELINE", "") == function->name) {
        *problem = autoreleased(error(2, "a fault put in on purpose"));
        return nullptr;
    }
    return new Pipeline(function);
}
METHOD("MTLComputePipelineState", "maxTotalThreadsPerThreadgroup", Size, pipeline_most, Pipeline *self, const char *) { return self->function->most; }
METHOD("MTLComputePipelineState", "threadExecutionWidth", Size, pipeline_width, Pipeline *, const char *) { return (Size)setting("WIDTH", 32); }

METHOD("MTLCommandQueue", "commandBuffer", Object *, new_work, Queue *self, const char *) { return autoreleased(new Work(self)); }
METHOD("MTLCommandBuffer", "computeCommandEncoder", Object *, new_encoder, Work *self, const char *) {
    if (self->state) wrong("an encoder of a command buffer that was committed");
    if (self->encoding) wrong("two encoders of one command buffer at once");
    self->encoding = true;
    return autoreleased(new Encoder(self));
}
METHOD("MTLComputeCommandEncoder", "setComputePipelineState:", void, set_pipeline, Encoder *self, const char *, Pipeline *pipeline) {
    if (strcmp(pipeline->kind, "MTLComputePipelineState") || pipeline->count <= 0) wrong("a pipeline that is none, or is gone");
    self->pipeline = pipeline;
}
METHOD("MTLComputeCommandEncoder", "setBuffers:offsets:withRange:", void, set_buffers, Encoder *self, const char *, Buffer **buffers, const Size *offsets, NSRange range) {
    if (range.location + range.length > 31) return wrong("buffer(%llu); there are 31", (unsigned long long)(range.location + range.length - 1));
    self->buffers.resize(range.location + range.length);
    self->offsets.resize(range.location + range.length);
    for (Size i = 0; i < range.length; i++) {
        if (strcmp(buffers[i]->kind, "MTLBuffer") || buffers[i]->count <= 0) wrong("buffer(%llu) is none, or is gone", (unsigned long long)i);
        if (offsets[i] >= buffers[i]->length) wrong("buffer(%llu) begins at its end", (unsigned long long)i);
        self->buffers[range.location + i] = buffers[i];
        self->offsets[range.location + i] = offsets[i];
    }
}
METHOD("MTLComputeCommandEncoder", "dispatchThreadgroups:threadsPerThreadgroup:", void, dispatch, Encoder *self, const char *, MTLSize groups, MTLSize threads) {
    if (self->ended || !self->pipeline) return wrong("a dispatch without a pipeline, or after endEncoding");
    for (Size n : {groups.width, groups.height, groups.depth, threads.width, threads.height, threads.depth})
        if (!n || n >> 31) return wrong("a dispatch of %llu threads or threadgroups in one dimension", (unsigned long long)n);
    retain(self->pipeline);
    for (Buffer *buffer : self->buffers) retain(buffer);
    self->work->dispatches.push_back({self->pipeline, self->buffers, self->offsets, groups, threads});
}
METHOD("MTLComputeCommandEncoder", "endEncoding", void, end_encoding, Encoder *self, const char *) {
    if (self->ended) wrong("endEncoding twice");
    self->ended = true;
    self->work->encoding = false;
}
METHOD("MTLCommandBuffer", "commit", void, commit, Work *self, const char *) {
    if (self->encoding) wrong("commit before endEncoding");
    if (self->state) return wrong("commit twice");
    self->state = 2;
    retain(self);
    self->queue->waiting.push_back(self);
}
METHOD("MTLCommandBuffer", "waitUntilCompleted", void, wait_for, Work *self, const char *) {
    if (!self->state) return wrong("waited for what was not committed");
    while (self->state < 4) {
        Work *next = self->queue->waiting.front();
        self->queue->waiting.erase(self->queue->waiting.begin());
        if (setting("NO_RUN", 0)) next->state = 4;  // what is measured is what the caller costs
        else next->run();
        release(next);
    }
}
METHOD("MTLCommandBuffer", "status", Size, work_status, Work *self, const char *) { return self->state; }
METHOD("MTLCommandBuffer", "error", Object *, work_error, Work *self, const char *) { return self->problem; }
