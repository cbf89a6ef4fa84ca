"""Describes a physical device, and opens it with the features that are used."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from bitnet.core.gpu import Buffer
from bitnet.core.gpu.drivers.windows import MAX_GROUPS, row_windows
from bitnet.core.hal import FAMILY_FEATURES, KERNEL_FEATURES, PREPARES, DeviceInfo, DeviceType
from bitnet.vulkan.driver import VERSION_1_1, VERSION_1_2, VERSION_1_3, Functions, Instance, api, make, text

TYPES = {1: DeviceType.INTEGRATED, 2: DeviceType.DISCRETE, 3: DeviceType.VIRTUAL, 4: DeviceType.CPU}
"""Maps VkPhysicalDeviceType to bitnet's types; unknown ones count as virtual."""
VENDORS = {0x1002: "AMD", 0x10DE: "NVIDIA", 0x8086: "Intel", 0x13B5: "ARM", 0x5143: "Qualcomm", 0x106B: "Apple"}
VENDORS |= {0x10005: "Mesa", 0x1AE0: "Google"}
DOT, MEMORY_MODEL = "shaderIntegerDotProduct", ("vulkanMemoryModel", "vulkanMemoryModelDeviceScope")
MATRIX_FEATURES = {"cooperativeMatrix", "shaderInt8", *MEMORY_MODEL}
"""Features that cooperative-matrix products need; all or none of them are enabled."""
NVIDIA_DRIVER = 4
"""VK_DRIVER_ID_NVIDIA_PROPRIETARY."""
COMPUTE, GRAPHICS = 2, 1
DEVICE_LOCAL = 1
SUBGROUP_OPERATIONS = 1 | 4 | 16
"""VkSubgroupFeatureFlagBits that the kernels use: basic, arithmetic, shuffle."""
COMPUTE_SHADER = 0x20
NEEDED_BUFFERS = 9
"""Maximum storage buffers that a kernel binds; Vulkan guarantees only 4 per stage."""
SUBGROUP_CONTROL = ("subgroupSizeControl", "computeFullSubgroups")
WIDEST_SUBGROUP = 32
"""Subgroup size to request if a device offers several."""
FLOAT16, FLOAT32, INT8, INT32 = 0, 1, 3, 5
"""VkComponentTypeKHR."""
SUBGROUP_SCOPE = 3
"""VK_SCOPE_SUBGROUP_KHR."""
BUDGET = "VK_EXT_memory_budget"
"""Extension of devices that tell how much memory is free."""

_EXTENSION = 1 << 32
"""Beyond every version: of features that are in no version of Vulkan."""
_FEATURES = {
    "ShaderFloat16Int8Features": (VERSION_1_2, "VK_KHR_shader_float16_int8", ("shaderInt8", "shaderFloat16")),
    "TimelineSemaphoreFeatures": (VERSION_1_2, "VK_KHR_timeline_semaphore", ("timelineSemaphore",)),
    "VulkanMemoryModelFeatures": (VERSION_1_2, "VK_KHR_vulkan_memory_model", MEMORY_MODEL),
    "SubgroupSizeControlFeatures": (VERSION_1_3, "VK_EXT_subgroup_size_control", SUBGROUP_CONTROL),
    "ShaderIntegerDotProductFeatures": (VERSION_1_3, "VK_KHR_shader_integer_dot_product", (DOT,)),
    "CooperativeMatrixFeaturesKHR": (_EXTENSION, "VK_KHR_cooperative_matrix", ("cooperativeMatrix",)),
}
"""Structures (VkPhysicalDevice…) of features: the version of Vulkan that has them built in, the extension that has them
before, and the fields that the kernels or the driver use."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """A physical device.

    Attributes:
        info: The probe's description, without the features that are used; its index follows the loader's order.
        features: Names of the available Vulkan features, among those that the kernels or the driver use.
        extensions: All that the device has.
        subgroup: Subgroup size for pipelines; 0 if subgroups are not used.
        asks_subgroup: Whether that size must be requested, because the device has several.
        int8_tile: ``(M, N, K)`` of an int8 cooperative-matrix product with int32 sums; None if unsupported.
        f16_product: Whether there is one of f16 with f32 sums, of 16 x 16 x 16.
        largest_binding: Maximum bytes of a binding.
        largest_buffer: Maximum bytes of a buffer.
        alignment: Required alignment of a binding's offset, in bytes.
        shared: Bytes of shared memory of a work-group.
        group: Maximum invocations of a work-group.
        buffers: Maximum storage buffers that a kernel may bind.
        processors: Number of streaming multiprocessors with NVIDIA's own driver, which runs a work-group on each
            concurrently; otherwise 0.
    """

    handle: Any
    info: DeviceInfo
    version: int
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
    def macros(self) -> Mapping[str, int]:
        """Macros that describe the device to the kernels' sources."""
        return {"SUBGROUPS": int(self.subgroup > 0), "DOT": int(DOT in self.features)}

    @property
    def used(self) -> tuple[str, ...]:
        """The features listed by ``bitnet devices``."""
        names = {DOT: "int8-dot", "timelineSemaphore": "timeline"}
        found = [*KERNEL_FEATURES, *FAMILY_FEATURES, PREPARES]
        found += [label for name, label in names.items() if name in self.features]
        found += [f"subgroups:{self.subgroup}"] if self.subgroup else []
        found += ["cooperative-matrix"] if self.int8_tile else []
        return tuple(sorted(found))

    def windows(self, data: Buffer, rows: int, group_rows: int | None = None) -> Iterator[tuple[Buffer, int, int]]:
        """A matrix as parts that a kernel can bind, and that a grid reaches: the part, its first row, its rows.

        Args:
            group_rows: Rows that a work-group does, where the grid counts rows.
        """
        most_rows = group_rows * MAX_GROUPS if group_rows else None
        largest, alignment = self.largest_binding // 16 * 16, max(self.alignment, 16)
        return row_windows(data, rows, data.nbytes // rows, largest=largest, alignment=alignment, most_rows=most_rows)


def inspect(instance: Instance, physical: Any, index: int) -> Hardware | None:
    """Describe a device; None if it lacks Vulkan 1.1 or a compute queue."""
    plain = api().new("VkPhysicalDeviceProperties*")
    instance.GetPhysicalDeviceProperties(physical, plain)
    family, version = _queue_family(instance, physical), min(int(plain.apiVersion), instance.version)
    if version < VERSION_1_1 or family is None:
        return None
    extensions = instance.extensions("EnumerateDeviceExtensionProperties", physical, api().NULL)
    features = _features(instance, physical, version, extensions)
    kinds = _matrices(instance, physical, features)
    tile = best_tile(kinds)
    features -= frozenset() if tile else MATRIX_FEATURES
    asked = ["IDProperties", "Maintenance3Properties", "SubgroupProperties"]
    asked += ["SubgroupSizeControlProperties"] if "subgroupSizeControl" in features else []
    asked += ["DriverProperties"] if version >= VERSION_1_2 or "VK_KHR_driver_properties" in extensions else []
    asked += ["ShaderSMBuiltinsPropertiesNV"] if "VK_NV_shader_sm_builtins" in extensions else []
    properties = instance.query("Properties", physical, asked)
    found, driver = properties["Properties2"].properties, properties.get("DriverProperties")
    processors, limits = properties.get("ShaderSMBuiltinsPropertiesNV"), found.limits
    subgroup, asks = _subgroup(
        properties["SubgroupProperties"], properties.get("SubgroupSizeControlProperties"), features
    )
    version_text = text(driver.driverInfo) if driver is not None else ""
    nvidia = driver is not None and driver.driverID == NVIDIA_DRIVER
    info = DeviceInfo(
        backend="vulkan",
        index=str(index),
        id=str(UUID(bytes=bytes(properties["IDProperties"].deviceUUID))),
        description=text(found.deviceName),
        vendor=VENDORS.get(found.vendorID, f"0x{found.vendorID:04x}"),
        type=TYPES.get(found.deviceType, DeviceType.VIRTUAL),
        memory=memory(instance, physical)[0],
        driver_version=version_text or f"0x{found.driverVersion:08x}",
        details={"vulkan": f"{version >> 22}.{version >> 12 & 0x3FF}.{version & 0xFFF}"},
    )
    return Hardware(
        handle=physical,
        info=info,
        version=version,
        features=features,
        extensions=extensions,
        subgroup=subgroup,
        asks_subgroup=asks,
        int8_tile=tile,
        f16_product="shaderFloat16" in features and has_f16_product(kinds),
        largest_binding=int(limits.maxStorageBufferRange),
        largest_buffer=int(properties["Maintenance3Properties"].maxMemoryAllocationSize),
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
    for kind, (built_in, extension, names) in _FEATURES.items():
        if on := {name: 1 for name in names if name in hardware.features}:
            extensions += [extension] if hardware.version < built_in else []
            chain = make(f"VkPhysicalDevice{kind}", pNext=chain, **on)
    if "VK_KHR_portability_subset" in hardware.extensions:
        extensions.append("VK_KHR_portability_subset")  # must be enabled if the device has it
    queue = make("VkDeviceQueueCreateInfo", queueFamilyIndex=hardware.queue_family, pQueuePriorities=[1.0])
    fields: dict[str, Any] = {"pNext": chain, "pQueueCreateInfos": [queue], "ppEnabledExtensionNames": extensions}
    return Functions(device).create("Device", hardware.handle, **fields)


def memory(vk: Functions, physical: Any, *, budget: bool = False) -> tuple[int, int]:
    """Total and free bytes of the largest heap that is the device's own; 0 free where it has no :data:`BUDGET`."""
    properties = vk.query("MemoryProperties", physical, ["MemoryBudgetPropertiesEXT"] if budget else [])
    heaps = properties["MemoryProperties2"].memoryProperties
    own = [i for i in range(heaps.memoryHeapCount) if heaps.memoryHeaps[i].flags & DEVICE_LOCAL]
    if not own:
        return 0, 0
    largest = max(own, key=lambda i: heaps.memoryHeaps[i].size)
    left = properties.get("MemoryBudgetPropertiesEXT")
    free = int(left.heapBudget[largest] - left.heapUsage[largest]) if left is not None else 0
    return int(heaps.memoryHeaps[largest].size), max(0, free)


def _queue_family(instance: Instance, physical: Any) -> int | None:
    """Prefer a compute-only queue family, which does not wait for graphics."""
    families = instance.listed("GetPhysicalDeviceQueueFamilyProperties", "VkQueueFamilyProperties", physical)
    able = [i for i, family in enumerate(families) if family.queueFlags & COMPUTE]
    return min(able, key=lambda i: bool(families[i].queueFlags & GRAPHICS), default=None)


def _features(instance: Instance, physical: Any, version: int, extensions: frozenset[str]) -> frozenset[str]:
    kinds = [kind for kind, (since, extension, _) in _FEATURES.items() if version >= since or extension in extensions]
    offered = instance.query("Features", physical, kinds)
    return frozenset(name for kind in kinds for name in _FEATURES[kind][2] if getattr(offered[kind], name))


def _subgroup(properties: Any, sizes: Any, features: frozenset[str]) -> tuple[int, bool]:
    """The size to use, and whether it has to be asked for. Kernels need full subgroups of one known size."""
    able = properties.supportedOperations & SUBGROUP_OPERATIONS == SUBGROUP_OPERATIONS
    able = able and bool(properties.supportedStages & COMPUTE_SHADER)
    if not able or sizes is None or "computeFullSubgroups" not in features:
        return 0, False
    least, most = int(sizes.minSubgroupSize), int(sizes.maxSubgroupSize)
    if least == most:
        return least, False
    asks = bool(sizes.requiredSubgroupSizeStages & COMPUTE_SHADER)
    return (max(least, min(most, WIDEST_SUBGROUP)) if asks else 0), asks


def _matrices(instance: Instance, physical: Any, features: frozenset[str]) -> list[Any]:
    """The device's products of cooperative matrices, where all that they need is there."""
    if not {*MATRIX_FEATURES, "computeFullSubgroups"} <= features:
        return []
    kind = "VkCooperativeMatrixPropertiesKHR"
    return instance.listed("GetPhysicalDeviceCooperativeMatrixPropertiesKHR", kind, physical)


def best_tile(kinds: Iterable[Any]) -> tuple[int, int, int] | None:
    """The largest of these ``VkCooperativeMatrixPropertiesKHR`` that ternary_mma takes: its M, N, K."""

    def fits(m: int, n: int, k: int) -> bool:
        # Eight results of m x n have to fit the shared memory of its smaller work-groups.
        return {m, n} <= {8, 16, 32} and m * n <= 512 and k in (16, 32, 64, 128)

    tiles = _tiles(kinds, (INT8, INT8, INT32, INT32))
    return max((tile for tile in tiles if fits(*tile)), key=math.prod, default=None)


def has_f16_product(kinds: Iterable[Any]) -> bool:
    """Whether the one that attention_mma and dense_mma take is among these ``VkCooperativeMatrixPropertiesKHR``."""
    return (16, 16, 16) in _tiles(kinds, (FLOAT16, FLOAT16, FLOAT32, FLOAT32))


def _tiles(kinds: Iterable[Any], types: tuple[int, int, int, int]) -> list[tuple[int, int, int]]:
    """M, N and K of the products in a subgroup of matrices of these types (A, B, C and result), with plain sums."""
    return [
        (int(kind.MSize), int(kind.NSize), int(kind.KSize))
        for kind in kinds
        if (kind.AType, kind.BType, kind.CType, kind.ResultType) == types
        and kind.scope == SUBGROUP_SCOPE
        and not kind.saturatingAccumulation
    ]
