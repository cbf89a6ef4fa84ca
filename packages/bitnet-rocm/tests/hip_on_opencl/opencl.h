// The part of OpenCL 2.0 that the test driver calls, from its specification; the loader is opened at run time.
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef void *cl_handle;
enum { CL_DEVICE_TYPE_ALL = -1, CL_PROGRAM_BINARY_SIZES = 0x1165, CL_PROGRAM_BINARIES = 0x1166, CL_PROGRAM_BUILD_LOG = 0x1183,
       CL_DEVICE_EXTENSIONS = 0x1030, CL_KERNEL_FUNCTION_NAME = 0x1190, CL_KERNEL_NUM_ARGS = 0x1191, CL_KERNEL_ARG_ADDRESS_QUALIFIER = 0x1196,
       CL_KERNEL_ARG_ADDRESS_GLOBAL = 0x119B,
       CL_MEM_READ_WRITE = 1, CL_MEM_SVM_FINE_GRAIN_BUFFER = 1 << 10 };

// name, result, arguments
#define OPENCL_CALLS(X)                                                                                                       \
    X(clGetPlatformIDs, int, (uint32_t, cl_handle *, uint32_t *))                                                               \
    X(clGetDeviceIDs, int, (cl_handle, uint64_t, uint32_t, cl_handle *, uint32_t *))                                            \
    X(clGetDeviceInfo, int, (cl_handle, uint32_t, size_t, void *, size_t *))                                                    \
    X(clCreateContext, cl_handle, (const intptr_t *, uint32_t, const cl_handle *, void *, void *, int *))                      \
    X(clCreateCommandQueue, cl_handle, (cl_handle, cl_handle, uint64_t, int *))                                                 \
    X(clCreateProgramWithSource, cl_handle, (cl_handle, uint32_t, const char **, const size_t *, int *))                       \
    X(clCreateProgramWithBinary, cl_handle,                                                                                    \
      (cl_handle, uint32_t, const cl_handle *, const size_t *, const unsigned char **, int *, int *))                          \
    X(clBuildProgram, int, (cl_handle, uint32_t, const cl_handle *, const char *, void *, void *))                             \
    X(clGetProgramInfo, int, (cl_handle, uint32_t, size_t, void *, size_t *))                                                   \
    X(clGetProgramBuildInfo, int, (cl_handle, cl_handle, uint32_t, size_t, void *, size_t *))                                   \
    X(clReleaseProgram, int, (cl_handle))                                                                                      \
    X(clCreateKernel, cl_handle, (cl_handle, const char *, int *))                                                             \
    X(clCreateKernelsInProgram, int, (cl_handle, uint32_t, cl_handle *, uint32_t *))                                           \
    X(clReleaseKernel, int, (cl_handle))                                                                                       \
    X(clGetKernelInfo, int, (cl_handle, uint32_t, size_t, void *, size_t *))                                                    \
    X(clGetKernelArgInfo, int, (cl_handle, uint32_t, uint32_t, size_t, void *, size_t *))                                       \
    X(clSetKernelArg, int, (cl_handle, uint32_t, size_t, const void *))                                                        \
    X(clSetKernelArgSVMPointer, int, (cl_handle, uint32_t, const void *))                                                      \
    X(clEnqueueNDRangeKernel, int,                                                                                             \
      (cl_handle, cl_handle, uint32_t, const size_t *, const size_t *, const size_t *, uint32_t, const void *, void *))        \
    X(clFinish, int, (cl_handle))                                                                                              \
    X(clEnqueueSVMMemcpy, int, (cl_handle, uint32_t, void *, const void *, size_t, uint32_t, const void *, void *))             \
    X(clSVMAlloc, void *, (cl_handle, uint64_t, size_t, uint32_t))                                                             \
    X(clSVMFree, void, (cl_handle, void *))

#define DECLARE(name, result, arguments) extern result(*name) arguments;
OPENCL_CALLS(DECLARE)
#undef DECLARE

// What stands for a code object: this, and then the program's binary.
enum { MAX_ARGUMENTS = 64, MAX_KERNELS = 8 };
typedef struct { char name[64]; uint32_t arguments; unsigned char pointer[MAX_ARGUMENTS]; } Signature;
typedef struct { char magic[8]; size_t size; Signature kernels[MAX_KERNELS]; } Image;
#define IMAGE_MAGIC "OPENCL\0"

// The one device, opened when first asked for; 0 where there is none.
int opencl_open(void);
extern cl_handle opencl_device, opencl_context, opencl_queue;
int opencl_has(const char *extension);

// A setting of a test: an environment variable's number, or `otherwise`.
long setting(const char *name, long otherwise);

// What goes in front of AMD's kernels.
extern const char *const shim;
