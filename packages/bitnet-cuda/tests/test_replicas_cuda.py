"""Two GPUs as replicas: a real fault on one of them, in the middle of its answers, loses no request."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
backend = pytest.importorskip("bitnet.cuda.backend", reason="NVRTC is not installed")

PAIR = ("cuda:0", "cuda:1")
FAULTY = '''
"""What an isolated device's process runs, and a kernel that traps when it is sent a signal."""

import signal

from cuda.bindings import driver, nvrtc

from bitnet.core.devices import isolated_child
from bitnet.core.devices.isolated_child import answer, finish


def ok(result):
    assert int(result[0]) == 0, result[0]
    return result[1] if len(result) > 1 else None


def fault(*_):
    source = b'extern "C" __global__ void fault() { __trap(); }'
    program = ok(nvrtc.nvrtcCreateProgram(source, b"fault.cu", 0, [], []))
    device = ok(driver.cuDeviceGet(0))
    attribute = driver.CUdevice_attribute
    major = ok(driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device))
    minor = ok(driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device))
    ok(nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture=sm_{major}{minor}".encode()]))
    binary = b" " * ok(nvrtc.nvrtcGetCUBINSize(program))
    ok(nvrtc.nvrtcGetCUBIN(program, binary))
    ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(device))))
    kernel = ok(driver.cuModuleGetFunction(ok(driver.cuModuleLoadData(binary)), b"fault"))
    ok(driver.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0))


def prepare(setup, ask):
    signal.signal(signal.SIGUSR1, fault)
    isolated_child.prepare(setup, ask)
'''
SCRIPT = r"""
import os, signal, sys, threading
from concurrent.futures import ThreadPoolExecutor
import numpy as np
from bitnet.core import load_model
from bitnet.core.devices import isolated

OPTIONS = {"max_tokens": 150, "ignore_eos": True, "temperature": 0.9, "logprobs": 2}
rng = np.random.default_rng()
prompts = [rng.integers(0, 256, int(rng.integers(2, 60))).tolist() for _ in range(128)]
sys.path.insert(0, sys.argv[1])
isolated.MODULE = "faulty"


def answers(model, on_token):
    requests = [model.submit(p, seed=i, **OPTIONS)[0] for i, p in enumerate(prompts)]

    def read(request):
        for _ in request:
            on_token()
        return request.completion

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(read, requests))


with load_model(device="cuda:1", max_seqs=64, deterministic=True) as model:
    expected = answers(model, lambda: None)
with load_model(device="cuda:0,cuda:1", max_seqs=64, deterministic=True) as model:
    model.warm()
    told, lock = [0], threading.Lock()

    def count():
        with lock:
            told[0] += 1
            if told[0] == 600:
                os.kill(model._replicas[0].device.pid, signal.SIGUSR1)

    found = answers(model, count)
    lost = model.load().lost
moved = sum(len(c.devices) == 2 for c in found)
assert lost == ("cuda:0",), lost
assert moved > 0, "nothing ran on the GPU that failed"
wrong = [i for i, (a, b) in enumerate(zip(expected, found)) if (a.tokens, a.logprobs) != (b.tokens, b.logprobs)]
assert not wrong, f"requests {wrong} changed"
print(f"{len(found)} requests answered, {moved} of them moved from {lost[0]}")
"""


def test_a_gpu_that_fails_in_the_middle_loses_no_request(
    require_device: Callable[[str, str | None], None], tmp_path: Path
) -> None:
    """The fault is a kernel that traps, in the process that has the first GPU: every call of it fails from then on."""
    names = [info.name for info in backend.BACKEND.probe().devices]
    for name in PAIR:
        require_device(name, None if name in names else f"there is no {name}")
    (tmp_path / "faulty.py").write_text(FAULTY, encoding="utf-8")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stderr
    print(done.stdout, done.stderr)
    assert done.stdout.startswith("128 requests answered")
    assert "CUDA_ERROR_LAUNCH_FAILED" in done.stderr
