/* A Vulkan driver for tests: it is the driver that LOSING_DRIVER names, and loses its device at submission LOSING_AT. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef void (*function_t)(void);
typedef function_t (*look_t)(void *, const char *);
typedef int (*submit_t)(void *, uint32_t, const void *, uint64_t);

static submit_t submit;
static look_t look_device;

static function_t of_driver(const char *name) {
    static void *driver;
    if (!driver) driver = dlopen(getenv("LOSING_DRIVER"), RTLD_NOW | RTLD_LOCAL);
    return (function_t)dlsym(driver, name);
}

static int losing_submit(void *queue, uint32_t count, const void *infos, uint64_t fence) {
    static int left = -1;
    if (left < 0) left = atoi(getenv("LOSING_AT"));
    return left-- > 0 ? submit(queue, count, infos, fence) : -4; /* VK_ERROR_DEVICE_LOST */
}

static function_t wrapped(const char *name, function_t found) {
    if (strcmp(name, "vkQueueSubmit") || !found) return found;
    submit = (submit_t)found;
    return (function_t)losing_submit;
}

static function_t device_function(void *device, const char *name) { return wrapped(name, look_device(device, name)); }

function_t vk_icdGetInstanceProcAddr(void *instance, const char *name) {
    function_t found = ((look_t)of_driver("vk_icdGetInstanceProcAddr"))(instance, name);
    if (strcmp(name, "vkGetDeviceProcAddr") || !found) return wrapped(name, found);
    look_device = (look_t)found;
    return (function_t)device_function;
}

int vk_icdNegotiateLoaderICDInterfaceVersion(uint32_t *version) {
    if (*version > 5) *version = 5;
    return ((int (*)(uint32_t *))of_driver("vk_icdNegotiateLoaderICDInterfaceVersion"))(version);
}

function_t vk_icdGetPhysicalDeviceProcAddr(void *instance, const char *name) {
    function_t look = of_driver("vk_icdGetPhysicalDeviceProcAddr");
    return look ? ((look_t)look)(instance, name) : 0;
}
