#include "opencl.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#define DEFINE(name, result, arguments) result(*name) arguments;
OPENCL_CALLS(DEFINE)
cl_handle opencl_device, opencl_context, opencl_queue;

int opencl_open(void) {
    if (opencl_queue) return 1;
    void *library = dlopen("libOpenCL.so.1", RTLD_NOW);
    if (!library) return 0;
#define FIND(name, result, arguments)                                                                                          \
    if (!(*(void **)&name = dlsym(library, #name))) return 0;
    OPENCL_CALLS(FIND)
    cl_handle platform;
    uint32_t count = 0;
    if (clGetPlatformIDs(1, &platform, &count) || !count) return 0;
    if (clGetDeviceIDs(platform, (uint64_t)CL_DEVICE_TYPE_ALL & 0xFFFFFFFF, 1, &opencl_device, &count) || !count) return 0;
    int error;
    opencl_context = clCreateContext(NULL, 1, &opencl_device, NULL, NULL, &error);
    if (error) return 0;
    opencl_queue = clCreateCommandQueue(opencl_context, opencl_device, 0, &error);
    return !error;
}

int opencl_has(const char *extension) {
    static char extensions[16384];
    if (!*extensions) clGetDeviceInfo(opencl_device, CL_DEVICE_EXTENSIONS, sizeof extensions - 1, extensions, NULL);
    return strstr(extensions, extension) != NULL;
}

long setting(const char *name, long otherwise) {
    const char *value = getenv(name);
    return value && *value ? strtol(value, NULL, 0) : otherwise;
}
