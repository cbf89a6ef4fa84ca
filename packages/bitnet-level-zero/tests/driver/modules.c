// Modules and kernels. A native binary is the SPIR-V after a mark.
#include "driver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char MARK[8] = "bitnettd";

static ze_module_build_log_handle_t log_of(const char *text) {
    ze_module_build_log_handle_t log = calloc(1, sizeof *log);
    log->text = strdup(text);
    objects++;
    return log;
}

enum { DOT_PRODUCT = 6019, MATRIX_MULTIPLY_ACCUMULATE = 6236 };

// Whether SPIR-V declares a capability.
static int declares(uint32_t capability, const uint8_t *bytes, size_t size) {
    for (size_t i = 20; i + 8 <= size; i += 4) {
        uint32_t words[2];
        memcpy(words, bytes + i, 8);
        if (words[0] == (2u << 16 | 17) && words[1] == capability) return 1;
    }
    return 0;
}

// Takes the hints to unroll off (the last word of each OpLoopMerge): on a CPU they only make the compiler slow.
static void unhint(uint32_t *words, size_t count) {
    for (size_t at = 5; at < count && words[at] >> 16; at += words[at] >> 16)
        if (words[at] == (4u << 16 | 246)) words[at + 3] = 0;
}

ze_result_t zeModuleCreate(ze_context_handle_t context, ze_device_handle_t device, const ze_module_desc_t *desc,
                           ze_module_handle_t *made, ze_module_build_log_handle_t *log) {
    const uint8_t *words = desc->pInputModule;
    size_t size = desc->inputSize;
    if (desc->stype != ZE_STRUCTURE_TYPE_MODULE_DESC) return ZE_RESULT_ERROR_INVALID_ENUMERATION;
    if (log) *log = 0;
    if (lost()) return ZE_RESULT_ERROR_DEVICE_LOST;
    if (faulty("build") || (getenv("BITNET_TEST_DRIVER_NO_DOT") && declares(DOT_PRODUCT, words, size)) ||
        (getenv("BITNET_TEST_DRIVER_NO_XMX") && declares(MATRIX_MULTIPLY_ACCUMULATE, words, size))) {
        if (log) *log = log_of("error: the fault that was asked for");
        return ZE_RESULT_ERROR_MODULE_BUILD_FAILURE;
    }
    if (desc->format == ZE_MODULE_FORMAT_NATIVE) {
        if (faulty("native") || size < sizeof MARK || memcmp(words, MARK, sizeof MARK)) return ZE_RESULT_ERROR_INVALID_NATIVE_BINARY;
        words += sizeof MARK;
        size -= sizeof MARK;
    }
    cl_int error = 0;
    uint32_t *copy = malloc(size);
    memcpy(copy, words, size);
    unhint(copy, size / 4);
    cl_handle program = clCreateProgramWithIL(context->context, copy, size, &error);
    free(copy);
    if (!error) error = clBuildProgram(program, 1, &the_device, "", 0, 0);
    char text[4096] = "";
    if (program) clGetProgramBuildInfo(program, the_device, CL_PROGRAM_BUILD_LOG, sizeof text - 1, text, 0);
    if (log) *log = log_of(error ? text : "");
    if (error) {
        if (program) clReleaseProgram(program);
        return ZE_RESULT_ERROR_MODULE_BUILD_FAILURE;
    }
    ze_module_handle_t module = calloc(1, sizeof *module);
    *module = (struct _ze_module_handle_t){context, program, size, malloc(size)};
    memcpy(module->words, words, size);
    *made = module;
    objects++;
    return ZE_RESULT_SUCCESS;
}

ze_result_t zeModuleDestroy(ze_module_handle_t module) {
    clReleaseProgram(module->program);
    free(module->words);
    free(module);
    objects--;
    return ZE_RESULT_SUCCESS;
}

ze_result_t zeModuleGetNativeBinary(ze_module_handle_t module, size_t *size, uint8_t *binary) {
    if (binary) {
        memcpy(binary, MARK, sizeof MARK);
        memcpy(binary + sizeof MARK, module->words, module->size);
    }
    *size = sizeof MARK + module->size;
    return ZE_RESULT_SUCCESS;
}

ze_result_t zeModuleBuildLogGetString(ze_module_build_log_handle_t log, size_t *size, char *text) {
    if (text) memcpy(text, log->text, *size);
    *size = strlen(log->text) + 1;
    return ZE_RESULT_SUCCESS;
}

ze_result_t zeModuleBuildLogDestroy(ze_module_build_log_handle_t log) {
    free(log->text);
    free(log);
    objects--;
    return ZE_RESULT_SUCCESS;
}

ze_result_t zeKernelCreate(ze_module_handle_t module, const ze_kernel_desc_t *desc, ze_kernel_handle_t *made) {
    if (desc->stype != ZE_STRUCTURE_TYPE_KERNEL_DESC) return ZE_RESULT_ERROR_INVALID_ENUMERATION;
    cl_int error = 0;
    cl_handle found = clCreateKernel(module->program, desc->pKernelName, &error);
    if (error) return ZE_RESULT_ERROR_INVALID_KERNEL_NAME;
    ze_kernel_handle_t kernel = calloc(1, sizeof *kernel);
    kernel->module = module;
    kernel->kernel = found;
    *made = kernel;
    objects++;
    return ZE_RESULT_SUCCESS;
}

ze_result_t zeKernelDestroy(ze_kernel_handle_t kernel) {
    if (submitted != finished && !lost()) return ZE_RESULT_ERROR_HANDLE_OBJECT_IN_USE;
    clReleaseKernel(kernel->kernel);
    free(kernel);
    objects--;
    return ZE_RESULT_SUCCESS;
}

ze_result_t zeKernelSetGroupSize(ze_kernel_handle_t kernel, uint32_t x, uint32_t y, uint32_t z) {
    if (!x || !y || !z || x * y * z > 512) return ZE_RESULT_ERROR_INVALID_GROUP_SIZE_DIMENSION;
    kernel->group[0] = x;
    kernel->group[1] = y;
    kernel->group[2] = z;
    return ZE_RESULT_SUCCESS;
}

ze_result_t zeKernelSetArgumentValue(ze_kernel_handle_t kernel, uint32_t index, size_t size, const void *value) {
    if (index >= MAX_ARGUMENTS) return ZE_RESULT_ERROR_INVALID_KERNEL_ARGUMENT_INDEX;
    if (size != 4 && size != sizeof(void *)) return ZE_RESULT_ERROR_INVALID_KERNEL_ARGUMENT_SIZE;
    argument_t *argument = &kernel->argument[index];
    argument->size = size;
    memcpy(argument->value.bytes, value, size);
    if (size == sizeof(void *)) {  // no kernel has a number of eight bytes: it is the address of memory of ours
        char *at = argument->value.pointer;
        allocation_t *one = kernel->module->context->allocations;
        while (one && (at < (char *)one->pointer || at >= (char *)one->pointer + one->size)) one = one->next;
        if (!one && !reads(at)) return ZE_RESULT_ERROR_INVALID_ARGUMENT;
    }
    if (index + 1 > kernel->arguments) kernel->arguments = index + 1;
    return ZE_RESULT_SUCCESS;
}

ze_result_t zeKernelGetProperties(ze_kernel_handle_t kernel, ze_kernel_properties_t *properties) {
    if (properties->stype != ZE_STRUCTURE_TYPE_KERNEL_PROPERTIES) return ZE_RESULT_ERROR_INVALID_ENUMERATION;
    properties->spillMemSize = 0;
    return ZE_RESULT_SUCCESS;
}
