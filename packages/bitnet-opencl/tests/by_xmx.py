"""A pytest plugin that takes Intel's device for CPUs for one with XMX of as many columns as ``BITNET_TEST_XMX`` says.

In place of the built-ins stands what their extension says that they compute (``xmx.clh``).
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from bitnet.core.gpu.clc.abilities import XMX
from bitnet.opencl import compiler, features

WIDTH = int(os.environ["BITNET_TEST_XMX"])
EMULATION = "\n".join(
    [
        "#pragma OPENCL EXTENSION cl_khr_fp16 : enable",
        "#define OF_HEADER __attribute__((overloadable))",
        Path(__file__).with_name("xmx.clh").read_text(encoding="utf-8"),
    ]
)
build = compiler._build
built: set[str] = set()
"""Sources that were."""


def emulating(context: Any, device: Any, name: str, source: Any) -> Any:
    """Build with the emulation in front of a source that multiplies by XMX."""
    if any("XMX=1" in option for option in source.options):
        built.add(source.file)
        source = replace(source, text=f"{EMULATION}\n{source.text}")
    return build(context, device, name, source)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"by XMX: {', '.join(sorted(built))}")


compiler._build = emulating
features._intel = lambda device: XMX[WIDTH]
