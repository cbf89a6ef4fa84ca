// Drivers, devices and what they say of themselves.
#include "driver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct _ze_driver_handle_t the_driver;
static struct _ze_device_handle_t devices[MAX_DEVICES];
uint64_t submitted, finished;
int objects;

// BITNET_TEST_DRIVER_FAULT: `uninitialized`, `permission`, `old`, `no-device`, `no-half`, `build`, `native`, `memory`, `lost`
// (from the second submission on), `hung` (every wait fails), `wrong` (launches are left out), `unnamed` (no test driver, it says).
int faulty(const char *kind) {
    const char *asked = getenv("BITNET_TEST_DRIVER_FAULT");
    return asked && !strcmp(asked, kind);
}

int lost(void) { return (faulty("lost") && submitted > 1) || faulty("hung"); }

ze_result_t result_of(cl_int error) {
    if (!error) return ZE_RESULT_SUCCESS;
    fprintf(stderr, "test driver: OpenCL's error %d\n", error);
    return error == -4 || error == -5 || error == -6 ? ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY : ZE_RESULT_ERROR_UNKNOWN;
}

static uint32_t read_devices(void) {
    const char *asked = getenv("BITNET_TEST_DRIVER_DEVICES");
    char text[128] = "cpu";
    if (asked && *asked) snprintf(text, sizeof text, "%s", asked);
    uint32_t count = 0;
    for (char *kind = strtok(text, ","); kind && count < MAX_DEVICES; kind = strtok(0, ","), count++) {
        devices[count].index = (int)count;
        devices[count].gpu = !strcmp(kind, "discrete") || !strcmp(kind, "integrated");
        devices[count].integrated = !strcmp(kind, "shared") || !strcmp(kind, "integrated");
    }
    return count;
}

ze_result_t zeInit(ze_init_flags_t flags) {
    if (faulty("uninitialized") || !open_opencl()) return ZE_RESULT_ERROR_UNINITIALIZED;
    if (faulty("permission")) return ZE_RESULT_ERROR_INSUFFICIENT_PERMISSIONS;
    the_driver.there = 1;
    return ZE_RESULT_SUCCESS;
}

ze_result_t zeDriverGet(uint32_t *count, ze_driver_handle_t *drivers) {
    if (!the_driver.there) return ZE_RESULT_ERROR_UNINITIALIZED;
    if (*count && drivers) drivers[0] = &the_driver;
    *count = 1;
    return ZE_RESULT_SUCCESS;
}

// Of version 1.10: tests call it directly, as the loader of Debian 12 does not have it.
typedef struct { uint32_t stype; const void *next; uint32_t flags; } init_drivers_desc_t;
ze_result_t zeInitDrivers(uint32_t *count, ze_driver_handle_t *drivers, init_drivers_desc_t *desc) {
    if (desc->stype != 0x00020021 || desc->flags != 1) return ZE_RESULT_ERROR_INVALID_ENUMERATION;
    ze_result_t result = zeInit(0);
    return result ? result : zeDriverGet(count, drivers);
}

ze_result_t zeDriverGetApiVersion(ze_driver_handle_t driver, ze_api_version_t *version) {
    *version = faulty("old") ? ZE_API_VERSION_1_0 : ZE_API_VERSION_1_3;
    return ZE_RESULT_SUCCESS;
}

ze_result_t zeDriverGetProperties(ze_driver_handle_t driver, ze_driver_properties_t *properties) {
    if (properties->stype != ZE_STRUCTURE_TYPE_DRIVER_PROPERTIES) return ZE_RESULT_ERROR_INVALID_ENUMERATION;
    memset(&properties->uuid, 7, sizeof properties->uuid);
    properties->driverVersion = 1;
    return ZE_RESULT_SUCCESS;
}

ze_result_t zeDriverGetExtensionProperties(ze_driver_handle_t driver, uint32_t *count, ze_driver_extension_properties_t *extensions) {
    if (*count && extensions) snprintf(extensions[0].name, sizeof extensions[0].name, "ZE_test_driver");
    *count = 1;
    return ZE_RESULT_SUCCESS;
}

ze_result_t zeDeviceGet(ze_driver_handle_t driver, uint32_t *count, ze_device_handle_t *found) {
    uint32_t there = faulty("no-device") ? 0 : read_devices();
    for (uint32_t i = 0; found && i < *count && i < there; i++) found[i] = &devices[i];
    *count = there;
    return ZE_RESULT_SUCCESS;
}

static cl_ulong number(cl_uint what) {
    cl_ulong value = 0;
    clGetDeviceInfo(the_device, what, sizeof value, &value, 0);
    return value;
}

ze_result_t zeDeviceGetProperties(ze_device_handle_t device, ze_device_properties_t *properties) {
    if (properties->stype != ZE_STRUCTURE_TYPE_DEVICE_PROPERTIES) return ZE_RESULT_ERROR_INVALID_ENUMERATION;
    properties->type = device->gpu ? ZE_DEVICE_TYPE_GPU : ZE_DEVICE_TYPE_CPU;
    properties->vendorId = 0x8086;
    properties->flags = device->integrated ? ZE_DEVICE_PROPERTY_FLAG_INTEGRATED : 0;
    properties->maxMemAllocSize = 1ull << 31;
    properties->numSlices = properties->numSubslicesPerSlice = 1;
    properties->numEUsPerSubslice = (uint32_t)number(CL_DEVICE_MAX_COMPUTE_UNITS);
    for (int i = 0; i < 16; i++) properties->uuid.id[i] = (uint8_t)(i + 16 * device->index);
    snprintf(properties->name, sizeof properties->name, faulty("unnamed") ? "Some GPU" : "bitnet test driver (Intel's OpenCL for CPUs)");
    return ZE_RESULT_SUCCESS;
}

ze_result_t zeDeviceGetComputeProperties(ze_device_handle_t device, ze_device_compute_properties_t *properties) {
    if (properties->stype != ZE_STRUCTURE_TYPE_DEVICE_COMPUTE_PROPERTIES) return ZE_RESULT_ERROR_INVALID_ENUMERATION;
    properties->maxTotalGroupSize = properties->maxGroupSizeX = properties->maxGroupSizeY = properties->maxGroupSizeZ = 512;
    properties->maxGroupCountX = properties->maxGroupCountY = properties->maxGroupCountZ = 0x7FFFFFFF;
    properties->maxSharedLocalMemory = (uint32_t)number(CL_DEVICE_LOCAL_MEM_SIZE);
    properties->numSubGroupSizes = 2;
    properties->subGroupSizes[0] = getenv("BITNET_TEST_DRIVER_WIDE") ? 16 : 8;
    properties->subGroupSizes[1] = 32;
    return ZE_RESULT_SUCCESS;
}

ze_result_t zeDeviceGetModuleProperties(ze_device_handle_t device, ze_device_module_properties_t *properties) {
    if (properties->stype != ZE_STRUCTURE_TYPE_DEVICE_MODULE_PROPERTIES) return ZE_RESULT_ERROR_INVALID_ENUMERATION;
    properties->spirvVersionSupported = ZE_MAKE_VERSION(1, 2);
    properties->flags = (faulty("no-half") ? 0 : ZE_DEVICE_MODULE_FLAG_FP16) | (getenv("BITNET_TEST_DRIVER_NO_DOT") ? 0 : ZE_DEVICE_MODULE_FLAG_DP4A);
    return ZE_RESULT_SUCCESS;
}

ze_result_t zeDeviceGetMemoryProperties(ze_device_handle_t device, uint32_t *count, ze_device_memory_properties_t *properties) {
    if (*count && properties) {
        if (properties->stype != ZE_STRUCTURE_TYPE_DEVICE_MEMORY_PROPERTIES) return ZE_RESULT_ERROR_INVALID_ENUMERATION;
        properties->totalSize = number(CL_DEVICE_GLOBAL_MEM_SIZE);
    }
    *count = 1;
    return ZE_RESULT_SUCCESS;
}

// A group of queues that only copies, then one that computes: a backend must look.
ze_result_t zeDeviceGetCommandQueueGroupProperties(ze_device_handle_t device, uint32_t *count, ze_command_queue_group_properties_t *groups) {
    for (uint32_t i = 0; groups && i < *count && i < 2; i++) {
        if (groups[i].stype != ZE_STRUCTURE_TYPE_COMMAND_QUEUE_GROUP_PROPERTIES) return ZE_RESULT_ERROR_INVALID_ENUMERATION;
        groups[i].flags = i ? ZE_COMMAND_QUEUE_GROUP_PROPERTY_FLAG_COMPUTE | ZE_COMMAND_QUEUE_GROUP_PROPERTY_FLAG_COPY
                            : ZE_COMMAND_QUEUE_GROUP_PROPERTY_FLAG_COPY;
        groups[i].numQueues = 1;
    }
    *count = 2;
    return ZE_RESULT_SUCCESS;
}
