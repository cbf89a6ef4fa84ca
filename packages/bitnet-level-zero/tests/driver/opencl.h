// What the test driver uses of OpenCL and of cl_intel_unified_shared_memory, found in the loader at run time.
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef int32_t cl_int;
typedef uint32_t cl_uint;
typedef uint64_t cl_ulong;
typedef void *cl_handle;

enum { CL_DEVICE_TYPE_CPU = 2, CL_PLATFORM_NAME = 0x0902, CL_PROGRAM_BUILD_LOG = 0x1183 };
enum {
    CL_DEVICE_NAME = 0x102B,
    CL_DEVICE_LOCAL_MEM_SIZE = 0x1023,
    CL_DEVICE_GLOBAL_MEM_SIZE = 0x101F,
    CL_DEVICE_MAX_COMPUTE_UNITS = 0x1002
};

// name, result, arguments
#define OPENCL_FUNCTIONS(F)                                                                                              \
    F(clGetPlatformIDs, cl_int, (cl_uint, cl_handle *, cl_uint *))                                                       \
    F(clGetPlatformInfo, cl_int, (cl_handle, cl_uint, size_t, void *, size_t *))                                         \
    F(clGetDeviceIDs, cl_int, (cl_handle, cl_ulong, cl_uint, cl_handle *, cl_uint *))                                    \
    F(clGetDeviceInfo, cl_int, (cl_handle, cl_uint, size_t, void *, size_t *))                                           \
    F(clCreateContext, cl_handle, (const intptr_t *, cl_uint, const cl_handle *, void *, void *, cl_int *))              \
    F(clReleaseContext, cl_int, (cl_handle))                                                                             \
    F(clCreateCommandQueueWithProperties, cl_handle, (cl_handle, cl_handle, const cl_ulong *, cl_int *))                 \
    F(clReleaseCommandQueue, cl_int, (cl_handle))                                                                        \
    F(clFinish, cl_int, (cl_handle))                                                                                     \
    F(clFlush, cl_int, (cl_handle))                                                                                      \
    F(clCreateProgramWithIL, cl_handle, (cl_handle, const void *, size_t, cl_int *))                                     \
    F(clBuildProgram, cl_int, (cl_handle, cl_uint, const cl_handle *, const char *, void *, void *))                     \
    F(clGetProgramBuildInfo, cl_int, (cl_handle, cl_handle, cl_uint, size_t, void *, size_t *))                          \
    F(clReleaseProgram, cl_int, (cl_handle))                                                                             \
    F(clCreateKernel, cl_handle, (cl_handle, const char *, cl_int *))                                                    \
    F(clReleaseKernel, cl_int, (cl_handle))                                                                              \
    F(clSetKernelArg, cl_int, (cl_handle, cl_uint, size_t, const void *))                                                \
    F(clEnqueueNDRangeKernel, cl_int,                                                                                    \
      (cl_handle, cl_handle, cl_uint, const size_t *, const size_t *, const size_t *, cl_uint, const cl_handle *, cl_handle *)) \
    F(clGetExtensionFunctionAddressForPlatform, void *, (cl_handle, const char *))

#define OPENCL_EXTENSIONS(F)                                                                                             \
    F(clDeviceMemAllocINTEL, void *, (cl_handle, cl_handle, const cl_ulong *, size_t, cl_uint, cl_int *))                \
    F(clSharedMemAllocINTEL, void *, (cl_handle, cl_handle, const cl_ulong *, size_t, cl_uint, cl_int *))                \
    F(clMemFreeINTEL, cl_int, (cl_handle, void *))                                                                       \
    F(clSetKernelArgMemPointerINTEL, cl_int, (cl_handle, cl_uint, const void *))

#define DECLARE(name, result, arguments) extern result(*name) arguments;
OPENCL_FUNCTIONS(DECLARE)
OPENCL_EXTENSIONS(DECLARE)
#undef DECLARE

// Of Intel's platform: found once. 0 where it is not there.
int open_opencl(void);
extern cl_handle the_device, the_platform;
