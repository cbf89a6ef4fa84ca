// What the calls of the test driver share.
#pragma once
#include "opencl.h"

#include <pthread.h>

#define EXPORT __attribute__((visibility("default")))
enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONFIGURATION = 9, NO_DEVICE = 100, INVALID_DEVICE = 101,
       INVALID_IMAGE = 200, NOT_FOUND = 500, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901 };
enum { MAX_GROUP = 1024 };

// Held by every call.
extern pthread_mutex_t lock;

// What a call returns before it does anything: an error that a test asked for, or that of a lost device.
int fault(const char *call);

// Whether this thread is capturing: HIP then refuses what is no launch, and the capture with it.
int refused(void);

// Bytes of device memory in all, and whether so many from an address on are of one allocation there.
size_t device_memory(void);
int on_device(const void *address, size_t size);

#define BEGIN(name)                                                                                                            \
    pthread_mutex_lock(&lock);                                                                                                 \
    int status = fault(name);                                                                                                  \
    if (status) goto end;
#define BEGIN_OUTSIDE(name)                                                                                                    \
    BEGIN(name)                                                                                                                \
    if (refused()) {                                                                                                           \
        status = CAPTURE_UNSUPPORTED;                                                                                          \
        goto end;                                                                                                              \
    }
#define END                                                                                                                    \
    end:                                                                                                                       \
    pthread_mutex_unlock(&lock);                                                                                               \
    return status;
