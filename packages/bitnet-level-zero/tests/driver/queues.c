// Queues and command lists. Launches between two barriers, of one list or of several, run in reverse.
#include "driver.h"

#include <stdlib.h>
#include <string.h>

static void push(command_t **commands, size_t *count, size_t *room, command_t one) {
    if (*count == *room) *commands = realloc(*commands, (*room = *room ? 2 * *room : 64) * sizeof one);
    (*commands)[(*count)++] = one;
}

ze_result_t zeCommandQueueCreate(ze_context_handle_t context, ze_device_handle_t device, const ze_command_queue_desc_t *desc,
                                 ze_command_queue_handle_t *made) {
    if (desc->stype != ZE_STRUCTURE_TYPE_COMMAND_QUEUE_DESC || desc->ordinal != 1) return ZE_RESULT_ERROR_INVALID_ARGUMENT;
    cl_int error = 0;
    ze_command_queue_handle_t queue = calloc(1, sizeof *queue);
    queue->context = context;
    queue->queue = clCreateCommandQueueWithProperties(context->context, the_device, 0, &error);
    *made = queue;
    objects++;
    return result_of(error);
}

ze_result_t zeCommandQueueDestroy(ze_command_queue_handle_t queue) {
    if (submitted != finished && !lost()) return ZE_RESULT_ERROR_HANDLE_OBJECT_IN_USE;
    clReleaseCommandQueue(queue->queue);
    free(queue->commands);
    free(queue);
    objects--;
    return ZE_RESULT_SUCCESS;
}

static ze_result_t run(ze_command_queue_handle_t queue) {
    cl_int error = 0;
    while (queue->waiting && !error) {
        command_t *one = &queue->commands[--queue->waiting];
        size_t global[3], local[3] = {one->group[0], one->group[1], one->group[2]};
        uint32_t groups[3] = {one->groups.groupCountX, one->groups.groupCountY, one->groups.groupCountZ};
        for (int i = 0; i < 3; i++) global[i] = groups[i] * local[i];
        for (uint32_t i = 0; i < one->arguments && !error; i++) {
            argument_t *argument = &one->argument[i];
            error = argument->size == 8 ? clSetKernelArgMemPointerINTEL(one->kernel->kernel, i, argument->value.pointer)
                                        : clSetKernelArg(one->kernel->kernel, i, argument->size, argument->value.bytes);
        }
        if (!error && !faulty("wrong"))
            error = clEnqueueNDRangeKernel(queue->queue, one->kernel->kernel, 3, 0, global, local, 0, 0, 0);
    }
    return result_of(error);
}

ze_result_t zeCommandQueueExecuteCommandLists(ze_command_queue_handle_t queue, uint32_t count, ze_command_list_handle_t *lists,
                                              ze_fence_handle_t fence) {
    submitted++;
    if (lost()) return ZE_RESULT_ERROR_DEVICE_LOST;
    for (uint32_t l = 0; l < count; l++) {
        if (!lists[l]->closed || lists[l]->immediate) return ZE_RESULT_ERROR_INVALID_ARGUMENT;
        lists[l]->submission = submitted;
        for (size_t i = 0; i < lists[l]->count; i++) {
            if (!lists[l]->commands[i].barrier) {
                push(&queue->commands, &queue->waiting, &queue->room, lists[l]->commands[i]);
                continue;
            }
            ze_result_t result = run(queue);
            if (result) return result;
        }
    }
    return result_of(clFlush(queue->queue));
}

ze_result_t zeCommandQueueSynchronize(ze_command_queue_handle_t queue, uint64_t timeout) {
    if (lost()) return ZE_RESULT_ERROR_DEVICE_LOST;
    ze_result_t result = run(queue);
    if (!result) result = result_of(clFinish(queue->queue));
    finished = submitted;
    return result;
}

static ze_result_t make_list(ze_context_handle_t context, int immediate, ze_command_list_handle_t *made) {
    ze_command_list_handle_t list = calloc(1, sizeof *list);
    list->context = context;
    list->immediate = immediate;
    *made = list;
    objects++;
    return ZE_RESULT_SUCCESS;
}

ze_result_t zeCommandListCreate(ze_context_handle_t context, ze_device_handle_t device, const ze_command_list_desc_t *desc,
                                ze_command_list_handle_t *made) {
    if (desc->stype != ZE_STRUCTURE_TYPE_COMMAND_LIST_DESC || desc->commandQueueGroupOrdinal != 1) return ZE_RESULT_ERROR_INVALID_ARGUMENT;
    return make_list(context, 0, made);
}

ze_result_t zeCommandListCreateImmediate(ze_context_handle_t context, ze_device_handle_t device, const ze_command_queue_desc_t *desc,
                                         ze_command_list_handle_t *made) {
    if (desc->mode != ZE_COMMAND_QUEUE_MODE_SYNCHRONOUS) return ZE_RESULT_ERROR_UNSUPPORTED_FEATURE;
    return make_list(context, 1, made);
}

ze_result_t zeCommandListDestroy(ze_command_list_handle_t list) {
    if (list->submission > finished && !lost()) return ZE_RESULT_ERROR_HANDLE_OBJECT_IN_USE;
    for (size_t i = 0; i < list->count; i++) free(list->commands[i].argument);
    free(list->commands);
    free(list);
    objects--;
    return ZE_RESULT_SUCCESS;
}

ze_result_t zeCommandListClose(ze_command_list_handle_t list) {
    if (list->closed || list->immediate) return ZE_RESULT_ERROR_INVALID_ARGUMENT;
    list->closed = 1;
    return ZE_RESULT_SUCCESS;
}

ze_result_t zeCommandListAppendBarrier(ze_command_list_handle_t list, ze_event_handle_t signal, uint32_t count, ze_event_handle_t *waits) {
    if (list->closed || signal || count) return ZE_RESULT_ERROR_INVALID_ARGUMENT;
    push(&list->commands, &list->count, &list->room, (command_t){.barrier = 1});
    return ZE_RESULT_SUCCESS;
}

ze_result_t zeCommandListAppendLaunchKernel(ze_command_list_handle_t list, ze_kernel_handle_t kernel, const ze_group_count_t *groups,
                                            ze_event_handle_t signal, uint32_t count, ze_event_handle_t *waits) {
    if (list->closed || list->immediate || signal || count || !kernel->group[0]) return ZE_RESULT_ERROR_INVALID_ARGUMENT;
    command_t one = {0, kernel, *groups, {kernel->group[0], kernel->group[1], kernel->group[2]}, kernel->arguments, 0};
    one.argument = malloc(sizeof kernel->argument);
    memcpy(one.argument, kernel->argument, sizeof kernel->argument);
    push(&list->commands, &list->count, &list->room, one);
    return ZE_RESULT_SUCCESS;
}

ze_result_t zeCommandListAppendMemoryCopy(ze_command_list_handle_t list, void *to, const void *from, size_t size, ze_event_handle_t signal,
                                          uint32_t count, ze_event_handle_t *waits) {
    if (lost()) return ZE_RESULT_ERROR_DEVICE_LOST;
    if (!list->immediate || signal || count) return ZE_RESULT_ERROR_INVALID_ARGUMENT;
    if (submitted != finished) return ZE_RESULT_ERROR_HANDLE_OBJECT_IN_USE;  // it would race with what runs
    memcpy(to, from, size);
    return ZE_RESULT_SUCCESS;
}
