"""Compiles WGSL to compute pipelines of one device.

wgpu offers no way to save and restore a compiled pipeline. So every process compiles again: wgpu from WGSL, and then
the driver, which often has a cache of its own. bitnet's kernel cache is not used here.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

import wgpu
from wgpu.backends.wgpu_native import GPUShaderModule, ffi, lib

from bitnet.core.errors import DeviceLostError, KernelCompileError, OutOfMemoryError
from bitnet.core.gpu import KernelSpec
from bitnet.core.support import cache
from bitnet.webgpu.failures import failure
from bitnet.webgpu.source import LAYOUTS, kernel_text

_TRY_DOT = "@compute @workgroup_size(1) fn f() { var sum = dot4I8Packed(1u, 2u); }"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A compiled kernel and its bind group layout."""

    pipeline: wgpu.GPUComputePipeline
    layout: wgpu.GPUBindGroupLayout


def has_int8_dot(device: wgpu.GPUDevice) -> bool:
    """Whether the device's WGSL supports ``dot4I8Packed``; wgpu-py does not list language features."""
    try:
        device.create_shader_module(code=_TRY_DOT)
    except wgpu.GPUError:
        return False
    return True


def unchecked_module(device: wgpu.GPUDevice, checked: wgpu.GPUShaderModule, text: str) -> wgpu.GPUShaderModule:
    """The same module without the index checks and loop counters that wgpu adds to untrusted shaders.

    The host has checked the bounds of every index in these kernels. wgpu-py has no call for this, but the library below
    it does from wgpu-native 29 on; with older ones, the checked module is returned.
    """
    if not hasattr(lib, "wgpuDeviceCreateShaderModuleTrusted"):
        return checked
    code, label = (ffi.new("char[]", t.encode()) for t in (text, checked.label))
    source = ffi.new("WGPUShaderSourceWGSL *")
    source.chain.sType = lib.WGPUSType_ShaderSourceWGSL
    source.code.data, source.code.length = code, len(code) - 1
    descriptor = ffi.new("WGPUShaderModuleDescriptor *")
    descriptor.nextInChain = ffi.cast("WGPUChainedStruct *", source)
    descriptor.label.data, descriptor.label.length = label, len(label) - 1
    handle = lib.wgpuDeviceCreateShaderModuleTrusted(device._internal, descriptor, lib.WGPUShaderRuntimeChecks_None)
    return GPUShaderModule(checked.label, handle, device)


class Compiler:
    """Compiles for one device.

    Args:
        features: Those of INT8_DOT and SUBGROUPS that the kernels may use.
    """

    def __init__(self, device: wgpu.GPUDevice, name: str, features: Collection[str]) -> None:
        self._device, self._name = device, name
        self._features = frozenset(features)
        self._pipelines: dict[tuple[KernelSpec, int], Pipeline] = {}

    def pipeline(self, spec: KernelSpec, group: int) -> Pipeline:
        """The kernel for workgroups of ``group`` invocations.

        Raises:
            KernelCompileError: The source does not compile; the log is wgpu's or the driver's.
            DeviceLostError, OutOfMemoryError: The device failed.
        """
        key = spec, group
        if key not in self._pipelines:
            self._pipelines[key] = self._compile(spec, group)
        return self._pipelines[key]

    def _compile(self, spec: KernelSpec, group: int) -> Pipeline:
        start = time.perf_counter()
        text, kinds = kernel_text(spec, group, self._features)
        device, compute = self._device, wgpu.ShaderStage.COMPUTE
        entries = [
            {"binding": i, "visibility": compute, "buffer": {"type": LAYOUTS[kind]}} for i, kind in enumerate(kinds)
        ]
        try:
            module = unchecked_module(device, device.create_shader_module(label=spec.entry, code=text), text)
            layout = device.create_bind_group_layout(entries=entries)
            pipeline = device.create_compute_pipeline(
                label=spec.entry,
                layout=device.create_pipeline_layout(bind_group_layouts=[layout]),
                compute={"module": module, "entry_point": spec.entry},
            )
        except wgpu.GPUError as error:
            failed = failure(error, self._name)
            if isinstance(failed, DeviceLostError | OutOfMemoryError):
                raise failed from error
            raise KernelCompileError(f"{spec.file}.wgsl does not compile.", device=self._name, log=str(error)) from None
        cache.report(spec.file, time.perf_counter() - start)
        return Pipeline(pipeline, layout)
