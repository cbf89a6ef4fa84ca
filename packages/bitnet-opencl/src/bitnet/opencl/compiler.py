"""Builds kernel sources into programs for one device, and caches the binaries."""

from __future__ import annotations

from dataclasses import replace

import pyopencl as cl

from bitnet.core.errors import KernelCompileError
from bitnet.core.gpu.clc import sources
from bitnet.core.gpu.programs import Compiler, Identity, Programs, Source
from bitnet.core.support.log import logger
from bitnet.opencl.features import PLAIN, flags

SOURCES = sources("bitnet.opencl", "opencl")


def programs(context: cl.Context, device: cl.Device, name: str) -> Programs[cl.Program]:
    """The programs of a device.

    A driver may advertise a feature but fail to compile code that uses it. Such a source is compiled without features.
    """

    def build(source: Source) -> tuple[cl.Program, bytes]:
        program = _build(context, device, name, source)
        return program, program.binaries[0]

    def load(source: Source, binary: bytes) -> cl.Program | None:
        try:
            program = cl._cl._Program(context, [device], [binary])
            program._build(options=" ".join(source.options).encode())
            return cl.Program(program)
        except cl.Error as error:  # a driver may refuse its own binary, say after an update that kept its version
            logger.debug("%s: the kept binary of %s.cl is not used: %s", name, source.file, error)
            return None

    platform = device.platform
    driver = f"{platform.version} {device.driver_version}"
    identity = Identity(device=f"{platform.name} {device.name}", driver=driver, compiler=device.version)
    compiler = Compiler(build, load, identity, flags(device), "with the device's features")
    plain = replace(compiler, options=PLAIN, name="plainly") if compiler.options != PLAIN else None
    return Programs(name, SOURCES, [compiler], plain=plain)


def _build(context: cl.Context, device: cl.Device, name: str, source: Source) -> cl.Program:
    # Not cl.Program(context, source).build(), which uses pyopencl's own cache besides ours and warns whenever the
    # driver's log is not empty, as NVIDIA's always is.
    program = cl._cl._Program(context, source.text)
    error = None
    try:
        program._build(options=" ".join(source.options).encode())
    except cl.Error as caught:
        error = caught
    log = str(program.get_build_info(device, cl.program_build_info.LOG)).strip()
    if error is not None:
        log = "\n".join(part for part in (str(error), log) if part)
        raise KernelCompileError(f"{source.file}.cl does not compile.", device=name, log=log)
    if log:
        logger.debug("%s: of %s.cl the compiler says: %s", name, source.file, log)
    return cl.Program(program)
