"""Shader modules and pipelines of a device, and the driver's pipeline cache, stored in the kernel cache."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from bitnet.core.errors import DeviceError, KernelCompileError, OutOfMemoryError
from bitnet.core.gpu import KernelSpec
from bitnet.core.support.cache import KernelCache
from bitnet.vulkan.compiler import KERNELS, spirv
from bitnet.vulkan.driver import Functions, api, make
from bitnet.vulkan.hardware import COMPUTE_SHADER, Hardware
from bitnet.vulkan.modules import Module, module

STORAGE_BUFFER = 7
FULL_SUBGROUPS = 2
"""VK_PIPELINE_SHADER_STAGE_CREATE_REQUIRE_FULL_SUBGROUPS_BIT."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A kernel ready to launch; ``written`` are the bindings that it writes."""

    handle: Any
    layout: Any
    sets: Any
    written: frozenset[int]


class Pipelines:
    """The pipelines of a device, made on first use. The caller must hold a lock."""

    def __init__(self, vk: Functions, hardware: Hardware, cache: KernelCache) -> None:
        self._vk, self._hardware, self._kernels = vk, hardware, cache
        self._shaders: dict[str, Any] = {}
        self._layouts: dict[tuple[int, int], tuple[Any, Any]] = {}
        self._pipelines: dict[tuple[KernelSpec, int, int, int], Pipeline] = {}
        self._key = cache.key(
            source="VkPipelineCache",
            device=f"{hardware.info.description} {hardware.info.id}",
            driver=f"{hardware.info.driver_version} {hardware.version}",
            options="",
            compiler="",
        )
        self._new, self._seconds = 0, 0.0
        self._kept = cache.get(self._key) or b""
        self._cache = self._open_cache()

    def get(self, spec: KernelSpec, group: int, buffers: int, scalars: int) -> Pipeline:
        """The pipeline of a kernel for a work-group of ``group``, with so many buffers and bytes of scalars.

        Raises:
            KernelCompileError: No compiler accepts the source, or the driver refuses the result.
        """
        key = (spec, group, buffers, scalars)
        if key not in self._pipelines:
            start = time.perf_counter()
            made = module(KERNELS, spec.file, spec.entry, {**self._hardware.macros, **dict(spec.defines)})
            sets, layout = self._layout(buffers, scalars)
            self._pipelines[key] = Pipeline(self._make(made, spec, layout, group), layout, sets, made.written)
            self._new += 1
            self._seconds += time.perf_counter() - start
        return self._pipelines[key]

    def save(self) -> None:
        """Save what the driver has compiled since the last call."""
        if not self._new:
            return
        size = api().new("size_t*")
        self._vk.GetPipelineCacheData(self._vk.handle, self._cache, size, api().NULL)
        data = api().new("char[]", max(int(size[0]), 1))
        self._vk.GetPipelineCacheData(self._vk.handle, self._cache, size, data)
        payload = bytes(api().buffer(data, size[0]))
        if payload != self._kept:  # the same: they were all in it
            self._kernels.put(self._key, payload, label=f"{self._new} pipelines", seconds=self._seconds)
        self._kept, self._new, self._seconds = payload, 0, 0.0

    def close(self) -> None:
        """Free all; nothing that uses them may run."""
        for pipeline in self._pipelines.values():
            self._vk.destroy("Pipeline", pipeline.handle)
        for sets, layout in self._layouts.values():
            self._vk.destroy("PipelineLayout", layout)
            self._vk.destroy("DescriptorSetLayout", sets)
        for shader in self._shaders.values():
            self._vk.destroy("ShaderModule", shader)
        self._vk.destroy("PipelineCache", self._cache)

    def _open_cache(self) -> Any:
        if self._kept:
            try:
                kept = api().from_buffer(self._kept)
                return self._vk.create("PipelineCache", initialDataSize=len(kept), pInitialData=kept)
            except DeviceError:  # a driver may refuse its own data, say after an update that kept its version
                pass
        return self._vk.create("PipelineCache")

    def _shader(self, made: Module) -> Any:
        if made.digest not in self._shaders:
            code = spirv(made, self._vk.device, self._kernels)
            words = api().from_buffer("uint32_t[]", code)
            self._shaders[made.digest] = self._vk.create("ShaderModule", codeSize=len(code), pCode=words)
        return self._shaders[made.digest]

    def _layout(self, buffers: int, scalars: int) -> tuple[Any, Any]:
        key = (buffers, scalars)
        if key not in self._layouts:
            kind = {"descriptorType": STORAGE_BUFFER, "descriptorCount": 1, "stageFlags": COMPUTE_SHADER}
            bindings = [make("VkDescriptorSetLayoutBinding", binding=i, **kind) for i in range(buffers)]
            sets = self._vk.create("DescriptorSetLayout", pBindings=bindings)
            pushed = [make("VkPushConstantRange", stageFlags=COMPUTE_SHADER, size=scalars)] if scalars else []
            layout = self._vk.create("PipelineLayout", pSetLayouts=[sets], pPushConstantRanges=pushed)
            self._layouts[key] = sets, layout
        return self._layouts[key]

    def _make(self, made: Module, spec: KernelSpec, layout: Any, group: int) -> Any:
        known, macros = made.constants, dict(made.macros)
        values = {"WG": group} | {name: int(value) for name, value in spec.defines if name not in macros}
        stage: dict[str, Any] = {"stage": COMPUTE_SHADER, "module": self._shader(made), "pName": "main"}
        if macros.get("SUBGROUPS"):
            values["SUBGROUP"] = subgroup = self._hardware.subgroup
            size = "VkPipelineShaderStageRequiredSubgroupSizeCreateInfo"
            asked = make(size, requiredSubgroupSize=subgroup) if self._hardware.asks_subgroup else None
            stage |= {"flags": FULL_SUBGROUPS, "pNext": asked}
        kind = "VkSpecializationMapEntry"
        entries = [make(kind, constantID=known[name], offset=4 * i, size=4) for i, name in enumerate(values)]
        data = {"dataSize": 4 * len(values), "pData": api().new("int32_t[]", list(values.values()))}
        special = make("VkSpecializationInfo", pMapEntries=entries, **data)
        stage_info = make("VkPipelineShaderStageCreateInfo", pSpecializationInfo=special, **stage)
        info = make("VkComputePipelineCreateInfo", stage=stage_info[0], layout=layout)
        handle = api().new("VkPipeline*")
        try:
            self._vk.CreateComputePipelines(self._vk.handle, self._cache, 1, info, api().NULL, handle)
        except OutOfMemoryError:
            raise
        except DeviceError as error:
            message = f"the driver refuses {made.label} ({dict(spec.defines)})."
            raise KernelCompileError(message, device=self._vk.device, log=str(error)) from error
        return handle[0]
