"""What a physical device is and can do, and opening it with just that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bitnet.core.hal import DeviceType
from bitnet.vulkan.driver import (
    VERSION_1_1,
    VERSION_1_2,
    VERSION_1_3,
    Functions,
    Instance,
    api,
    check,
    enumerated,
    loader,
    make,
    text,
)

TYPES = {1: DeviceType.INTEGRATED, 2: DeviceType.DISCRETE, 3: DeviceType.VIRTUAL, 4: DeviceType.CPU}
"""VkPhysicalDeviceType to ours; what is none of them counts as virtual."""
VENDORS = {0x1002: "AMD", 0x10DE: "NVIDIA", 0x8086: "Intel", 0x13B5: "ARM", 0x5143: "Qualcomm", 0x106B: "Apple"}
VENDORS |= {0x10005: "Mesa", 0x1AE0: "Google"}
MATRIX_FEATURES = {
    "cooperativeMatrix",
    "shaderInt8",
    "vulkanMemoryModel",
    "vulkanMemoryModelDeviceScope",
}
"""What products of cooperative matrices need; where one is missing, none of them is switched on."""
NVIDIA_DRIVER = 4
"""VK_DRIVER_ID_NVIDIA_PROPRIETARY."""
COMPUTE, GRAPHICS = 2, 1
DEVICE_LOCAL = 1
SUBGROUP_OPERATIONS = 1 | 4 | 16
"""VkSubgroupFeatureFlagBits that the kernels use: basic, arithmetic, shuffle."""
COMPUTE_STAGE = 0x20
NEEDED_BUFFERS = 9
"""Storage buffers a kernel binds at most; Vulkan promises only 4 to a stage."""
WIDEST_SUBGROUP = 32
"""Size that is asked for where a device offers several."""
FLOAT16, FLOAT32, INT8, INT32 = 0, 1, 3, 5
"""VkComponentTypeKHR."""
SUBGROUP_SCOPE = 3
"""VK_SCOPE_SUBGROUP_KHR."""

_FEATURES = {
    # structure: (version of Vulkan that has it built in, the extension before that, its fields that the kernels use)
    "VkPhysicalDeviceShaderFloat16Int8Features": (
        VERSION_1_2,
        "VK_KHR_shader_float16_int8",
        ("shaderInt8", "shaderFloat16"),
    ),
    "VkPhysicalDeviceTimelineSemaphoreFeatures": (
        VERSION_1_2,
        "VK_KHR_timeline_semaphore",
        ("timelineSemaphore",),
    ),
    "VkPhysicalDeviceVulkanMemoryModelFeatures": (
        VERSION_1_2,
        "VK_KHR_vulkan_memory_model",
        ("vulkanMemoryModel", "vulkanMemoryModelDeviceScope"),
    ),
    "VkPhysicalDeviceSubgroupSizeControlFeatures": (
        VERSION_1_3,
        "VK_EXT_subgroup_size_control",
        ("subgroupSizeControl", "computeFullSubgroups"),
    ),
    "VkPhysicalDeviceShaderIntegerDotProductFeatures": (
        VERSION_1_3,
        "VK_KHR_shader_integer_dot_product",
        ("shaderIntegerDotProduct",),
    ),
    "VkPhysicalDeviceCooperativeMatrixFeaturesKHR": (None, "VK_KHR_cooperative_matrix", ("cooperativeMatrix",)),
}


@dataclass(frozen=True, slots=True)
class Hardware:
    """A physical device.

    Attributes:
        index: In the loader's order.
        features: Names of the Vulkan features that are there, of those that the kernels or the driver use.
        extensions: All that the device has.
        subgroup: Invocations of a subgroup with which pipelines are made; 0 where subgroups are not used.
        asks_subgroup: Whether that size has to be asked for, as the device has several.
        int8_tile: ``(M, N, K)`` of an int8 cooperative matrix product with int32 sums; None where there is none.
        f16_product: Whether there is one of f16 with f32 sums, of 16 x 16 x 16.
        largest_binding: Bytes that a kernel sees of a buffer at most.
        largest_buffer: Bytes of a buffer at most.
        alignment: Of the place in a buffer that a kernel sees first, in bytes.
        shared: Bytes of shared memory of a work-group.
        group: Invocations of a work-group at most.
        buffers: Storage buffers that a kernel may bind.
        processors: Streaming multiprocessors, where the driver is NVIDIA's own, which runs a work-group on each of them
            at once; else 0.
    """

    handle: Any
    index: int
    name: str
    vendor: str
    type: DeviceType
    id: str
    version: int
    driver: str
    memory: int
    features: frozenset[str]
    extensions: frozenset[str]
    subgroup: int
    asks_subgroup: bool
    int8_tile: tuple[int, int, int] | None
    f16_product: bool
    largest_binding: int
    largest_buffer: int
    alignment: int
    shared: int
    group: int
    buffers: int
    queue_family: int
    processors: int

    @property
    def version_text(self) -> str:
        """Such as ``1.3.230``."""
        return f"{self.version >> 22}.{self.version >> 12 & 0x3FF}.{self.version & 0xFFF}"

    @property
    def macros(self) -> Mapping[str, int]:
        """What the kernels' sources are told of the device."""
        return {
            "SUBGROUPS": int(self.subgroup > 0),
            "DOT": int("shaderIntegerDotProduct" in self.features),
            "COOPMAT": int(self.int8_tile is not None),
        }

    @property
    def used(self) -> tuple[str, ...]:
        """What ``bitnet devices`` lists."""
        names = {"shaderIntegerDotProduct": "int8-dot", "timelineSemaphore": "timeline"}
        found = [label for name, label in names.items() if name in self.features]
        found += [f"subgroups:{self.subgroup}"] if self.subgroup else []
        found += ["cooperative-matrix"] if self.int8_tile else []
        return tuple(sorted(found))


def inspect(instance: Instance, physical: Any, index: int) -> Hardware | None:
    """Describe a device; None where it has no Vulkan 1.1 or no queue that computes."""
    ffi, vk = api(), loader()
    plain = ffi.new("VkPhysicalDeviceProperties*")
    vk.vkGetPhysicalDeviceProperties(physical, plain)
    family, version = _queue_family(physical), min(int(plain.apiVersion), instance.version)
    if version < VERSION_1_1 or family is None:
        return None
    extensions = _extensions(physical)
    features = _features(physical, version, extensions)
    kinds = _matrices(instance, physical, features)
    tile = best_tile(kinds)
    features -= frozenset() if tile else MATRIX_FEATURES
    identity, subgroups = make("VkPhysicalDeviceIDProperties"), make("VkPhysicalDeviceSubgroupProperties")
    limits3 = make("VkPhysicalDeviceMaintenance3Properties", pNext=identity)
    subgroups.pNext = limits3
    chain, sizes, driver, processors = subgroups, None, None, None
    if "subgroupSizeControl" in features:
        chain = sizes = make("VkPhysicalDeviceSubgroupSizeControlProperties", pNext=chain)
    if version >= VERSION_1_2 or "VK_KHR_driver_properties" in extensions:
        chain = driver = make("VkPhysicalDeviceDriverProperties", pNext=chain)
    if "VK_NV_shader_sm_builtins" in extensions:
        chain = processors = make("VkPhysicalDeviceShaderSMBuiltinsPropertiesNV", pNext=chain)
    properties = make("VkPhysicalDeviceProperties2", pNext=chain)
    vk.vkGetPhysicalDeviceProperties2(physical, properties)
    found, limits = properties.properties, properties.properties.limits
    subgroup, asks = _subgroup(subgroups, sizes, features)
    version_text = text(driver.driverInfo) if driver is not None else ""
    nvidia = driver is not None and driver.driverID == NVIDIA_DRIVER
    return Hardware(
        handle=physical,
        index=index,
        name=text(found.deviceName),
        vendor=VENDORS.get(found.vendorID, f"0x{found.vendorID:04x}"),
        type=TYPES.get(found.deviceType, DeviceType.VIRTUAL),
        id=bytes(identity.deviceUUID).hex(),
        version=version,
        driver=version_text or f"0x{found.driverVersion:08x}",
        memory=_memory(physical),
        features=features,
        extensions=extensions,
        subgroup=subgroup,
        asks_subgroup=asks,
        int8_tile=tile,
        f16_product="shaderFloat16" in features and has_f16_product(kinds),
        largest_binding=int(limits.maxStorageBufferRange),
        largest_buffer=int(limits3.maxMemoryAllocationSize),
        alignment=int(limits.minStorageBufferOffsetAlignment),
        shared=int(limits.maxComputeSharedMemorySize),
        group=min(int(limits.maxComputeWorkGroupInvocations), int(limits.maxComputeWorkGroupSize[0])),
        buffers=min(int(limits.maxPerStageDescriptorStorageBuffers), int(limits.maxDescriptorSetStorageBuffers)),
        queue_family=family,
        processors=int(processors.shaderSMCount) if processors is not None and nvidia else 0,
    )


def open_device(hardware: Hardware, device: str) -> Any:
    """The ``VkDevice``, with one queue and the features of :attr:`Hardware.features`.

    Raises:
        DeviceError: The driver refuses.
    """
    extensions, chain = [], None
    for kind, (built_in, extension, fields) in _FEATURES.items():
        on = {name: 1 for name in fields if name in hardware.features}
        if not on:
            continue
        if built_in is None or hardware.version < built_in:
            extensions.append(extension)
        chain = make(kind, **on, **({"pNext": chain} if chain is not None else {}))
    if "VK_KHR_portability_subset" in hardware.extensions:
        extensions.append("VK_KHR_portability_subset")  # one that has it must be given it
    priority = api().new("float[]", [1.0])
    queue = make(
        "VkDeviceQueueCreateInfo", queueFamilyIndex=hardware.queue_family, queueCount=1, pQueuePriorities=priority
    )
    info = make(
        "VkDeviceCreateInfo",
        queueCreateInfoCount=1,
        pQueueCreateInfos=[queue],
        enabledExtensionCount=len(extensions),
        ppEnabledExtensionNames=extensions,
        **({"pNext": chain} if chain is not None else {}),
    )
    return Functions(device).create("Device", hardware.handle, info)


def _queue_family(physical: Any) -> int | None:
    """One for computing alone where there is one: it does not wait for what draws."""
    call = loader().vkGetPhysicalDeviceQueueFamilyProperties
    what = "vkGetPhysicalDeviceQueueFamilyProperties"
    flags = enumerated(what, "VkQueueFamilyProperties", call, physical, read=lambda family: int(family.queueFlags))
    able = [i for i, flag in enumerate(flags) if flag & COMPUTE]
    return min(able, key=lambda i: bool(flags[i] & GRAPHICS), default=None)


def _extensions(physical: Any) -> frozenset[str]:
    call, what = loader().vkEnumerateDeviceExtensionProperties, "vkEnumerateDeviceExtensionProperties"
    args = (physical, api().NULL)
    return frozenset(enumerated(what, "VkExtensionProperties", call, *args, read=lambda e: text(e.extensionName)))


def _features(physical: Any, version: int, extensions: frozenset[str]) -> frozenset[str]:
    chain, parts = None, []
    for kind, (built_in, extension, fields) in _FEATURES.items():
        if (built_in is not None and version >= built_in) or extension in extensions:
            chain = make(kind, **({"pNext": chain} if chain is not None else {}))
            parts.append((chain, fields))
    loader().vkGetPhysicalDeviceFeatures2(
        physical, make("VkPhysicalDeviceFeatures2", **({"pNext": chain} if chain is not None else {}))
    )
    return frozenset(name for part, fields in parts for name in fields if getattr(part, name))


def _subgroup(properties: Any, sizes: Any, features: frozenset[str]) -> tuple[int, bool]:
    """The size to use, and whether it has to be asked for. Kernels need full subgroups of one known size."""
    operations = properties.supportedOperations & SUBGROUP_OPERATIONS == SUBGROUP_OPERATIONS
    if sizes is None or "computeFullSubgroups" not in features:
        return 0, False
    if not operations or not properties.supportedStages & COMPUTE_STAGE:
        return 0, False
    least, most = int(sizes.minSubgroupSize), int(sizes.maxSubgroupSize)
    if least == most:
        return least, False
    if not sizes.requiredSubgroupSizeStages & COMPUTE_STAGE:
        return 0, False
    return max(least, min(most, WIDEST_SUBGROUP)), True


@dataclass(frozen=True, slots=True)
class MatrixKind:
    """A product of cooperative matrices: what ``VkCooperativeMatrixPropertiesKHR`` tells of it, under its names."""

    MSize: int
    NSize: int
    KSize: int
    AType: int
    BType: int
    CType: int
    ResultType: int
    saturatingAccumulation: int
    scope: int


def _matrices(instance: Instance, physical: Any, features: frozenset[str]) -> list[MatrixKind]:
    """The device's products of cooperative matrices, where all that they need is there."""
    if not {*MATRIX_FEATURES, "computeFullSubgroups"} <= features:
        return []
    call = instance.function("vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR")
    count = api().new("uint32_t*")
    check("vulkan", "vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR", call(physical, count, api().NULL))
    kinds = api().new("VkCooperativeMatrixPropertiesKHR[]", max(count[0], 1))
    for kind in kinds:
        kind.sType = loader().VK_STRUCTURE_TYPE_COOPERATIVE_MATRIX_PROPERTIES_KHR
    check("vulkan", "vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR", call(physical, count, kinds))
    return [MatrixKind(*(int(getattr(kinds[i], name)) for name in MatrixKind.__slots__)) for i in range(count[0])]


def best_tile(kinds: Iterable[MatrixKind]) -> tuple[int, int, int] | None:
    """The largest of these products that ternary_mma takes."""
    tiles = [
        (int(kind.MSize), int(kind.NSize), int(kind.KSize))
        for kind in kinds
        if (kind.AType, kind.BType, kind.CType, kind.ResultType) == (INT8, INT8, INT32, INT32)
        and kind.scope == SUBGROUP_SCOPE
        and not kind.saturatingAccumulation
        and kind.MSize in (8, 16, 32)
        and kind.NSize in (8, 16, 32)
        and kind.MSize * kind.NSize <= 512  # eight such results fit the shared memory of its smaller work-groups
        and kind.KSize in (16, 32, 64, 128)
    ]
    return max(tiles, key=lambda tile: tile[0] * tile[1] * tile[2], default=None)


def has_f16_product(kinds: Iterable[MatrixKind]) -> bool:
    """Whether the one that attention_mma and dense_mma take is among these products."""
    return any(
        (kind.MSize, kind.NSize, kind.KSize) == (16, 16, 16)
        and (kind.AType, kind.BType, kind.CType, kind.ResultType) == (FLOAT16, FLOAT16, FLOAT32, FLOAT32)
        and kind.scope == SUBGROUP_SCOPE
        for kind in kinds
    )


def _memory(physical: Any) -> int:
    """Bytes of the largest heap that is the device's own."""
    found = api().new("VkPhysicalDeviceMemoryProperties*")
    loader().vkGetPhysicalDeviceMemoryProperties(physical, found)
    heaps = [found.memoryHeaps[i] for i in range(found.memoryHeapCount)]
    return max((int(heap.size) for heap in heaps if heap.flags & DEVICE_LOCAL), default=0)
