"""Compiles kernels in a browser: each begins to compile when it is first recorded, beside the others."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import js
from pyodide.code import run_js
from pyodide.ffi import to_js

from bitnet.core.errors import KernelCompileError
from bitnet.core.gpu import KernelSpec
from bitnet.webgpu.source import LAYOUTS, SUBGROUPS, kernel_text

_COMPUTE = 4
_COMPILE = """
(device, descriptor) => {
  const kernel = { pipeline: null, error: null };
  kernel.compiled = device.createComputePipelineAsync(descriptor).then(
    (pipeline) => { kernel.pipeline = pipeline; },
    (error) => { kernel.error = error; },
  );
  return kernel;
}
"""


def js_object(value: Any) -> Any:
    """A dictionary, with what is in it, as a JavaScript object."""
    return to_js(value, dict_converter=js.Object.fromEntries)


def message(error: Any) -> str:
    """The text of a JavaScript error, in one line that ends with a full stop."""
    text = " ".join(str(getattr(error, "message", error)).split())
    return text.removesuffix(".") + "."


class BrowserKernels:
    """The kernels of a ``GPUDevice``. Only an event loop brings their pipelines."""

    def __init__(self, device: Any, name: str, features: Collection[str]) -> None:
        self._device, self._name, self._features = device, name, frozenset(features)
        self._compile = run_js(_COMPILE)
        self._kernels: dict[tuple[KernelSpec, int], tuple[Any, Any]] = {}
        self._compiling: list[tuple[KernelSpec, Any]] = []

    def kernel(self, spec: KernelSpec, group: int) -> tuple[Any, Any]:
        """A kernel, whose ``pipeline`` is null until it has compiled, and the layout of its bindings.

        Args:
            group: Invocations of a workgroup.
        """
        key = spec, group
        if key not in self._kernels:
            text, kinds = kernel_text(spec, group, self._features)
            if SUBGROUPS in self._features:
                text = "enable subgroups;\n" + text
            device = self._device
            module = device.createShaderModule(js_object({"label": spec.file, "code": text}))
            entries = [
                {"binding": i, "visibility": _COMPUTE, "buffer": {"type": LAYOUTS[kind]}}
                for i, kind in enumerate(kinds)
            ]
            layout = device.createBindGroupLayout(js_object({"entries": entries}))
            layouts = device.createPipelineLayout(js_object({"bindGroupLayouts": [layout]}))
            compute = {"module": module, "entryPoint": spec.entry}
            descriptor = js_object({"label": spec.entry, "layout": layouts, "compute": compute})
            kernel = self._compile(device, descriptor)
            self._compiling.append((spec, kernel))
            self._kernels[key] = kernel, layout
        return self._kernels[key]

    @property
    def compiling(self) -> bool:
        """Whether a kernel has not been waited for."""
        return bool(self._compiling)

    async def compiled(self, progress: Callable[[int, int], None]) -> None:
        """Wait for all kernels.

        Args:
            progress: Called with the number of kernels that have compiled, and with that of all, after each.

        Raises:
            KernelCompileError: A kernel does not compile.
        """
        while self._compiling:
            first = spec, kernel = self._compiling[0]
            await kernel.compiled
            if kernel.error is not None:
                raise KernelCompileError(
                    f"the kernel {spec.entry} does not compile.", device=self._name, log=message(kernel.error)
                )
            if self._compiling and self._compiling[0] is first:  # or another task was faster
                del self._compiling[0]
                progress(len(self._kernels) - len(self._compiling), len(self._kernels))
