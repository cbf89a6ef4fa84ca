// Metal's classes as far as the binding uses them. Command buffers run when they are waited for, one after the other, on the CPU:
// kernels are compiled by the shim beside this folder. Faults are put in by METAL_TEST_... of the environment.
// Long, because all classes register their methods in one table and see each other's fields.
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <set>

#include "../shim/shim.h"
#include "foundation.h"

namespace {
std::atomic<long long> allocated{0}, committed{0};
const Size PAGE = 16384;

struct Device : Object {
    std::string name;
    Device() : Object("MTLDevice"), name(setting_text("NAME", "Apple M3")) {}
};
struct Buffer : Object {
    Size length;
    char *data;
    bool copied = true;  // else the memory is the caller's
    Buffer(char *bytes, Size n) : Object("MTLBuffer"), length(n), data(bytes), copied(false) {}
    explicit Buffer(Size n) : Object("MTLBuffer"), length(n), data((char *)aligned_alloc(PAGE, (n + PAGE - 1) / PAGE * PAGE)) {
        memset(data, 0xFF, (n + PAGE - 1) / PAGE * PAGE);  // NaN, and no likely index
        allocated += (long long)n;
    }
    void gone() override {
        if (copied) {
            allocated -= (long long)length;
            free(data);
        }
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
    std::string path;  // which tells its contents
    Library(void *h, const std::string &p) : Object("MTLLibrary"), handle(h), path(p) {}
};
struct Function : Object {
    Library *library;
    std::string name;
    uint32_t most;
    Function(Library *l, const std::string &n, uint32_t m) : Object("MTLFunction"), library(l), name(n), most(m) { retain(l); }
    void gone() override { release(library); }
};
struct PipelineDescriptor : Object {
    Function *function = nullptr;
    bool indirect = false;
    Array *archives = nullptr;
    PipelineDescriptor() : Object("MTLComputePipelineDescriptor") {}
    void gone() override {
        release(function);
        release(archives);
    }
    // What a pipeline is kept by in an archive.
    std::string key() const { return function->library->path + " " + function->name + (indirect ? " indirect" : ""); }
};
struct Url : Object {
    std::string path;
    explicit Url(const std::string &p) : Object("NSURL"), path(p) {}
};
struct ArchiveDescriptor : Object {
    Url *url = nullptr;
    ArchiveDescriptor() : Object("MTLBinaryArchiveDescriptor") {}
    void gone() override { release(url); }
};
// As a file: the system and the GPU, a line for each pipeline, and a line "end".
struct Archive : Object {
    std::set<std::string> kept;
    Archive() : Object("MTLBinaryArchive") {}
    static std::string head() { return setting_text("BUILD", BUILD) + " " + setting_text("NAME", "Apple M3"); }
    bool read(const std::string &path) {
        std::ifstream file(path);
        std::string line;
        if (!std::getline(file, line) || line != head()) return false;
        while (std::getline(file, line) && line != "end") kept.insert(line);
        return line == "end";
    }
};
struct Residency : Object {
    std::multiset<Object *> staged, added, removed;  // staged: those that a commit makes resident
    bool requested = true;
    Residency() : Object("MTLResidencySet") {}
    void gone() override {
        for (Object *object : added) release(object);
        for (Object *object : staged) release(object);
    }
};
struct Pipeline : Object {
    Function *function;
    bool indirect;
    Pipeline(Function *f, bool i) : Object("MTLComputePipelineState"), function(f), indirect(i) { retain(f); }
    void gone() override { release(function); }
};
struct Dispatch {
    Pipeline *pipeline = nullptr;
    std::vector<Buffer *> buffers;
    std::vector<Size> offsets;
    MTLSize groups = {0, 0, 0}, threads = {0, 0, 0};
    bool barrier = true;  // it waits for all before it, as every dispatch of a serial encoder does
    void hold() {
        retain(pipeline);
        for (Buffer *buffer : buffers) retain(buffer);
    }
    void drop() {
        release(pipeline);
        for (Buffer *buffer : buffers) release(buffer);
    }
};
struct IndirectDescriptor : Object {
    Size types = 0, most = 0;
    bool inherits_buffers = true, inherits_pipeline = true;  // each must be set
    IndirectDescriptor() : Object("MTLIndirectCommandBufferDescriptor") {}
};
struct Indirect : Object {
    std::vector<Dispatch> commands;
    Size most;  // buffers of a command
    Indirect(Size count, Size m) : Object("MTLIndirectCommandBuffer"), commands(count), most(m) {}
};
struct IndirectCommand : Object {
    Indirect *owner;
    Dispatch *dispatch;
    IndirectCommand(Indirect *o, Size i) : Object("MTLIndirectComputeCommand"), owner(o), dispatch(&o->commands.at(i)) { retain(o); }
    void gone() override { release(owner); }
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
    bool run(Dispatch &d);
    bool indirect = false;  // whether it executes indirect commands
    void fail(long code, const std::string &text) {
        problem = error(code, text);
        state = 5;
    }
};
struct Queue : Object {
    std::vector<Work *> waiting;
    Residency *resident = nullptr;
    Queue() : Object("MTLCommandQueue") {}
    void gone() override {
        if (!waiting.empty()) wrong("a queue was released with work that nobody waited for");
        release(resident);
    }
};
Work::Work(Queue *q) : Object("MTLCommandBuffer"), queue(q) { retain(q); }
void Work::gone() {
    for (Dispatch &d : dispatches) d.drop();
    release(problem);
    release(queue);
}
struct Encoder : Object {
    Work *work;
    Pipeline *pipeline = nullptr;
    std::vector<Buffer *> buffers;
    std::vector<Size> offsets;
    std::set<Buffer *> used;  // resident for indirect commands
    bool ended = false;
    explicit Encoder(Work *w) : Object("MTLComputeCommandEncoder"), work(w) { retain(w); }
    void gone() override {
        if (!ended) wrong("an encoder was released before endEncoding");
        release(work);
    }
};

bool Work::run(Dispatch &d) {
    std::vector<void *> data;
    std::vector<uint64_t> sizes;
    for (size_t i = 0; i < d.buffers.size(); i++) {
        data.push_back(d.buffers[i]->data + d.offsets[i]);
        sizes.push_back(d.buffers[i]->length - d.offsets[i]);
    }
    const uint32_t groups[3] = {(uint32_t)d.groups.width, (uint32_t)d.groups.height, (uint32_t)d.groups.depth};
    const uint32_t threads[3] = {(uint32_t)d.threads.width, (uint32_t)d.threads.height, (uint32_t)d.threads.depth};
    const std::string &name = d.pipeline->function->name;
    if (Residency *set = queue->resident) {
        if (!set->requested) wrong("residency was not requested before %s", name.c_str());
        for (Buffer *buffer : d.buffers)
            if (!set->added.count(buffer)) wrong("%s has a buffer that the queue's residency set has not", name.c_str());
    }
    if (name == setting_text("LEAVE_OUT", "") || (indirect && name == setting_text("INDIRECT_LEAVE_OUT", ""))) return true;
    char said[1024] = "";
    auto launch = (decltype(&shim_launch))dlsym(d.pipeline->function->library->handle, "shim_launch");
    if (launch(name.c_str(), data.data(), sizes.data(), (uint32_t)data.size(), groups, threads, 0, said, sizeof said)) {
        wrong("%s: %s", name.c_str(), said);
        fail(3, said);
        return false;
    }
    return true;
}
// Dispatches that no barrier orders run the last one first: a barrier that is missing is seen in what they compute.
void Work::run() {
    long long number = ++committed, at = setting("FAIL_AT", 0), code = indirect ? setting("INDIRECT_FAIL", 0) : 0;
    if (at && number >= at) return fail(setting("FAIL_CODE", 1), "a fault put in on purpose");
    if (code) return fail(code, "a fault put in on purpose");
    for (size_t first = 0, end; first < dispatches.size(); first = end) {
        for (end = first + 1; end < dispatches.size() && !dispatches[end].barrier;) end++;
        for (size_t i = end; i > first; i--)
            if (!run(dispatches[i - 1])) return;
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

METHOD("MTLDevice", "name", Object *, device_name, Device *self, const char *) { return autoreleased(string(self->name)); }
METHOD("MTLDevice", "registryID", uint64_t, device_id, Device *, const char *) { return 0x100000abc; }
METHOD("MTLDevice", "supportsFamily:", bool, device_family, Device *self, const char *, long family) {
    return self->name.compare(0, 7, "Apple M") == 0 && family >= 1001 && family <= setting("FAMILY", 1009);
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
METHOD("MTLDevice", "newBufferWithBytesNoCopy:length:options:deallocator:", Object *, adopt_bytes, Device *, const char *, char *bytes, Size length, Size options, void *deallocator) {
    Size page = (Size)sysconf(_SC_PAGESIZE);
    if (options || deallocator) wrong("memory of the caller's with options, or with a deallocator");
    if (!length || (Size)bytes % page || length % page) wrong("memory of the caller's that is not whole pages");
    std::string resident((size_t)(length / page), 0);
    if (mincore(bytes, length, (unsigned char *)&resident[0])) wrong("memory of the caller's that is not mapped");
    return setting("NO_ADOPT", 0) || length > device_largest(nullptr, nullptr) ? nullptr : new Buffer(bytes, length);
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
    if (handle) return new Library(handle, said);
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
METHOD("class MTLComputePipelineDescriptor", "alloc", Object *, new_pipeline_descriptor, Object *, const char *) { return new PipelineDescriptor; }
METHOD("MTLComputePipelineDescriptor", "setComputeFunction:", void, set_function, PipelineDescriptor *self, const char *, Function *function) {
    retain(function);
    release(self->function);
    self->function = function;
}
METHOD("MTLComputePipelineDescriptor", "setSupportIndirectCommandBuffers:", void, set_indirect, PipelineDescriptor *self, const char *, bool indirect) { self->indirect = indirect; }
METHOD("MTLDevice", "newComputePipelineStateWithDescriptor:options:reflection:error:", Object *, new_pipeline, Device *, const char *, PipelineDescriptor *wanted, Size options, Object **reflection, Object **problem) {
    if (!wanted->function || options & ~4ull || reflection) wrong("a pipeline without a function, or with options");
    bool found = false;
    if (wanted->archives)
        for (Object *archive : wanted->archives->all) found |= ((Archive *)archive)->kept.count(wanted->key()) > 0;
    if (options == 4 && !found) {
        *problem = autoreleased(error(2, "it is not in the archive"));
        return nullptr;
    }
    if (!found && setting("ONLY_KEPT", 0)) {
        *problem = autoreleased(error(2, "a pipeline was compiled, where all should have been kept"));
        return nullptr;
    }
    if (setting_text("NO_PIPELINE", "") == wanted->function->name) {
        *problem = autoreleased(error(2, "a fault put in on purpose"));
        return nullptr;
    }
    return new Pipeline(wanted->function, wanted->indirect);
}
METHOD("MTLComputePipelineDescriptor", "setBinaryArchives:", void, set_archives, PipelineDescriptor *self, const char *, Array *archives) {
    if (archives)
        for (Object *archive : archives->all)
            if (strcmp(archive->kind, "MTLBinaryArchive") || archive->count <= 0) wrong("an archive that is none, or is gone");
    if (archives) retain(archives);
    release(self->archives);
    self->archives = archives;
}
METHOD("class NSURL", "fileURLWithPath:", Object *, url_with, Object *, const char *, Object *path) { return autoreleased(new Url(text_of(path))); }
METHOD("class MTLBinaryArchiveDescriptor", "alloc", Object *, new_archive_descriptor, Object *, const char *) { return new ArchiveDescriptor; }
METHOD("MTLBinaryArchiveDescriptor", "setUrl:", void, set_url, ArchiveDescriptor *self, const char *, Url *url) {
    retain(url);
    release(self->url);
    self->url = url;
}
METHOD("MTLDevice", "newBinaryArchiveWithDescriptor:error:", Object *, new_archive, Device *, const char *, ArchiveDescriptor *wanted, Object **problem) {
    Archive *made = new Archive;
    if (!(wanted->url ? made->read(wanted->url->path) : !setting("NO_ARCHIVE", 0))) {
        release(made);
        *problem = autoreleased(error(1, wanted->url ? "MTLBinaryArchiveErrorInvalidFile" : "a fault put in on purpose"));
        return nullptr;
    }
    return made;
}
METHOD("MTLBinaryArchive", "addComputePipelineFunctionsWithDescriptor:error:", bool, archive_add, Archive *self, const char *, PipelineDescriptor *wanted, Object **problem) {
    if (setting("NO_ADD", 0) || setting("ONLY_KEPT", 0)) {
        *problem = autoreleased(error(3, "MTLBinaryArchiveErrorCompilationFailure"));
        return false;
    }
    self->kept.insert(wanted->key());
    return true;
}
METHOD("MTLBinaryArchive", "serializeToURL:error:", bool, archive_write, Archive *self, const char *, Url *url, Object **problem) {
    std::ofstream file(url->path);
    file << Archive::head() << "\n";
    for (const std::string &key : self->kept) file << key << "\n";
    file << (setting("CUT_OFF", 0) ? "" : "end\n");
    if (!setting("NO_SERIALIZE", 0)) return true;
    *problem = autoreleased(error(4, "MTLBinaryArchiveErrorInternalError"));
    return false;
}

METHOD("class MTLResidencySetDescriptor", "alloc", Object *, new_residency_descriptor, Object *, const char *) { return new Object("MTLResidencySetDescriptor"); }
METHOD("MTLDevice", "newResidencySetWithDescriptor:error:", Object *, new_residency, Device *, const char *, Object *, Object **problem) {
    if (!setting("NO_RESIDENCY", 0)) return new Residency;
    *problem = autoreleased(error(1, "a fault put in on purpose"));
    return nullptr;
}
METHOD("MTLResidencySet", "addAllocation:", void, residency_add, Residency *self, const char *, Object *buffer) {
    if (strcmp(buffer->kind, "MTLBuffer") || buffer->count <= 0) return wrong("an allocation that is none, or is gone");
    retain(buffer);
    self->staged.insert(buffer);
}
METHOD("MTLResidencySet", "removeAllocation:", void, residency_remove, Residency *self, const char *, Object *buffer) {
    if (!self->staged.count(buffer) && !self->added.count(buffer)) return wrong("what is removed from a residency set is not in it");
    self->removed.insert(buffer);
}
METHOD("MTLResidencySet", "commit", void, residency_commit, Residency *self, const char *) {
    if (!self->staged.empty()) self->requested = false;
    self->added.insert(self->staged.begin(), self->staged.end());
    self->staged.clear();
    for (Object *buffer : self->removed) {
        self->added.erase(self->added.find(buffer));
        release(buffer);
    }
    self->removed.clear();
}
METHOD("MTLResidencySet", "requestResidency", void, residency_request, Residency *self, const char *) { self->requested = true; }
METHOD("MTLCommandQueue", "addResidencySet:", void, queue_residency, Queue *self, const char *, Residency *set) {
    if (self->resident) return wrong("a queue has two residency sets");
    retain(set);
    self->resident = set;
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
static bool sized(MTLSize groups, MTLSize threads) {
    for (Size n : {groups.width, groups.height, groups.depth, threads.width, threads.height, threads.depth})
        if (!n || n >> 31) {
            wrong("a dispatch of %llu threads or threadgroups in one dimension", (unsigned long long)n);
            return false;
        }
    return true;
}
METHOD("MTLComputeCommandEncoder", "dispatchThreadgroups:threadsPerThreadgroup:", void, dispatch, Encoder *self, const char *, MTLSize groups, MTLSize threads) {
    if (self->ended || !self->pipeline) return wrong("a dispatch without a pipeline, or after endEncoding");
    if (!sized(groups, threads)) return;
    self->work->dispatches.emplace_back();
    Dispatch &made = self->work->dispatches.back();
    made.pipeline = self->pipeline;
    made.buffers = self->buffers;
    made.offsets = self->offsets;
    made.groups = groups;
    made.threads = threads;
    made.hold();
}
METHOD("MTLComputeCommandEncoder", "useResources:count:usage:", void, use_resources, Encoder *self, const char *, Buffer **buffers, Size count, Size usage) {
    if (usage != 3) wrong("resources with usage %llu, which are read and written", (unsigned long long)usage);
    for (Size i = 0; i < count; i++) {
        if (strcmp(buffers[i]->kind, "MTLBuffer") || buffers[i]->count <= 0) wrong("a resource is none, or is gone");
        self->used.insert(buffers[i]);
    }
}
METHOD("MTLComputeCommandEncoder", "executeCommandsInBuffer:withRange:", void, execute, Encoder *self, const char *, Indirect *indirect, NSRange range) {
    if (self->ended || strcmp(indirect->kind, "MTLIndirectCommandBuffer") || range.location + range.length > indirect->commands.size())
        return wrong("indirect commands that are none, or after endEncoding");
    self->work->indirect = true;
    for (Size i = range.location; i < range.location + range.length; i++) {
        Dispatch &made = indirect->commands[i];
        if (!made.pipeline || !made.groups.width) return wrong("indirect command %llu was not encoded", (unsigned long long)i);
        if (!made.pipeline->indirect) wrong("indirect command %llu has a pipeline that does not support it", (unsigned long long)i);
        if (made.pipeline->count <= 0) wrong("indirect command %llu has a pipeline that is gone", (unsigned long long)i);
        for (Buffer *buffer : made.buffers)
            if (!buffer || buffer->count <= 0 || !self->used.count(buffer)) return wrong("indirect command %llu has a buffer that is gone, or not resident", (unsigned long long)i);
        self->work->dispatches.push_back(made);
        self->work->dispatches.back().hold();
        if (i == range.location) self->work->dispatches.back().barrier = true;
    }
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

METHOD("class MTLIndirectCommandBufferDescriptor", "alloc", Object *, new_indirect_descriptor, Object *, const char *) { return new IndirectDescriptor; }
METHOD("MTLIndirectCommandBufferDescriptor", "setCommandTypes:", void, set_types, IndirectDescriptor *self, const char *, Size types) { self->types = types; }
METHOD("MTLIndirectCommandBufferDescriptor", "setInheritBuffers:", void, set_inherits_buffers, IndirectDescriptor *self, const char *, bool inherits) { self->inherits_buffers = inherits; }
METHOD("MTLIndirectCommandBufferDescriptor", "setInheritPipelineState:", void, set_inherits_pipeline, IndirectDescriptor *self, const char *, bool inherits) { self->inherits_pipeline = inherits; }
METHOD("MTLIndirectCommandBufferDescriptor", "setMaxKernelBufferBindCount:", void, set_most_buffers, IndirectDescriptor *self, const char *, Size most) { self->most = most; }
METHOD("MTLDevice", "newIndirectCommandBufferWithDescriptor:maxCommandCount:options:", Object *, new_indirect, Device *, const char *, IndirectDescriptor *wanted, Size count, Size options) {
    if (wanted->types != 32 || wanted->inherits_buffers || wanted->inherits_pipeline) wrong("indirect commands that inherit, or of another type than 32");
    if (!wanted->most || wanted->most > 31 || !count || count > 16384 || options) wrong("indirect commands beyond the limits");
    return setting("NO_INDIRECT", 0) ? nullptr : new Indirect(count, wanted->most);
}
METHOD("MTLIndirectCommandBuffer", "indirectComputeCommandAtIndex:", Object *, indirect_at, Indirect *self, const char *, Size i) {
    self->commands.at(i).barrier = false;
    return autoreleased(new IndirectCommand(self, i));
}
METHOD("MTLIndirectComputeCommand", "setComputePipelineState:", void, indirect_pipeline, IndirectCommand *self, const char *, Pipeline *pipeline) { self->dispatch->pipeline = pipeline; }
METHOD("MTLIndirectComputeCommand", "setKernelBuffer:offset:atIndex:", void, indirect_buffer, IndirectCommand *self, const char *, Buffer *buffer, Size offset, Size index) {
    if (index >= self->owner->most) return wrong("buffer(%llu) of an indirect command; it has %llu", (unsigned long long)index, (unsigned long long)self->owner->most);
    if (offset >= buffer->length) wrong("buffer(%llu) begins at its end", (unsigned long long)index);
    Dispatch &made = *self->dispatch;
    if (made.buffers.size() <= index) {
        made.buffers.resize(index + 1);
        made.offsets.resize(index + 1);
    }
    made.buffers[index] = buffer;
    made.offsets[index] = offset;
}
METHOD("MTLIndirectComputeCommand", "concurrentDispatchThreadgroups:threadsPerThreadgroup:", void, indirect_dispatch, IndirectCommand *self, const char *, MTLSize groups, MTLSize threads) {
    if (!sized(groups, threads)) return;
    self->dispatch->groups = groups;
    self->dispatch->threads = threads;
}
METHOD("MTLIndirectComputeCommand", "setBarrier", void, indirect_barrier, IndirectCommand *self, const char *) { self->dispatch->barrier = true; }
