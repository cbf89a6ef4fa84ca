// A Level Zero driver for tests: it runs on Intel's OpenCL for CPUs, takes SPIR-V, and is stricter than a GPU's driver.
//
// What may run in any order does: the launches between two barriers run in reverse. Memory and lists that work in flight may
// use are not freed. BITNET_TEST_DRIVER_FAULT makes it fail (faulty() below names how), BITNET_TEST_DRIVER_DEVICES lists
// what its devices say they are: `cpu` (default), `shared` (a CPU that says its memory is shared), `discrete`, `integrated`.
// BITNET_TEST_DRIVER_HOST_MEMORY: `read` (kernels may read any of the host's) or `import` (what is imported). Otherwise none of it.
// BITNET_TEST_DRIVER_NO_DOT, _NO_XMX: it refuses modules with the integer dot product or with matrix products. _WIDE: its least
// sub-group has 16 work-items, not 8.
#pragma once
#include <level_zero/ze_api.h>
#include <level_zero/ze_ddi.h>

#include "opencl.h"

enum { MAX_ARGUMENTS = 40, MAX_DEVICES = 4 };

typedef struct { size_t size; union { void *pointer; uint8_t bytes[8]; } value; } argument_t;

struct _ze_driver_handle_t { int there; };
struct _ze_device_handle_t { int gpu, integrated, index; };

typedef struct allocation { void *pointer; size_t size; struct allocation *next; void *room; } allocation_t;  // room: what OpenCL allocated
struct _ze_context_handle_t { cl_handle context; allocation_t *allocations; };

struct _ze_module_handle_t { ze_context_handle_t context; cl_handle program; size_t size; uint8_t *words; };
struct _ze_module_build_log_handle_t { char *text; };
struct _ze_kernel_handle_t {
    ze_module_handle_t module;
    cl_handle kernel;
    uint32_t group[3], arguments;
    argument_t argument[MAX_ARGUMENTS];
};

typedef struct { int barrier; ze_kernel_handle_t kernel; ze_group_count_t groups; uint32_t group[3], arguments; argument_t *argument; } command_t;
struct _ze_command_list_handle_t {
    ze_context_handle_t context;
    int immediate, closed;
    uint64_t submission;  // the last one of it
    size_t count, room;
    command_t *commands;
};
struct _ze_command_queue_handle_t { ze_context_handle_t context; cl_handle queue; size_t waiting, room; command_t *commands; };

extern uint64_t submitted, finished;  // submissions to any queue
extern int objects;                   // handles that were made and not destroyed

int faulty(const char *kind);  // whether that fault is asked for
int reads(const void *pointer);  // whether kernels may read the host's memory there
int lost(void);                // whether the device is lost by now
ze_result_t result_of(cl_int error);
