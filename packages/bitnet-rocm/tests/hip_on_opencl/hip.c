// HIP's calls over the CPU's OpenCL, so that the whole backend runs where there is no AMD GPU. Never in a wheel.
//
// Memory is in memory.c; a module is an OpenCL program's binary, which comgr.c makes. Tests set by environment variables what it
// pretends and where it fails:
//   HIP_TEST_VERSION  hipRuntimeGetVersion's number      HIP_TEST_DEVICES  devices, 0 for none
//   HIP_TEST_MEMORY   bytes of device memory              HIP_TEST_ARCH     gcnArchName
//   HIP_TEST_INTEGRATED  1: an APU                        HIP_TEST_FAULT    call:nth:status; from 700 on the device stays lost
//   HIP_TEST_LEAVE_OUT  a kernel that does nothing
//   HIP_TEST_GRAPHS   "refused": no capture ends well; "wrong": a graph launched again leaves a kernel out
#include "hip.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { cl_handle kernel; Signature signature; } Function;
typedef struct { Function *function; size_t global[3], local[3]; uint64_t values[MAX_ARGUMENTS]; } Command;
typedef struct { Command *commands; size_t count, launched; } Graph;
typedef struct { int device, capturing, broken; pthread_t by; Graph *graph; } Stream;
typedef struct { int recorded; } Event;
typedef struct { cl_handle program; Signature kernels[MAX_KERNELS]; } Module;

#ifndef UNNAMED  // as a GPU's runtime is
EXPORT const int bitnet_test_driver = 1;  // by which the backend knows it
#endif

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int current;
static Stream *streams[64];
static int lost;

int fault(const char *call) {
    static char seen[256];
    static long calls;
    const char *wanted = getenv("HIP_TEST_FAULT");
    if (!wanted) wanted = "";
    if (strcmp(wanted, seen)) {
        snprintf(seen, sizeof seen, "%s", wanted);
        calls = 0;
        lost = 0;
    }
    if (lost) return lost;
    size_t length = strlen(call);
    if (strncmp(wanted, call, length) || wanted[length] != ':') return OK;
    char *end;
    long nth = strtol(wanted + length + 1, &end, 10), status = strtol(end + 1, NULL, 10);
    if (++calls != nth) return OK;
    if (status >= 700) lost = (int)status;
    return (int)status;
}

int refused(void) {
    for (size_t i = 0; i < 64; i++) {
        if (streams[i] && streams[i]->capturing && pthread_equal(streams[i]->by, pthread_self())) {
            streams[i]->broken = 1;
            return 1;
        }
    }
    return 0;
}

static long devices(void) { return setting("HIP_TEST_DEVICES", 1); }

EXPORT int hipInit(unsigned flags) {
    BEGIN("hipInit")
    status = flags ? INVALID_VALUE : devices() && opencl_open() ? OK : NO_DEVICE;
    END
}

EXPORT int hipRuntimeGetVersion(int *version) {
    BEGIN("hipRuntimeGetVersion")
    *version = (int)setting("HIP_TEST_VERSION", 70051831);
    END
}

EXPORT int hipGetDeviceCount(int *count) {
    BEGIN("hipGetDeviceCount")
    *count = (int)devices();
    status = *count && opencl_open() ? OK : NO_DEVICE;
    END
}

#ifndef OLD_HIP
// As hipDeviceProp_tR0600 of ROCm 6 and 7 has them, by their offsets in its 1472 bytes.
EXPORT int hipGetDevicePropertiesR0600(char *properties, int device) {
    BEGIN("hipGetDevicePropertiesR0600")
    if (device < 0 || device >= devices()) {
        status = INVALID_DEVICE;
        goto end;
    }
    const char *given = getenv("HIP_TEST_ARCH"), *arch = given && *given ? given : "gfx1100";
    memset(properties, 0, 1472);
    snprintf(properties, 256, "Test driver (no GPU)");
    char uuid[17];
    snprintf(uuid, sizeof uuid, "%016x", 0xb17e0 + device);
    memcpy(properties + 256, uuid, 16);
    *(size_t *)(properties + 288) = device_memory();
    *(size_t *)(properties + 296) = 65536;
    *(int *)(properties + 308) = strncmp(arch, "gfx9", 4) ? 32 : 64;
    *(int *)(properties + 320) = MAX_GROUP;
    *(int *)(properties + 388) = 4;
    *(int *)(properties + 396) = (int)setting("HIP_TEST_INTEGRATED", 0);
    *(int *)(properties + 584) = 3 + device;
    snprintf(properties + 1160, 256, "%s", arch);
    END
}
#endif

EXPORT int hipSetDevice(int device) {
    BEGIN("hipSetDevice")
    if (device < 0 || device >= devices()) status = INVALID_DEVICE;
    else current = device;
    END
}

EXPORT int hipEventCreateWithFlags(Event **event, unsigned flags) {
    BEGIN_OUTSIDE("hipEventCreateWithFlags")
    *event = calloc(1, sizeof **event);
    END
}

EXPORT int hipEventRecord(Event *event, Stream *stream) {
    BEGIN_OUTSIDE("hipEventRecord")
    event->recorded = stream->device == current;
    status = event->recorded ? OK : INVALID_VALUE;
    END
}

EXPORT int hipEventSynchronize(Event *event) {
    BEGIN_OUTSIDE("hipEventSynchronize")
    status = event->recorded ? OK : INVALID_VALUE;
    clFinish(opencl_queue);
    END
}

EXPORT int hipEventDestroy(Event *event) {
    BEGIN_OUTSIDE("hipEventDestroy")
    free(event);
    END
}

EXPORT int hipStreamCreateWithFlags(Stream **stream, unsigned flags) {
    BEGIN_OUTSIDE("hipStreamCreateWithFlags")
    size_t place = 0;
    while (place < 63 && streams[place]) place++;
    *stream = streams[place] = calloc(1, sizeof **stream);
    (*stream)->device = current;
    END
}

EXPORT int hipStreamSynchronize(Stream *stream) {
    BEGIN_OUTSIDE("hipStreamSynchronize")
    clFinish(opencl_queue);
    END
}

EXPORT int hipStreamDestroy(Stream *stream) {
    BEGIN_OUTSIDE("hipStreamDestroy")
    for (size_t i = 0; i < 64; i++)
        if (streams[i] == stream) streams[i] = NULL;
    free(stream);
    END
}

static int enqueue(const Command *command) {
    const Function *function = command->function;
    const char *left_out = getenv("HIP_TEST_LEAVE_OUT");
    if (left_out && !strcmp(left_out, function->signature.name)) return OK;
    for (uint32_t i = 0; i < function->signature.arguments; i++) {
        int error = function->signature.pointer[i] ? clSetKernelArgSVMPointer(function->kernel, i, (void *)command->values[i])
                                         : clSetKernelArg(function->kernel, i, 4, &command->values[i]);
        if (error) return INVALID_VALUE;
    }
    return clEnqueueNDRangeKernel(opencl_queue, function->kernel, 3, NULL, command->global, command->local, 0, NULL, NULL)
               ? INVALID_CONFIGURATION
               : OK;
}

EXPORT int hipModuleLaunchKernel(Function *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                                 unsigned shared, Stream *stream, void **parameters, void **extra) {
    BEGIN("hipModuleLaunchKernel")
    if (!gx || !gy || !gz || (uint64_t)bx * by * bz - 1 >= MAX_GROUP || shared || extra || stream->device != current) {
        status = INVALID_CONFIGURATION;
        goto end;
    }
    Command command = {function, {(size_t)gx * bx, (size_t)gy * by, (size_t)gz * bz}, {bx, by, bz}, {0}};
    for (uint32_t i = 0; i < function->signature.arguments; i++) {
        memcpy(&command.values[i], parameters[i], function->signature.pointer[i] ? 8 : 4);
        if (function->signature.pointer[i] && !on_device((void *)command.values[i], 1)) status = INVALID_VALUE;
    }
    if (status) goto end;
    if (!stream->capturing) {
        status = enqueue(&command);
        goto end;
    }
    Graph *graph = stream->graph;
    graph->commands = realloc(graph->commands, (graph->count + 1) * sizeof command);
    graph->commands[graph->count++] = command;
    END
}

EXPORT int hipStreamBeginCapture(Stream *stream, int mode) {
    BEGIN_OUTSIDE("hipStreamBeginCapture")
    if (mode != 1) {  // thread-local, as RDNA 2 needs
        status = INVALID_VALUE;
        goto end;
    }
    stream->capturing = 1;
    stream->broken = 0;
    stream->by = pthread_self();
    stream->graph = calloc(1, sizeof(Graph));
    END
}

EXPORT int hipStreamEndCapture(Stream *stream, Graph **graph) {
    BEGIN("hipStreamEndCapture")
    const char *how = getenv("HIP_TEST_GRAPHS");
    int good = stream->capturing && !stream->broken && !(how && !strcmp(how, "refused"));
    stream->capturing = 0;
    *graph = good ? stream->graph : NULL;
    status = good ? OK : CAPTURE_INVALIDATED;
    END
}

EXPORT int hipGraphInstantiateWithFlags(Graph **executable, const Graph *graph, unsigned long long flags) {
    BEGIN_OUTSIDE("hipGraphInstantiateWithFlags")
    *executable = malloc(sizeof **executable);
    **executable = *graph;
    (*executable)->commands = malloc(graph->count * sizeof(Command));
    memcpy((*executable)->commands, graph->commands, graph->count * sizeof(Command));
    END
}

EXPORT int hipGraphLaunch(Graph *graph, Stream *stream) {
    BEGIN_OUTSIDE("hipGraphLaunch")
    const char *how = getenv("HIP_TEST_GRAPHS");
    int wrong = how && !strcmp(how, "wrong") && graph->launched++;
    for (size_t i = 0; i < graph->count && !status; i++)
        if (!(wrong && i == graph->count / 2)) status = enqueue(&graph->commands[i]);
    END
}

static int destroy(const char *call, Graph *graph) {
    BEGIN_OUTSIDE(call)
    free(graph->commands);
    free(graph);
    END
}

EXPORT int hipGraphDestroy(Graph *graph) { return destroy("hipGraphDestroy", graph); }
EXPORT int hipGraphExecDestroy(Graph *graph) { return destroy("hipGraphExecDestroy", graph); }

EXPORT int hipModuleLoadData(Module **module, const Image *image) {
    BEGIN_OUTSIDE("hipModuleLoadData")
    status = INVALID_IMAGE;
    if (memcmp(image->magic, IMAGE_MAGIC, 8)) goto end;
    const unsigned char *binary = (const unsigned char *)(image + 1);
    int error;
    cl_handle program = clCreateProgramWithBinary(opencl_context, 1, &opencl_device, &image->size, &binary, NULL, &error);
    if (error || clBuildProgram(program, 1, &opencl_device, NULL, NULL, NULL)) goto end;
    *module = malloc(sizeof **module);
    (*module)->program = program;
    memcpy((*module)->kernels, image->kernels, sizeof image->kernels);
    status = OK;
    END
}

EXPORT int hipModuleGetFunction(Function **function, Module *module, const char *name) {
    BEGIN_OUTSIDE("hipModuleGetFunction")
    int error;
    cl_handle kernel = clCreateKernel(module->program, name, &error);
    status = NOT_FOUND;
    for (size_t i = 0; i < MAX_KERNELS && !error; i++) {
        if (strcmp(module->kernels[i].name, name)) continue;
        *function = malloc(sizeof **function);
        **function = (Function){kernel, module->kernels[i]};
        status = OK;
    }
    END
}

EXPORT int hipModuleUnload(Module *module) {
    BEGIN_OUTSIDE("hipModuleUnload")
    clReleaseProgram(module->program);  // its kernels hold on to it
    free(module);
    END
}

EXPORT const char *hipGetErrorName(int status) {
    switch (status) {
    case OK: return "hipSuccess";
    case INVALID_VALUE: return "hipErrorInvalidValue";
    case OUT_OF_MEMORY: return "hipErrorOutOfMemory";
    case INVALID_CONFIGURATION: return "hipErrorInvalidConfiguration";
    case NO_DEVICE: return "hipErrorNoDevice";
    case INVALID_DEVICE: return "hipErrorInvalidDevice";
    case INVALID_IMAGE: return "hipErrorInvalidImage";
    case NOT_FOUND: return "hipErrorNotFound";
    case 700: return "hipErrorIllegalAddress";
    case 719: return "hipErrorLaunchFailure";
    case CAPTURE_UNSUPPORTED: return "hipErrorStreamCaptureUnsupported";
    case CAPTURE_INVALIDATED: return "hipErrorStreamCaptureInvalidated";
    case 999: return "hipErrorUnknown";
    default: return "hipErrorTbd";
    }
}
