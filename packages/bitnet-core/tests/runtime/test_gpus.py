"""GPUs that are seen without a driver, on machines that are folders, and what users are told about them."""

from __future__ import annotations

import logging
import platform
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitnet.core.devices.registry import SERVING
from bitnet.core.devices.select import select_device, select_devices
from bitnet.core.hal import DeviceInfo, DeviceType, ProbeResult, ProbeStatus
from bitnet.core.support import gpus
from bitnet.core.support.gpus import Gpu

PCI = "sys/bus/pci/devices"
NVIDIA = {"class": "0x030200", "vendor": "0x10de", "device": "0x2330"}
AMD = {"class": "0x030000", "vendor": "0x1002", "device": "0x744c"}
INTEL = {"class": "0x038000", "vendor": "0x8086", "device": "0x56c0"}
LIST = """# A comment
1002  Advanced Micro Devices, Inc. [AMD/ATI]
\t744c  Navi 31 [Radeon RX 7900 XT/7900 XTX]
\t\t1002 0e3b  A board's own name
10de  NVIDIA Corporation
\t2330  GH100 [H100 SXM5 80GB]
\t744c  Not AMD's
8086  Intel Corporation
\t56c0  Flex 170
"""

Files = dict[str, str]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Files], None]:
    """``root(files)``: the machine has these files, and no others, below ``/``."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(gpus, "ROOT", tmp_path)
    for name in gpus._CONTAINER_VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def have(files: Files) -> None:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    return have


def card(number: int, **facts: str) -> Files:
    return {f"{PCI}/0000:0{number}:00.0/{name}": f"{text}\n" for name, text in facts.items()}


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, ()),
        (card(1, **NVIDIA), (Gpu("NVIDIA"),)),
        (card(1, **NVIDIA) | card(2, **NVIDIA), (Gpu("NVIDIA"),)),
        (card(1, **AMD) | card(2, **INTEL), (Gpu("AMD"), Gpu("Intel"))),
        (card(1, **{**AMD, "class": "0x120000"}), (Gpu("AMD"),)),  # an accelerator
        (card(1, **{**INTEL, "class": "0x120000"}), ()),  # an NPU
        (card(1, **{**NVIDIA, "class": "0x020000"}), ()),  # a network card
        (card(1, **{**AMD, "device": "0x515e"}), ()),  # a server's console
        *(
            (card(1, **{**AMD, "vendor": vendor}), ())  # QEMU, VirtIO, VMware, VirtualBox, Hyper-V, ASPEED, Matrox
            for vendor in ("0x1234", "0x1af4", "0x15ad", "0x80ee", "0x1414", "0x1a03", "0x102b", "", "junk")
        ),
        (card(1, **AMD) | {"usr/share/misc/pci.ids": LIST}, (Gpu("AMD", "Radeon RX 7900 XT/7900 XTX"),)),
        (card(1, **INTEL) | {"usr/share/hwdata/pci.ids": LIST}, (Gpu("Intel", "Flex 170"),)),
        (card(1, **NVIDIA) | {"usr/share/misc/pci.ids": LIST}, (Gpu("NVIDIA", "H100 SXM5 80GB"),)),
        (card(1, **{**NVIDIA, "device": "0x1"}) | {"usr/share/misc/pci.ids": LIST}, (Gpu("NVIDIA"),)),
        (card(1, **AMD, product_name="Instinct MI300X"), (Gpu("AMD", "Instinct MI300X"),)),
        (
            card(1, **NVIDIA)
            | {"proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA H200\nIRQ: 7\n"},
            (Gpu("NVIDIA", "H200"),),
        ),
        ({"dev/nvidiactl": ""}, (Gpu("NVIDIA"),)),  # a container that hides PCI
        (card(1, **NVIDIA) | {".dockerenv": ""}, (Gpu("NVIDIA", withheld=True),)),
        (card(1, **NVIDIA) | {".dockerenv": "", "dev/nvidia0": ""}, (Gpu("NVIDIA"),)),
        (card(1, **AMD) | {"run/.containerenv": "", "dev/dri/card0": ""}, (Gpu("AMD"),)),
        (card(1, **INTEL) | {"run/.containerenv": "", "dev/kfd": ""}, (Gpu("Intel", withheld=True),)),
        ({"dev/dxg": ""}, ()),  # WSL with a driver of nobody that is known
        ({"dev/dxg": "", "usr/lib/wsl/lib/libcuda.so.1": ""}, (Gpu("NVIDIA"),)),
        ({"usr/lib/wsl/lib/libcuda.so.1": ""}, ()),  # the driver alone
        ({"dev/dxg": "", "usr/lib/wsl/drivers/iigd_dch.inf_amd64_1/x": ""}, (Gpu("Intel"),)),
        (card(1, **{**AMD, "vendor": "0x1414"}) | {"dev/dxg": "", "usr/lib/wsl/drivers/u03.inf/x": ""}, (Gpu("AMD"),)),
    ],
)
def test_gpus_are_seen_without_a_driver(root: Callable[[Files], None], files: Files, found: tuple[Gpu, ...]) -> None:
    root(files)
    assert gpus.seen() == found


@pytest.mark.parametrize("variable", gpus._CONTAINER_VARIABLES)
def test_containers_that_only_a_variable_shows(
    root: Callable[[Files], None], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    root(card(1, **NVIDIA))
    monkeypatch.setenv(variable, "10.0.0.1")
    assert gpus.seen() == (Gpu("NVIDIA", withheld=True),)


def test_a_gpu_that_a_virtual_machine_has_is_not_ours(root: Callable[[Files], None], tmp_path: Path) -> None:
    root(card(1, **NVIDIA) | card(2, **AMD))
    (tmp_path / PCI / "0000:01:00.0/driver").symlink_to("../../drivers/vfio-pci")
    (tmp_path / PCI / "0000:02:00.0/driver").symlink_to("../../drivers/amdgpu")
    assert gpus.seen() == (Gpu("AMD"),)


@pytest.mark.parametrize(("processor", "found"), [("arm64", (Gpu("Apple"),)), ("x86_64", ())])
def test_a_mac(monkeypatch: pytest.MonkeyPatch, processor: str, found: tuple[Gpu, ...]) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: processor)
    assert gpus.seen() == found


def test_files_that_are_anything(root: Callable[[Files], None], tmp_path: Path, rng_seed: int) -> None:
    """Whatever stands in them, only vendors whose GPUs compute are seen."""
    rng = random.Random(rng_seed)
    words = ["0x030000", "0x10de", "0x1002", "0x8086", "", "\n", "ÿ", "[", "(", "\\", "0x", "Model: \n", LIST]
    for _ in range(200):
        files = card(rng.randint(0, 9), **{name: rng.choice(words) for name in (*NVIDIA, "product_name")})
        files["usr/share/misc/pci.ids"] = "".join(rng.choices(LIST, k=60))
        root(files)
        assert {gpu.vendor for gpu in gpus.seen()} <= SERVING.keys()


MISSING = ProbeResult(ProbeStatus.DRIVER_MISSING, reason="libx.so is not found.", hint="Install it.")
NO_CUDA = "bitnet-cuda is not installed: pip install bitnet-cuda."
LLVMPIPE = "vulkan:0 cpu"
CPU = DeviceInfo("vulkan", "0", "id", "llvmpipe", "Mesa", DeviceType.CPU)


@pytest.mark.parametrize(
    ("gpu", "installed", "why"),
    [
        (Gpu("NVIDIA", "H100"), {}, "an NVIDIA GPU (H100), but bitnet-cuda is not installed: pip install bitnet-cuda."),
        (
            Gpu("NVIDIA"),
            {"opencl": MISSING},
            "an NVIDIA GPU, but bitnet-cuda is not installed: pip install bitnet-cuda.",
        ),
        (Gpu("NVIDIA"), {"cuda": MISSING}, "an NVIDIA GPU, but cuda cannot use it: libx.so is not found. Install it."),
        (
            Gpu("AMD"),
            {},
            "an AMD GPU, but none of bitnet-opencl, bitnet-vulkan and bitnet-rocm is installed: "
            "pip install bitnet-opencl.",
        ),
        (
            Gpu("Intel", "Flex 170"),
            {"opencl": MISSING, "vulkan": LLVMPIPE},
            "an Intel GPU (Flex 170), but opencl cannot use it: libx.so is not found. Install it. "
            "vulkan offers only vulkan:0 (vulkan:0).",
        ),
        (
            Gpu("AMD"),
            {"vulkan": ProbeResult(ProbeStatus.OK, [CPU], "This user may not open it.", "Join the group.")},
            "an AMD GPU, but vulkan offers only vulkan:0 (llvmpipe). This user may not open it. Join the group.",
        ),
        (
            Gpu("AMD"),
            {"vulkan": ProbeResult(ProbeStatus.BROKEN, reason="OSError: no libx.", hint="Reinstall it.")},
            "an AMD GPU, but vulkan cannot use it: OSError: no libx. Reinstall it.",
        ),
        (Gpu("Apple"), {}, "an Apple GPU, but bitnet-metal is not installed: pip install bitnet-metal."),
        (
            Gpu("AMD", withheld=True),
            {"opencl": MISSING},
            "an AMD GPU, but this container has no access to it: start it with --device /dev/kfd --device /dev/dri.",
        ),
    ],
)
def test_why_a_gpu_is_not_used(
    machine: Any,
    backend: Any,
    make_device: Any,
    said: Any,
    monkeypatch: pytest.MonkeyPatch,
    gpu: Gpu,
    installed: dict[str, ProbeResult | str],
    why: str,
) -> None:
    """Where the device is opened, once a process: a list of devices says it in other words."""
    machine(
        *(
            backend(name, [make_device(*how.split())]) if isinstance(how, str) else backend(name, result=how)
            for name, how in installed.items()
        )
    )
    monkeypatch.setattr(gpus, "seen", lambda: (gpu,))
    chosen = [select_device(), *select_devices()]
    assert said(logging.WARNING) == []
    for selection in chosen:
        selection.open().close()
    assert said(logging.WARNING) == [f"This machine has {why} Falling back to CPU (avx2)."]
    select_device("gpu")
    asked = f"gpu was asked for, but no backend can use one. This machine has {why} Falling back to CPU (avx2)."
    assert said(logging.WARNING)[1:] == [asked]


def test_a_container_without_the_gpu_that_is_asked_for(
    machine: Any, backend: Any, said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installing a driver there, as the backend's probe proposes, would not help."""
    machine(backend("cuda", result=MISSING), backend("rocm", result=MISSING))
    monkeypatch.setattr(gpus, "seen", lambda: (Gpu("NVIDIA", "H100", withheld=True), Gpu("AMD")))
    select_device("cuda:0")
    select_device("rocm")
    cuda, rocm = said(logging.WARNING)
    assert cuda.endswith("This container has no access to an NVIDIA GPU (H100): start it with --gpus all.")
    assert rocm.endswith("Install it.")


def test_a_gpu_is_not_told_of_where_none_is_wanted(
    machine: Any, backend: Any, make_device: Any, said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(backend("vulkan", [make_device("vulkan:0")]))
    monkeypatch.setattr(gpus, "seen", lambda: (Gpu("NVIDIA"),))
    select_device().open().close()
    select_device("cpu").open().close()
    monkeypatch.setenv("BITNET_BACKEND_PRIORITY", "cpu")
    select_device().open().close()
    assert said(logging.WARNING) == []
    monkeypatch.delenv("BITNET_BACKEND_PRIORITY")
    monkeypatch.setenv("BITNET_GPU_FAKE", "none")
    select_device().open().close()
    assert [text.partition(";")[0] for text in said(logging.WARNING)] == ["No GPU detected"]
