"""Environment variables: the effect of each, and the errors for wrong values."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitnet.core.cli.app import EXIT_CODES
from bitnet.core.support.env import VARIABLES

Bitnet = Callable[..., Any]


ELSEWHERE = "metal" if sys.platform != "darwin" else "cuda"
"""A backend that this machine cannot have."""


@pytest.fixture
def run(bitnet: Bitnet, model: Path) -> Bitnet:
    def run(*args: str, **env: str) -> Any:
        return bitnet("run", "-m", str(model), "Hello", "-n", "2", "--json", *args, **env)

    return run


def device(ran: Any) -> str:
    assert ran.status == 0, ran.err
    return str(json.loads(ran.out)["device"])


def test_through_the_installed_script(script: Bitnet, model: Path) -> None:
    """One process with everything set, as a user would; each variable on its own is tested in this process below."""
    variables = {"BITNET_GPU_FAKE": "vulkan,opencl", "BITNET_BACKEND_PRIORITY": "vulkan", "BITNET_LOG": "info"}
    ran = script("run", "-m", str(model), "Hello", "-n", "2", "--json", **variables)
    assert device(ran) == "vulkan:0"
    assert ran.err == "requested=auto detected=[vulkan, opencl, cpu] selected=vulkan:0\n"
    everything = script("run", "-m", str(model), "Hello", "-n", "2", BITNET_LOG="debug", BITNET_GPU_FAKE="none").err
    assert "backend cpu (bitnet-core" in everything
    assert "No GPU detected; falling back to CPU (" in everything
    refused = script("run", "-m", str(model), "Hello", BITNET_DEVICE=ELSEWHERE, BITNET_STRICT_MODE="1")
    assert (refused.status, refused.out, refused.err.count("\n")) == (3, "", 1)


def test_log(run: Bitnet) -> None:
    informed = run("--device", "cpu", BITNET_LOG="info")
    (line,) = informed.err.splitlines()
    assert line == f"requested=cpu detected=[cpu] selected={device(informed)}"
    assert run("--device", "cpu", "-v").err == informed.err
    assert run(BITNET_GPU_FAKE="none").err.count("No GPU detected; falling back to CPU (") == 1
    assert run(BITNET_LOG="error", BITNET_GPU_FAKE="none").err == ""
    wrong = run(BITNET_LOG="loud")
    assert (wrong.status, wrong.err) == (
        2,
        "bitnet: error: BITNET_LOG is 'loud'; it must be one of debug, info, warning, error.\n",
    )


def test_device(run: Bitnet) -> None:
    assert device(run(BITNET_DEVICE="cpu:scalar")) == "cpu:scalar"
    assert device(run("--device", "cpu:numpy", BITNET_DEVICE="cpu:scalar")) == "cpu:numpy"
    assert device(run("--device", "", BITNET_DEVICE="cpu:scalar")) == "cpu:scalar"
    wrong = run(BITNET_DEVICE="toaster")
    assert wrong.status == 2
    assert wrong.err.startswith("bitnet: error: there is no device 'toaster'. There are auto, cpu, gpu, ")


def test_strict_mode(run: Bitnet) -> None:
    fallen = run("--device", ELSEWHERE)
    assert device(fallen).startswith("cpu:")
    assert f"{ELSEWHERE} was asked for, but " in fallen.err
    assert ". Falling back to CPU (" in fallen.err
    for strict in (
        run("--device", ELSEWHERE, BITNET_STRICT_MODE="1"),
        run("--device", ELSEWHERE, "--strict"),
        run(BITNET_DEVICE=ELSEWHERE, BITNET_STRICT_MODE="yes"),
    ):
        assert (strict.status, strict.out) == (3, "")
        (line,) = strict.err.splitlines()
        assert line.startswith(f"bitnet: error: {ELSEWHERE} was asked for, but ")
    assert run("--device", "auto", BITNET_STRICT_MODE="1").status == 0
    refused = run(BITNET_STRICT_MODE="1", BITNET_GPU_FAKE="cuda")
    assert refused.status == 3
    assert "BITNET_GPU_FAKE=cuda is refused in strict mode" in refused.err
    assert run(BITNET_STRICT_MODE="maybe").status == 2


def test_gpu_fake_and_backend_priority(run: Bitnet, bitnet: Bitnet) -> None:
    fakes = {"BITNET_GPU_FAKE": "opencl,cuda,cuda"}
    chosen = run(**fakes, BITNET_LOG="info")
    assert device(chosen) == "cuda:0"
    assert "requested=auto detected=[cuda, opencl, cpu] selected=cuda:0" in chosen.err
    assert device(run("--device", "cuda:1", **fakes)) == "cuda:1"
    assert device(run(**fakes, BITNET_BACKEND_PRIORITY="opencl")) == "opencl:0"
    assert device(run(**fakes, BITNET_BACKEND_PRIORITY="cpu,opencl")).startswith("cpu:")
    assert device(run("--device", "gpu", **fakes, BITNET_BACKEND_PRIORITY="cpu,opencl")) == "opencl:0"
    assert device(run(BITNET_GPU_FAKE="none")).startswith("cpu:")
    listed = json.loads(bitnet("devices", "--json", **fakes).out)
    assert [b["name"] for b in listed["backends"]] == ["cuda", "opencl", "cpu"]
    assert run(BITNET_GPU_FAKE="toaster").status == 2
    assert run(BITNET_BACKEND_PRIORITY="toaster").status == 2


def test_threads(script: Bitnet, model: Path) -> None:
    bench = ("bench", "-m", str(model), "-p", "4", "-n", "0", "-r", "1", "--device", "cpu:scalar", "--json")
    for options, threads in ((bench, 3), ((*bench, "-t", "2"), 2)):
        ran = script(*options, BITNET_THREADS="3")
        assert [result["threads"] for result in json.loads(ran.out)["results"]] == [threads]


def test_options_are_not_written_into_the_environment(bitnet: Bitnet, model: Path) -> None:
    before = dict(os.environ)
    bench = ("bench", "-m", str(model), "-p", "4", "-n", "0", "-r", "1", "--device", "cpu:scalar", "--json")
    ran = bitnet(*bench, "-t", "1,2", "--strict")
    assert [result["threads"] for result in json.loads(ran.out)["results"]] == [1, 2]
    assert dict(os.environ) == before


def test_cache_folder(bitnet: Bitnet, tmp_path: Path) -> None:
    """That kernels are kept there, or not, is tested where there is a backend that compiles: tests/downstream."""
    folder = tmp_path / "ours"
    assert bitnet("cache", "path", BITNET_CACHE_DIR=str(folder)).out == f"{folder / 'kernels'}\n"
    if sys.platform == "linux":
        ran = bitnet("cache", "path", BITNET_CACHE_DIR="", XDG_CACHE_HOME=str(tmp_path / "xdg"))
        assert ran.out == f"{tmp_path / 'xdg' / 'bitnet' / 'kernels'}\n"
    assert not folder.exists()
    assert bitnet("cache", "info", BITNET_NO_KERNEL_CACHE="perhaps").status == 2


def test_help_names_every_variable_and_exit_code(bitnet: Bitnet) -> None:
    text = bitnet("--help").out
    assert len(VARIABLES) == 11
    for variable in VARIABLES:
        assert f"{variable.name}={variable.values}" in text
    assert list(EXIT_CODES) == [0, 1, 2, 3, 4, 5, 6, 129, 130, 141, 143]
    for code in EXIT_CODES:
        assert f"\n  {code} " in text
