"""A device in a process of its own: errors are passed on, the process may die, and closing leaves nothing behind."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet.core import errors, load_model
from bitnet.core.cpu.backend import BACKEND
from bitnet.core.devices.isolated import IsolatedDevice, open_isolated
from bitnet.core.errors import BitNetError, DeviceError, DeviceLostError, InvalidInputError, ModelFileError
from bitnet.core.hal import Limits, OpenOptions, SequenceStep, Step, StepLayout, run
from bitnet.core.hal import Program as HalProgram
from bitnet.core.support.helper.program import Program, command, first_message
from bitnet.core.support.helper.values import dumped, loaded
from bitnet.core.testing.model import TinyModel

LIMITS = Limits(4, 2, 2, 4)


@pytest.fixture
def device() -> Iterator[Any]:
    info = next(info for info in BACKEND.probe().devices if info.index == "numpy")
    opened = open_isolated(info, OpenOptions())
    yield opened
    opened.close()


def program() -> HalProgram:
    return TinyModel(np.random.default_rng(), layers=1).program(LIMITS, 8)


def step() -> Step:
    return Step(StepLayout(LIMITS), [SequenceStep([1, 2], 2, [0], [1])])


def running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("written", [b"", b"\0\0\0", bytes(15) + b"\x0330"])
def test_a_child_without_a_request_ends_silently(written: bytes) -> None:
    """Its parent was interrupted before it had written one."""
    module = Program(code="bitnet.core.devices.examinee", purpose="", setup=b"30")
    ran = subprocess.run(command(module), input=written, capture_output=True, timeout=60, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"", b"")


def test_a_probe_that_nobody_waits_for_ends_silently(tmp_path: Path) -> None:
    request = b'{"backend": "cpu", "seconds": 60}'
    module = Program(code="bitnet.core.devices.examinee", purpose="", setup=b"30")
    first = b"".join(first_message(module))
    frames = b"".join(bytes(8) + len(data).to_bytes(8, "big") + data for data in (first, request))
    arguments = command(module)
    with (tmp_path / "errors").open("w+b") as errors_of_child:
        pipe = subprocess.PIPE
        with subprocess.Popen(arguments, stdin=pipe, stdout=pipe, stderr=errors_of_child) as process:
            assert process.stdin
            assert process.stdout
            process.stdin.write(frames)
            process.stdin.flush()
            assert process.stdout.read(9) == b"r" + bytes(8)
            process.stdout.close()
            status = process.wait(60)
        errors_of_child.seek(0)
        assert (status, errors_of_child.read()) == (0, b"")


def test_every_error_goes_through_a_pipe() -> None:
    made: list[BitNetError] = [ModelFileError("is bad", path=Path("a.gguf"), field="x", offset=3, hint="Mend it.")]
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, BitNetError)]
    for kind in kinds:
        if issubclass(kind, DeviceError):
            made.append(kind("broke", device="cuba:0", hint="Mend it."))
        elif kind is not ModelFileError:
            made.append(kind("broke", hint="Mend it."))
    assert len(made) == len(kinds)
    for error in made:
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_values_go_through_a_pipe_unchanged() -> None:
    """Arrays of any length, order and stride; what arrives is writable and aligned."""
    rng = np.random.default_rng()
    for count in range(8):
        sent = [rng.integers(0, 9, rng.integers(0, 40), np.int8) for _ in range(count)]
        value = (count, "x" * count, sent, rng.normal(size=(3, count)).T, np.arange(9)[::2])
        found = loaded(bytearray(b"".join(dumped(value))))
        assert found[:2] == value[:2]
        for got, meant in zip([*found[2], *found[3:]], [*sent, *value[3:]], strict=True):
            np.testing.assert_array_equal(got, meant)
            assert got.flags.aligned
            got[...] = 1


def test_it_computes_what_the_device_computes(device: IsolatedDevice) -> None:
    one, here = program(), BACKEND.open(device.info, OpenOptions())
    try:
        with_child, alone = device.compile(one), here.compile(one)
        assert with_child.kernels == ()
        for _ in range(2):
            np.testing.assert_array_equal(run(with_child, step()), run(alone, step()))
            np.testing.assert_array_equal(with_child.read("logits", 1), alone.read("logits", 1))
        assert with_child.kernels == alone.kernels
        assert with_child.stats() == alone.stats()
        assert device.memory().total == here.memory().total
    finally:
        here.close()
    assert device.pid != os.getpid()


def test_wrong_input_is_the_callers_error_and_nothing_ends(device: IsolatedDevice) -> None:
    executable = device.compile(program())
    with pytest.raises(InvalidInputError, match="count"):
        run(executable, step(), 0)
    with pytest.raises(InvalidInputError, match="nowhere"):
        executable.read("nowhere")
    assert run(executable, step()).shape == (1, 1)
    executable.close()
    executable.close()
    with pytest.raises(DeviceError, match="closed"):
        run(executable, step())


def test_a_weight_that_cannot_be_loaded_is_told_as_it_is(device: IsolatedDevice) -> None:
    one = program()
    weights: dict[str, Any] = dict(one.weights)
    name = next(iter(weights))

    def fail() -> Any:
        raise ModelFileError("was cut short", path="model.gguf")

    weights[name] = replace(weights[name], load=fail)
    with pytest.raises(ModelFileError, match=r"model.gguf: was cut short"):
        device.compile(replace(one, weights=weights))
    assert run(device.compile(one), step()).shape == (1, 1), "the device can be used after that"


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_process_that_ends_is_a_lost_device(device: IsolatedDevice) -> None:
    executable = device.compile(program())
    run(executable, step())
    names = executable.kernels
    os.kill(device.pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(DeviceLostError, match=r"cpu:numpy: its process crashed \(SIGKILL"):
            run(executable, step())
    assert executable.kernels == names, "receipts of what it has computed name them"
    executable.close()


def test_closing_ends_the_process(device: IsolatedDevice) -> None:
    device.close()
    device.close()
    assert not running(device.pid)
    with pytest.raises(DeviceError, match="closed"):
        device.memory()


def test_a_process_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **options: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(subprocess, "Popen", fail)
    with pytest.raises(DeviceError, match=r"no process can be started for it \(Cannot allocate memory\)"):
        open_isolated(BACKEND.probe().devices[0], OpenOptions())


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_requests_of_a_killed_process_are_answered_by_another_device(
    require_device: Callable[[str, str | None], None], caplog: pytest.LogCaptureFixture
) -> None:
    """A GPU and the CPU as replicas: the GPU's process is killed in the middle of its answers."""
    backend = pytest.importorskip("bitnet.opencl.backend").BACKEND
    require_device("opencl:0", None if backend.probe().devices else "there is no OpenCL device")
    rng = np.random.default_rng()
    prompts = [rng.integers(0, 256, rng.integers(2, 40)).tolist() for _ in range(6)]
    with load_model(device="opencl:0,cpu", context=128, threads=1, max_seqs=3) as model:
        first, second = (replica.device for replica in model._replicas)
        assert isinstance(first, IsolatedDevice)
        assert not isinstance(second, IsolatedDevice)
        requests = [model.submit(prompt, max_tokens=24, ignore_eos=True)[0] for prompt in prompts]
        while not first_tokens(model, "opencl:0"):
            next(requests[0])
        with caplog.at_level(logging.WARNING, "bitnet"):
            os.kill(first.pid, signal.SIGKILL)
            done = [request.result() for request in requests]
        assert model.load().lost == ("opencl:0",)
    assert f"requests continue on {second.info.name}" in caplog.text
    assert [len(c.tokens) for c in done] == [24] * 6
    assert not running(first.pid)


def first_tokens(model: Any, name: str) -> bool:
    """Whether a device has computed something: its executable has launched kernels."""
    return any(replica.executable.kernels for replica in model._replicas if replica.device.info.name == name)
