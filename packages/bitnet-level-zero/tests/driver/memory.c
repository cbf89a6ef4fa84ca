// Contexts and memory, which is guarded. What work in flight may use is not freed.
#include "driver.h"

#include <stdio.h>

#include "guarded.h"

static size_t allocated;
enum { LITTLE = 1 << 20 };  // bytes there are where memory is short

ze_result_t zeContextCreate(ze_driver_handle_t driver, const ze_context_desc_t *desc, ze_context_handle_t *made) {
    cl_int error = 0;
    ze_context_handle_t context = calloc(1, sizeof *context);
    context->context = clCreateContext(0, 1, &the_device, 0, 0, &error);
    *made = context;
    objects++;
    return result_of(error);
}

ze_result_t zeContextDestroy(ze_context_handle_t context) {
    objects--;
    if (context->allocations || objects) fprintf(stderr, "test driver: a context is destroyed, and %d objects are left\n", objects);
    clReleaseContext(context->context);
    free(context);
    return ZE_RESULT_SUCCESS;
}

static ze_result_t allocate(ze_context_handle_t context, size_t size, size_t alignment, int shared, void **made) {
    if (lost()) return ZE_RESULT_ERROR_DEVICE_LOST;
    if (!size) return ZE_RESULT_ERROR_UNSUPPORTED_SIZE;
    if (faulty("memory") && allocated + size > LITTLE) return ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY;
    cl_int error = 0;
    size_t all = guarded_room(size);
    void *room = (shared ? clSharedMemAllocINTEL : clDeviceMemAllocINTEL)(context->context, the_device, 0, all, (cl_uint)alignment, &error);
    if (error || !room) return error ? result_of(error) : ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY;
    *made = guarded_begin(room, size);
    allocation_t *one = calloc(1, sizeof *one);
    *one = (allocation_t){*made, size, context->allocations, room};
    context->allocations = one;
    allocated += size;
    objects++;
    return ZE_RESULT_SUCCESS;
}

ze_result_t zeMemAllocDevice(ze_context_handle_t context, const ze_device_mem_alloc_desc_t *desc, size_t size, size_t alignment,
                             ze_device_handle_t device, void **made) {
    return allocate(context, size, alignment, 0, made);
}

ze_result_t zeMemAllocShared(ze_context_handle_t context, const ze_device_mem_alloc_desc_t *desc, const ze_host_mem_alloc_desc_t *host,
                             size_t size, size_t alignment, ze_device_handle_t device, void **made) {
    return allocate(context, size, alignment, 1, made);
}

ze_result_t zeMemFree(ze_context_handle_t context, void *pointer) {
    if (submitted != finished && !lost()) return ZE_RESULT_ERROR_HANDLE_OBJECT_IN_USE;
    for (allocation_t **one = &context->allocations; *one; one = &(*one)->next) {
        if ((*one)->pointer != pointer) continue;
        allocation_t *gone = *one;
        *one = gone->next;
        allocated -= gone->size;
        objects--;
        void *room = gone->room;
        guarded_end(pointer, gone->size);
        free(gone);
        return result_of(clMemFreeINTEL(context->context, room));
    }
    return ZE_RESULT_ERROR_INVALID_ARGUMENT;
}

static allocation_t *imported;

static int host_memory(const char *kind) {
    const char *asked = getenv("BITNET_TEST_DRIVER_HOST_MEMORY");
    return asked && !strcmp(asked, kind);
}

int reads(const void *pointer) {
    const char *at = pointer;
    for (allocation_t *one = imported; one; one = one->next)
        if (at >= (char *)one->pointer && at < (char *)one->pointer + one->size) return 1;
    return host_memory("read");
}

ze_result_t zeDeviceGetMemoryAccessProperties(ze_device_handle_t device, ze_device_memory_access_properties_t *properties) {
    if (properties->stype != ZE_STRUCTURE_TYPE_DEVICE_MEMORY_ACCESS_PROPERTIES) return ZE_RESULT_ERROR_INVALID_ENUMERATION;
    properties->sharedSystemAllocCapabilities = host_memory("read") ? ZE_MEMORY_ACCESS_CAP_FLAG_RW : 0;
    return ZE_RESULT_SUCCESS;
}

static ze_result_t import(ze_driver_handle_t driver, void *pointer, size_t size) {
    allocation_t *one = calloc(1, sizeof *one);
    *one = (allocation_t){pointer, size, imported, 0};
    imported = one;
    objects++;
    return ZE_RESULT_SUCCESS;
}

static ze_result_t release(ze_driver_handle_t driver, void *pointer) {
    if (submitted != finished && !lost()) return ZE_RESULT_ERROR_HANDLE_OBJECT_IN_USE;
    for (allocation_t **one = &imported; *one; one = &(*one)->next) {
        if ((*one)->pointer != pointer) continue;
        allocation_t *gone = *one;
        *one = gone->next;
        objects--;
        free(gone);
        return ZE_RESULT_SUCCESS;
    }
    return ZE_RESULT_ERROR_INVALID_ARGUMENT;
}

ze_result_t zeDriverGetExtensionFunctionAddress(ze_driver_handle_t driver, const char *name, void **function) {
    *function = 0;
    if (host_memory("import") && !strcmp(name, "zexDriverImportExternalPointer")) *function = import;
    if (host_memory("import") && !strcmp(name, "zexDriverReleaseImportedPointer")) *function = release;
    return *function ? ZE_RESULT_SUCCESS : ZE_RESULT_ERROR_INVALID_ARGUMENT;
}
