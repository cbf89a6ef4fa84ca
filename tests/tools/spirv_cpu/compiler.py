"""OpenCL C to SPIR-V by clang, as ziglang brings it, and SPIR-V to programs by the driver."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from importlib.metadata import version
from importlib.resources import files

from bitnet.core.errors import DeviceError, KernelCompileError
from bitnet.core.gpu.programs import Compiler, Identity, Programs, Source
from bitnet.core.hal import DeviceInfo
from bitnet.spirv_cpu import api
from bitnet.spirv_cpu.ops import SOURCES, options

CLANG = (sys.executable, "-m", "ziglang", "clang", "-x", "cl", "-target", "spirv64", "-O2", "-cl-no-stdinc", "-w")
"""``-w``: what the language's built-ins are, it is told by the prelude, at which it wonders."""
BUILTINS = ("-Xclang", "-fdeclare-opencl-builtins", "-Xclang", "-mllvm", "-Xclang")
EXTENSIONS = "--spirv-ext=+SPV_KHR_integer_dot_product"
FAST_TO_BUILD = b"-cl-opt-disable"
"""To the driver's optimiser a kernel is a second's work, which a backend for speed would leave it."""
PRELUDE = files("bitnet.spirv_cpu").joinpath("prelude.cl").read_text(encoding="utf-8")
"""What a compiler's own header declares of OpenCL C, which ziglang leaves out."""


def spirv(source: Source, device: str) -> bytes:
    """A source as SPIR-V. Raises KernelCompileError."""
    command = [*CLANG, *BUILTINS, EXTENSIONS, *source.options, "-c", "-", "-o", "-"]
    done = subprocess.run(command, input=(PRELUDE + source.text).encode(), capture_output=True, check=False)
    if done.returncode or not done.stdout:
        log = done.stderr.decode(errors="replace")
        raise KernelCompileError(f"{source.file}.cl does not compile.", device=device, log=log)
    return done.stdout


def programs(info: DeviceInfo, context: api.Handle, device: api.Handle) -> Programs[api.Handle]:
    """The programs of a device: ``prepare(kernels)`` compiles, ``programs[kernel]`` is what was made."""

    def program(code: bytes, file: str) -> api.Handle:
        made = api.make("clCreateProgramWithIL", context, code, api.Size(len(code)), device=info.name)
        try:
            api.call("clBuildProgram", made, 0, None, FAST_TO_BUILD, None, None, device=info.name)
        except DeviceError as error:
            log = ctypes.create_string_buffer(1 << 16)
            api.call("clGetProgramBuildInfo", made, device, api.BUILD_LOG, api.Size(len(log)), log, None)
            text = log.value.decode(errors="replace")
            raise KernelCompileError(f"{file}.cl does not build.", device=info.name, log=text) from error
        return made

    def build(source: Source) -> tuple[api.Handle, bytes]:
        code = spirv(source, info.name)
        return program(code, source.file), code

    def load(source: Source, kept: bytes) -> api.Handle | None:
        return program(kept, source.file)

    identity = Identity(info.description, info.driver_version, f"ziglang {version('ziglang')}")
    return Programs(info.name, SOURCES, [Compiler(build, load, identity, options(info))])
