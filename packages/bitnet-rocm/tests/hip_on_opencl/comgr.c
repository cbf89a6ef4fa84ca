// libamd_comgr's calls over the CPU's OpenCL compiler: a "code object" is a program's binary. It takes the numbers of version 2 or
// 3 only, as HIP_TEST_COMGR says, and knows the architectures below. HIP_TEST_ABORT=1: it ends the process that compiles.
// HIP_TEST_REFUSE: it does not take sources with that text.
#include "opencl.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
enum { SUCCESS, ERROR, INVALID_ARGUMENT };
enum { SOURCE = 1, LOG = 5, BC = 6, RELOCATABLE = 7, EXECUTABLE = 8, KINDS = 0x16, OPENCL_2_0 = 2 };
static const char *const ISAS[] = {"amdgcn-amd-amdhsa--gfx906", "amdgcn-amd-amdhsa--gfx90a", "amdgcn-amd-amdhsa--gfx942",
                                   "amdgcn-amd-amdhsa--gfx950", "amdgcn-amd-amdhsa--gfx1030", "amdgcn-amd-amdhsa--gfx1100",
                                   "amdgcn-amd-amdhsa--gfx1201"};
enum { COUNT = sizeof ISAS / sizeof *ISAS };

typedef struct { int kind, held; size_t size; char *bytes; } Data;
typedef struct { Data *data[8]; size_t count; } Set;
typedef struct { int language; char isa[64], options[4096]; } Info;

EXPORT void amd_comgr_get_version(size_t *major, size_t *minor) {
    *major = (size_t)setting("HIP_TEST_COMGR", 3);
    *minor = 0;
}

EXPORT int amd_comgr_get_isa_count(size_t *count) {
    *count = COUNT;
    return SUCCESS;
}

EXPORT int amd_comgr_get_isa_name(size_t index, const char **name) {
    if (index >= COUNT) return INVALID_ARGUMENT;
    *name = ISAS[index];
    return SUCCESS;
}

EXPORT int amd_comgr_create_data(int kind, Data **data) {
    if (kind <= 0 || kind >= KINDS) return INVALID_ARGUMENT;
    *data = calloc(1, sizeof **data);
    **data = (Data){kind, 1, 0, NULL};
    return SUCCESS;
}

EXPORT int amd_comgr_release_data(Data *data) {
    if (--data->held) return SUCCESS;
    free(data->bytes);
    free(data);
    return SUCCESS;
}

EXPORT int amd_comgr_set_data(Data *data, size_t size, const char *bytes) {
    free(data->bytes);
    data->bytes = malloc(size + 1);
    memcpy(data->bytes, bytes, size);
    data->bytes[size] = 0;
    data->size = size;
    return SUCCESS;
}

EXPORT int amd_comgr_set_data_name(Data *data, const char *name) { return SUCCESS; }

EXPORT int amd_comgr_get_data(Data *data, size_t *size, char *bytes) {
    if (bytes) memcpy(bytes, data->bytes, *size < data->size ? *size : data->size);
    *size = data->size;
    return SUCCESS;
}

EXPORT int amd_comgr_create_data_set(Set **set) {
    *set = calloc(1, sizeof **set);
    return SUCCESS;
}

EXPORT int amd_comgr_destroy_data_set(Set *set) {
    for (size_t i = 0; i < set->count; i++) amd_comgr_release_data(set->data[i]);
    free(set);
    return SUCCESS;
}

EXPORT int amd_comgr_data_set_add(Set *set, Data *data) {
    data->held++;
    set->data[set->count++] = data;
    return SUCCESS;
}

static Data *nth(const Set *set, int kind, size_t index) {
    for (size_t i = 0; i < set->count; i++)
        if (set->data[i]->kind == kind && !index--) return set->data[i];
    return NULL;
}

EXPORT int amd_comgr_action_data_count(const Set *set, int kind, size_t *count) {
    for (*count = 0; nth(set, kind, *count);) ++*count;
    return SUCCESS;
}

EXPORT int amd_comgr_action_data_get_data(const Set *set, int kind, size_t index, Data **data) {
    if (!(*data = nth(set, kind, index))) return INVALID_ARGUMENT;
    (*data)->held++;
    return SUCCESS;
}

EXPORT int amd_comgr_create_action_info(Info **info) {
    *info = calloc(1, sizeof **info);
    return SUCCESS;
}

EXPORT int amd_comgr_destroy_action_info(Info *info) {
    free(info);
    return SUCCESS;
}

EXPORT int amd_comgr_action_info_set_isa_name(Info *info, const char *name) {
    for (size_t i = 0; i < COUNT; i++) {
        if (strcmp(name, ISAS[i])) continue;
        strcpy(info->isa, name);
        return SUCCESS;
    }
    return INVALID_ARGUMENT;
}

EXPORT int amd_comgr_action_info_set_language(Info *info, int language) {
    info->language = language;
    return language == OPENCL_2_0 ? SUCCESS : INVALID_ARGUMENT;
}

EXPORT int amd_comgr_action_info_set_logging(Info *info, bool logging) { return SUCCESS; }

// Only the constants are options of this compiler. GPU unrolls loops, for which it would take long.
EXPORT int amd_comgr_action_info_set_option_list(Info *info, const char **options, size_t count) {
    int subgroups = opencl_open() && opencl_has("cl_khr_subgroups"), half = opencl_has("cl_khr_fp16");
    strcpy(info->options, subgroups ? "-cl-kernel-arg-info -cl-std=CL3.0" : "-cl-kernel-arg-info -cl-std=CL1.2");
    for (size_t i = 0; i < count; i++) {
        const char *option = options[i];
        if (strncmp(option, "-D", 2) || !strcmp(option, "-DGPU=1")) continue;
        if ((!strcmp(option, "-DSUBGROUPS=1") && !subgroups) || (!strcmp(option, "-DFP16=1") && !half)) continue;
        if (strlen(info->options) + strlen(option) + 2 > sizeof info->options) return ERROR;
        strcat(strcat(info->options, " "), option);
    }
    return SUCCESS;
}

static int put(Set *set, int kind, const char *bytes, size_t size) {
    Data *data;
    amd_comgr_create_data(kind, &data);
    amd_comgr_set_data(data, size, bytes);
    amd_comgr_data_set_add(set, data);
    return amd_comgr_release_data(data);
}

// What the kernels of a program take, which a program made of its binary does not tell.
static int signatures(cl_handle program, Signature *found) {
    cl_handle kernels[MAX_KERNELS];
    uint32_t count = 0;
    if (clCreateKernelsInProgram(program, MAX_KERNELS, kernels, &count)) return ERROR;
    for (uint32_t k = 0; k < count; k++) {
        clGetKernelInfo(kernels[k], CL_KERNEL_FUNCTION_NAME, sizeof found[k].name, found[k].name, NULL);
        clGetKernelInfo(kernels[k], CL_KERNEL_NUM_ARGS, sizeof found[k].arguments, &found[k].arguments, NULL);
        if (found[k].arguments > MAX_ARGUMENTS) return ERROR;
        for (uint32_t i = 0; i < found[k].arguments; i++) {
            uint32_t space = 0;
            if (clGetKernelArgInfo(kernels[k], i, CL_KERNEL_ARG_ADDRESS_QUALIFIER, sizeof space, &space, NULL)) return ERROR;
            found[k].pointer[i] = space == CL_KERNEL_ARG_ADDRESS_GLOBAL;
        }
        clReleaseKernel(kernels[k]);
    }
    return SUCCESS;
}

static int build(const Info *info, const Data *source, Set *result) {
    const char *texts[] = {shim, source->bytes};
    int error;
    const char *refused = getenv("HIP_TEST_REFUSE");
    if (refused && *refused && strstr(source->bytes, refused)) {
        put(result, LOG, "refused", 7);
        return ERROR;
    }
    if (!opencl_open()) return ERROR;
    cl_handle program = clCreateProgramWithSource(opencl_context, 2, texts, NULL, &error);
    if (clBuildProgram(program, 1, &opencl_device, info->options, NULL, NULL)) {
        static char log[65536];
        size_t size = 0;
        clGetProgramBuildInfo(program, opencl_device, CL_PROGRAM_BUILD_LOG, sizeof log, log, &size);
        put(result, LOG, log, size);
        clReleaseProgram(program);
        return ERROR;
    }
    size_t size = 0;
    clGetProgramInfo(program, CL_PROGRAM_BINARY_SIZES, sizeof size, &size, NULL);
    Image *image = calloc(1, sizeof *image + size);
    unsigned char *binary = (unsigned char *)(image + 1);
    memcpy(image->magic, IMAGE_MAGIC, 8);
    image->size = size;
    clGetProgramInfo(program, CL_PROGRAM_BINARIES, sizeof binary, &binary, NULL);
    error = signatures(program, image->kernels);
    if (!error) put(result, BC, (char *)image, sizeof *image + size);
    free(image);
    clReleaseProgram(program);
    return error;
}

EXPORT int amd_comgr_do_action(int action, const Info *info, const Set *input, Set *result) {
    if (setting("HIP_TEST_ABORT", 0)) abort();
    long version = setting("HIP_TEST_COMGR", 3);
    int generate = version == 3 ? 4 : 6, link = version == 3 ? 7 : 9;
    int from = action == 2 ? SOURCE : action == generate ? BC : action == link ? RELOCATABLE : 0;
    Data *given = from ? nth(input, from, 0) : NULL;
    if (!given || !*info->isa || info->language != OPENCL_2_0) return INVALID_ARGUMENT;
    if (from == SOURCE) return build(info, given, result);
    return put(result, from == BC ? RELOCATABLE : EXECUTABLE, given->bytes, given->size);
}
