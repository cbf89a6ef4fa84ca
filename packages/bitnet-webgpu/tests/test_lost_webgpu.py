"""What wgpu does where the driver reports a lost device to a submission: the smallest program that shows it.

Its Vulkan driver is lavapipe behind ``losing_driver.c``, whose ``vkQueueSubmit`` returns ``VK_ERROR_DEVICE_LOST`` when
it is told to. ``docs/upstream/wgpu-native-lost-device.md`` is the report of it to wgpu-native.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

DRIVERS = (Path("/usr/lib/x86_64-linux-gnu/libvulkan_lvp.so"), Path("/usr/lib/aarch64-linux-gnu/libvulkan_lvp.so"))
"""lavapipe, where Debian and Ubuntu have it."""
SMALLEST = """
import wgpu

device = wgpu.gpu.request_adapter_sync().request_device_sync()
buffer = device.create_buffer(size=16, usage=wgpu.BufferUsage.COPY_DST)
for number in range(4):
    encoder = device.create_command_encoder()
    encoder.clear_buffer(buffer)
    commands = encoder.finish()
    try:
        device.queue.submit([commands])
    except wgpu.GPUError as error:
        print("raised", type(error).__name__)
        break
    print("submitted", number, flush=True)
"""


def compiler() -> list[str] | None:
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    found = shutil.which("cc")
    return [found] if found else None


@pytest.fixture
def losing(tmp_path: Path, require_device: Callable[[str, str | None], None]) -> dict[str, str]:
    """The environment in which lavapipe is lost at the third submission."""
    lavapipe = next((path for path in DRIVERS if path.exists()), None)
    require_device("webgpu:0", None if lavapipe else "lavapipe is not installed")
    cc = compiler()
    require_device("webgpu:0", None if cc else "there is no C compiler (ziglang)")
    library, manifest = tmp_path / "liblosing.so", tmp_path / "losing.json"
    source = Path(__file__).with_name("losing_driver.c")
    subprocess.run([*(cc or ()), "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    icd = {"library_path": str(library), "api_version": "1.1.0"}
    manifest.write_text(json.dumps({"file_format_version": "1.0.0", "ICD": icd}))
    own = {"VK_DRIVER_FILES": str(manifest), "VK_ICD_FILENAMES": str(manifest)}
    return {**os.environ, **own, "LOSING_DRIVER": str(lavapipe), "LOSING_AT": "2"}


def test_wgpu_ends_the_process_when_a_submission_is_the_first_to_see_it(losing: dict[str, str]) -> None:
    """As the README says. Should this fail because wgpu raises an error: catch it, and mend the README."""
    done = subprocess.run([sys.executable, "-c", SMALLEST], env=losing, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["submitted", "0", "submitted", "1"], done.stderr
    assert done.returncode == -signal.SIGABRT
    assert "Parent device is lost" in done.stderr
