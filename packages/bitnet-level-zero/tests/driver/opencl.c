#include "opencl.h"

#include <dlfcn.h>
#include <string.h>

#define DEFINE(name, result, arguments) result(*name) arguments;
OPENCL_FUNCTIONS(DEFINE)
OPENCL_EXTENSIONS(DEFINE)

cl_handle the_device, the_platform;

int open_opencl(void) {
    if (the_device) return 1;
    void *library = dlopen("libOpenCL.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) return 0;
#define FIND(name, result, arguments) \
    if (!(name = (result(*) arguments)dlsym(library, #name))) return 0;
    OPENCL_FUNCTIONS(FIND)
    cl_handle platforms[16];
    cl_uint count = 0;
    if (clGetPlatformIDs(16, platforms, &count)) return 0;
    for (cl_uint i = 0; i < count && i < 16; i++) {
        char name[64] = "";
        clGetPlatformInfo(platforms[i], CL_PLATFORM_NAME, sizeof name - 1, name, 0);
        if (!strstr(name, "Intel") || clGetDeviceIDs(platforms[i], CL_DEVICE_TYPE_CPU, 1, &the_device, 0)) continue;
        the_platform = platforms[i];
#define FIND_EXTENSION(name, result, arguments) \
    if (!(name = (result(*) arguments)clGetExtensionFunctionAddressForPlatform(the_platform, #name))) return 0;
        OPENCL_EXTENSIONS(FIND_EXTENSION)
        return 1;
    }
    return 0;
}
