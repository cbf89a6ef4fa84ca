// The tables by which the loader finds the functions.
#include <string.h>

#include "driver.h"

#define TABLE(getter, table, ...)                                                  \
    ze_result_t getter(ze_api_version_t version, table *out) {                     \
        memset(out, 0, sizeof *out);                                               \
        __VA_ARGS__                                                                \
        return ZE_RESULT_SUCCESS;                                                  \
    }

TABLE(zeGetGlobalProcAddrTable, ze_global_dditable_t, out->pfnInit = zeInit;)
TABLE(zeGetDriverProcAddrTable, ze_driver_dditable_t, out->pfnGet = zeDriverGet; out->pfnGetApiVersion = zeDriverGetApiVersion;
      out->pfnGetProperties = zeDriverGetProperties; out->pfnGetExtensionProperties = zeDriverGetExtensionProperties;
      out->pfnGetExtensionFunctionAddress = zeDriverGetExtensionFunctionAddress;)
TABLE(zeGetDeviceProcAddrTable, ze_device_dditable_t, out->pfnGet = zeDeviceGet; out->pfnGetProperties = zeDeviceGetProperties;
      out->pfnGetComputeProperties = zeDeviceGetComputeProperties; out->pfnGetModuleProperties = zeDeviceGetModuleProperties;
      out->pfnGetMemoryProperties = zeDeviceGetMemoryProperties;
      out->pfnGetMemoryAccessProperties = zeDeviceGetMemoryAccessProperties;
      out->pfnGetCommandQueueGroupProperties = zeDeviceGetCommandQueueGroupProperties;)
TABLE(zeGetContextProcAddrTable, ze_context_dditable_t, out->pfnCreate = zeContextCreate; out->pfnDestroy = zeContextDestroy;)
TABLE(zeGetCommandQueueProcAddrTable, ze_command_queue_dditable_t, out->pfnCreate = zeCommandQueueCreate;
      out->pfnDestroy = zeCommandQueueDestroy; out->pfnExecuteCommandLists = zeCommandQueueExecuteCommandLists;
      out->pfnSynchronize = zeCommandQueueSynchronize;)
TABLE(zeGetCommandListProcAddrTable, ze_command_list_dditable_t, out->pfnCreate = zeCommandListCreate;
      out->pfnCreateImmediate = zeCommandListCreateImmediate; out->pfnDestroy = zeCommandListDestroy; out->pfnClose = zeCommandListClose;
      out->pfnAppendBarrier = zeCommandListAppendBarrier; out->pfnAppendMemoryCopy = zeCommandListAppendMemoryCopy;
      out->pfnAppendLaunchKernel = zeCommandListAppendLaunchKernel;)
TABLE(zeGetMemProcAddrTable, ze_mem_dditable_t, out->pfnAllocDevice = zeMemAllocDevice; out->pfnAllocShared = zeMemAllocShared;
      out->pfnFree = zeMemFree;)
TABLE(zeGetModuleProcAddrTable, ze_module_dditable_t, out->pfnCreate = zeModuleCreate; out->pfnDestroy = zeModuleDestroy;
      out->pfnGetNativeBinary = zeModuleGetNativeBinary;)
TABLE(zeGetModuleBuildLogProcAddrTable, ze_module_build_log_dditable_t, out->pfnDestroy = zeModuleBuildLogDestroy;
      out->pfnGetString = zeModuleBuildLogGetString;)
TABLE(zeGetKernelProcAddrTable, ze_kernel_dditable_t, out->pfnCreate = zeKernelCreate; out->pfnDestroy = zeKernelDestroy;
      out->pfnSetGroupSize = zeKernelSetGroupSize; out->pfnSetArgumentValue = zeKernelSetArgumentValue;
      out->pfnGetProperties = zeKernelGetProperties;)
