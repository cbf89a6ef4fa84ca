"""Choosing devices on machines that are made up, and BITNET_* end to end in processes of their own."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest

from bitnet.core.devices import select
from bitnet.core.devices.fake import FakeBackend
from bitnet.core.devices.select import select_device
from bitnet.core.errors import DeviceUnavailableError, InvalidInputError
from bitnet.core.hal import DeviceType, OpenOptions, ProbeResult, ProbeStatus
from bitnet.core.reference import ReferenceDevice

NO_GPU = "No GPU detected; falling back to CPU (avx2). Set BITNET_LOG=debug for details."


def test_the_startup_line(machine: Any, backend: Any, make_device: Any, said: Any) -> None:
    machine(
        backend("opencl", [make_device("opencl:0")]),
        backend("cuda", [make_device("cuda:0"), make_device("cuda:1")]),
        backend("vulkan", result=ProbeResult(ProbeStatus.DRIVER_MISSING)),
    )
    selection = select_device()
    assert selection.summary == "requested=auto detected=[cuda, opencl, cpu] selected=cuda:0"
    assert said(logging.INFO) == []
    for _ in range(2):
        assert select_device().open().info.name == "cuda:0"
    assert said(logging.INFO) == [selection.summary]
    assert said(logging.WARNING) == []


@pytest.mark.parametrize(
    ("request_", "devices", "selected"),
    [
        ("auto", ["opencl:0 integrated", "vulkan:0 discrete"], "vulkan:0"),
        ("auto", ["opencl:0 cpu", "webgpu:0 virtual"], "cpu:avx2"),
        ("auto", ["opencl:0 cpu", "opencl:1 integrated", "opencl:2 discrete"], "opencl:2"),
        ("auto", ["acme:0 discrete", "zeta:0 discrete", "webgpu:0 discrete"], "webgpu:0"),
        ("auto", ["acme:0 discrete", "zeta:0 discrete"], "acme:0"),
        ("auto", ["acme:0 discrete", "cuda:0 integrated"], "acme:0"),
        ("gpu", ["opencl:0 cpu", "metal:0 integrated"], "metal:0"),
        ("cpu", ["cuda:0 discrete"], "cpu:avx2"),
        ("cpu:scalar", ["cuda:0 discrete"], "cpu:scalar"),
        ("opencl", ["cuda:0 discrete", "opencl:0 cpu"], "opencl:0"),
        ("opencl", ["opencl:0 cpu", "opencl:1 discrete"], "opencl:1"),
        ("opencl:0", ["opencl:0 cpu", "opencl:1 discrete"], "opencl:0"),
        ("  CUDA:1 ", ["cuda:0 discrete", "cuda:1 discrete"], "cuda:1"),
        ("Id-Of-Vulkan:0", ["cuda:0 discrete", "vulkan:0 discrete"], "vulkan:0"),
        ("acme:x7", ["cuda:0 discrete", "acme:x7 discrete"], "acme:x7"),
        ("", ["cuda:0 discrete"], "cuda:0"),
    ],
)
def test_what_is_asked_for_is_selected(
    machine: Any, backend: Any, make_device: Any, said: Any, request_: str, devices: list[str], selected: str
) -> None:
    by_backend: dict[str, list[Any]] = {}
    for text in devices:
        name, kind = text.split()
        by_backend.setdefault(name.split(":")[0], []).append(make_device(name, kind))
    machine(*(backend(name, infos) for name, infos in by_backend.items()))
    selection = select_device(request_)
    assert selection.info.name == selected
    assert selection.open().info == selection.info
    assert said(logging.WARNING) == ([NO_GPU] if request_ == "auto" and selected == "cpu:avx2" else [])


def test_random_machines(
    machine: Any, backend: Any, make_device: Any, monkeypatch: pytest.MonkeyPatch, rng_seed: int
) -> None:
    """Against the rule as it is written down: the best device is the one that no other comes before."""
    rng = random.Random(rng_seed)
    usual = ["cuda", "opencl", "vulkan", "rocm", "level-zero", "metal", "webgpu", "acme", "zeta", "cpu"]

    def before(a: Any, b: Any, priority: list[str]) -> bool:
        first, second = a.backend, b.backend
        if first in priority or second in priority:
            if first == second:
                return a.type is DeviceType.DISCRETE and b.type is DeviceType.INTEGRATED
            return first in priority and (second not in priority or priority.index(first) < priority.index(second))
        if "cpu" in (first, second):
            return bool(second == "cpu" != first)
        if a.type is not b.type:
            return a.type is DeviceType.DISCRETE
        return usual.index(first) < usual.index(second)

    for _ in range(300):
        names = rng.sample(usual[:-1], rng.randint(0, 9))
        made = {
            n: [make_device(f"{n}:{i}", rng.choice(list(DeviceType))) for i in range(rng.randint(0, 3))] for n in names
        }
        have = machine(*(backend(n, infos) for n, infos in made.items()))
        priority = rng.sample(sorted({*usual[:7], *names, "cpu"}), rng.choice([0, 0, 1, 2, 5]))
        monkeypatch.setenv("BITNET_BACKEND_PRIORITY", ",".join(priority))
        chosen = select_device("auto")
        eligible = [
            d for infos in made.values() for d in infos if d.type in (DeviceType.DISCRETE, DeviceType.INTEGRATED)
        ]
        eligible += have["cpu"].devices
        assert chosen.info in eligible
        assert not [d.name for d in eligible if before(d, chosen.info, priority)]
        assert set(chosen.detected) == {d.backend for infos in made.values() for d in infos} | {"cpu"}
        assert chosen.summary.endswith(f"selected={chosen.info.name}")


@pytest.mark.parametrize(
    "request_",
    ["cuba", "cuda:", "cuda:x", "cuda:-1", "cuda:0:0", "cpu:", "cpu:sse2", ":0", "no such", "auto:0", "gpu:0", "none",
     "*", "../cuda", "cuda\n", "cuda,opencl", "acme:", "12345678-1234", "\0", "é" * 5000, "cuda:٣"],
)  # fmt: skip
def test_names_that_are_none(machine: Any, backend: Any, make_device: Any, request_: str) -> None:
    machine(backend("cuda", [make_device("cuda:0")]), backend("acme", [make_device("acme:0")]))
    if request_.strip() == "cuda":
        assert select_device(request_).info.name == "cuda:0"
        return
    with pytest.raises(InvalidInputError, match="there is no device") as caught:
        select_device(request_)
    for name in ("auto", "cpu", "gpu", "cuda", "acme", "cuda:0", "acme:0", "cpu:scalar"):
        assert name in str(caught.value.hint).replace(";", ",")


UUID = "GPU-01234567-89ab-cdef-0123-456789abcdef"


@pytest.mark.parametrize(
    ("request_", "why", "hint"),
    [
        ("gpu", "there is no GPU that a backend can use (opencl: no-permission, acme: ok).", "Join the group."),
        ("cuda", "bitnet-cuda is not installed.", "pip install bitnet-cuda"),
        ("cuda:0", "bitnet-cuda is not installed.", "pip install bitnet-cuda"),
        ("metal", "bitnet-metal is not installed.", "pip install bitnet-metal"),
        ("opencl", "opencl is no-permission: /dev/dri is closed.", "Join the group."),
        ("acme:7", "there are only acme:0.", "See bitnet devices."),
        ("cpu:neon", "there are only cpu:avx2, cpu:scalar, cpu:numpy.", "See bitnet devices."),
        (UUID, "there are only acme:0, cpu:avx2, cpu:scalar, cpu:numpy.", "See bitnet devices."),
        ("0000:17:00.0", "there are only acme:0,", "See bitnet devices."),
    ],
)
def test_what_was_asked_for_is_missing(
    machine: Any, backend: Any, make_device: Any, said: Any, monkeypatch: pytest.MonkeyPatch,
    request_: str, why: str, hint: str,
) -> None:  # fmt: skip
    """The CPU takes over with a loud warning; in strict mode it is an error."""
    denied = ProbeResult(ProbeStatus.NO_PERMISSION, reason="/dev/dri is closed.", hint="Join the group.")
    machine(backend("opencl", result=denied), backend("acme", [make_device("acme:0", "virtual")]))
    selection = select_device(request_)
    assert selection.info.name == "cpu:avx2"
    assert selection.requested == request_.lower()
    (warning,) = said(logging.WARNING)
    assert warning.startswith(f"{request_.lower()} was asked for, but {why}")
    assert "Falling back to CPU (avx2)." in warning
    assert warning.endswith(hint)
    monkeypatch.setenv("BITNET_STRICT_MODE", "1")
    with pytest.raises(DeviceUnavailableError) as caught:
        select_device(request_)
    assert f"{request_.lower()} was asked for, but {why}" in caught.value.message
    assert (caught.value.hint or "") == hint
    assert caught.value.exit_code == 3
    assert select_device(request_, strict=False).info.name == "cpu:avx2"
    monkeypatch.delenv("BITNET_STRICT_MODE")
    with pytest.raises(DeviceUnavailableError):
        select_device(request_, strict=True)


def test_no_gpu_is_told_once_and_is_fine_in_strict_mode(
    machine: Any, said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine()
    for strict in ("0", "1"):
        monkeypatch.setenv("BITNET_STRICT_MODE", strict)
        selection = select_device()
        assert selection.summary == "requested=auto detected=[cpu] selected=cpu:avx2"
        selection.open().close()
    assert said(logging.WARNING) == [NO_GPU]


def test_a_cpu_that_is_preferred_is_no_fallback(machine: Any, said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine()
    monkeypatch.setenv("BITNET_BACKEND_PRIORITY", "cpu")
    for request in ("auto", "cpu"):
        assert select_device(request).open().info.name == "cpu:avx2"
    assert said(logging.WARNING) == []


def test_a_broken_backend_is_told_about_although_others_serve(
    machine: Any, backend: Any, make_device: Any, said: Any
) -> None:
    broken = ProbeResult(ProbeStatus.BROKEN, reason="OSError: no libx.", hint="pip install it")
    machine(backend("cuda", result=broken), backend("vulkan", [make_device("vulkan:0")]))
    for _ in range(2):
        assert select_device().open().info.name == "vulkan:0"
    assert said(logging.WARNING) == ["The backend cuda is broken: OSError: no libx. pip install it"]


def test_a_gpu_that_may_not_be_opened_goes_before_drivers_that_are_not_there(
    machine: Any, backend: Any, make_device: Any, said: Any
) -> None:
    """CUDA's driver is missing on every machine without NVIDIA's GPUs; Vulkan has its CPU device, but not the GPU."""
    absent = ProbeResult(ProbeStatus.DRIVER_MISSING, reason="no driver.", hint="Install the NVIDIA driver.")
    cpu = [make_device("vulkan:0", "cpu")]
    denied = ProbeResult(ProbeStatus.OK, cpu, reason="This user may not open it.", hint="Join the group.")
    machine(backend("cuda", result=absent), backend("vulkan", result=denied))
    assert select_device("gpu").info.backend == "cpu"
    (warning,) = said(logging.WARNING)
    assert warning.endswith("Join the group.")


def test_only_what_matters_is_probed(machine: Any, backend: Any, make_device: Any) -> None:
    have = machine(backend("cuda", [make_device("cuda:0")]), backend("opencl", [make_device("opencl:0")]))
    assert select_device("cpu").detected == ("cpu",)
    assert (have["cuda"].probes, have["opencl"].probes) == (0, 0)
    assert select_device("cuda").detected == ("cuda", "cpu")
    assert (have["cuda"].probes, have["opencl"].probes) == (1, 0)
    assert select_device("gpu").detected == ("cuda", "opencl", "cpu")


class TestOpening:
    """Devices that are found and then do not open."""

    def test_auto_takes_the_next_best_and_says_why(
        self, machine: Any, backend: Any, make_device: Any, said: Any
    ) -> None:
        have = machine(
            backend("cuda", [make_device("cuda:0"), make_device("cuda:1")], broken=frozenset({"cuda:0", "cuda:1"})),
            backend("vulkan", [make_device("vulkan:0", "integrated")]),
        )
        selection = select_device()
        assert selection.info.name == "cuda:0"
        assert selection.open().info.name == "vulkan:0"
        assert have["cuda"].opened == ["cuda:0", "cuda:1"]
        assert selection.summary == "requested=auto detected=[cuda, vulkan, cpu] selected=vulkan:0"
        assert said(logging.INFO) == [selection.summary]
        first, second = said(logging.WARNING)
        assert first == "cuda:0 cannot be opened; falling back to cuda:1: cuda:0: no context. Reboot."
        assert "falling back to vulkan:0" in second

    @pytest.mark.parametrize("request_", ["gpu", "cuda", "cuda:0", "id-of-cuda:0"])
    def test_a_named_one_falls_back_to_the_cpu_unless_strict(
        self, machine: Any, backend: Any, make_device: Any, said: Any, monkeypatch: pytest.MonkeyPatch, request_: str
    ) -> None:
        have = machine(backend("cuda", [make_device("cuda:0")], broken=frozenset({"cuda:0"})))
        assert select_device(request_).open().info.name == "cpu:avx2"
        assert len(said(logging.WARNING)) == 1
        monkeypatch.setenv("BITNET_STRICT_MODE", "1")
        with pytest.raises(DeviceUnavailableError, match=r"cuda:0 cannot be opened: cuda:0: no context\. Reboot\."):
            select_device(request_).open()
        assert have["cuda"].opened == ["cuda:0", "cuda:0"]
        assert have["cpu"].opened == ["cpu:avx2"]

    def test_nothing_opens(self, machine: Any, backend: Any, make_device: Any) -> None:
        machine(backend("cpu", [make_device("cpu:avx2")], broken=frozenset({"cpu:avx2"})))
        with pytest.raises(DeviceUnavailableError, match="cpu:avx2 cannot be opened"):
            select_device().open()

    def test_nothing_is_there(self, machine: Any, backend: Any) -> None:
        machine(backend("cpu", result=ProbeResult(ProbeStatus.BROKEN, reason="no numpy.", hint="pip install numpy")))
        for request in ("auto", "cpu", "gpu", "cpu:avx2"):
            with pytest.raises(DeviceUnavailableError):
                select_device(request)

    def test_a_mistake_of_the_caller_is_no_reason_to_fall_back(
        self, machine: Any, backend: Any, make_device: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        have = machine(backend("cuda", [make_device("cuda:0")]))

        def refuse(info: Any, options: Any) -> None:
            raise InvalidInputError("BITNET_THREADS is 'x'.")

        monkeypatch.setattr(have["cuda"], "open", refuse)
        with pytest.raises(InvalidInputError, match="BITNET_THREADS"):
            select_device().open()


class TestFakes:
    """``BITNET_GPU_FAKE``."""

    def test_they_are_seen_and_compute(self, machine: Any, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        have = machine(backend("rocm"))
        monkeypatch.setenv("BITNET_GPU_FAKE", " Vulkan, cuda,cuda ,")
        selection = select_device()
        assert selection.summary == "requested=auto detected=[cuda, vulkan, cpu] selected=cuda:0"
        assert selection.fake
        opened = select_device("cuda:1").open()
        assert isinstance(opened, ReferenceDevice)
        assert opened.info.name == "cuda:1"
        assert have["rocm"].probes == 0
        assert select_device("rocm").info.backend == "cpu"
        assert select_device("cpu").fake

    def test_none_hides_real_ones(
        self, machine: Any, backend: Any, make_device: Any, said: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        machine(backend("cuda", [make_device("cuda:0")]))
        assert not select_device().fake
        monkeypatch.setenv("BITNET_GPU_FAKE", "none")
        selection = select_device()
        assert selection.summary == "requested=auto detected=[cpu] selected=cpu:avx2"
        assert selection.fake
        selection.open().close()
        assert said(logging.WARNING) == [NO_GPU]
        assert select_device("cuda").info.name == "cpu:avx2"
        assert "cuda was asked for, but BITNET_GPU_FAKE hides it. Falling back" in said(logging.WARNING)[-1]

    @pytest.mark.parametrize("value", ["cuda", "none"])
    def test_strict_mode_refuses_them(self, machine: Any, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
        machine()
        monkeypatch.setenv("BITNET_GPU_FAKE", value)
        monkeypatch.setenv("BITNET_STRICT_MODE", "yes")
        for request in ("auto", "cpu", "cuda"):
            with pytest.raises(DeviceUnavailableError, match=f"BITNET_GPU_FAKE={value} is refused in strict mode"):
                select_device(request)

    def test_a_backend_refuses_them_too(self) -> None:
        pretended = FakeBackend("cuda", 1)
        (info,) = pretended.probe().devices
        with pytest.raises(DeviceUnavailableError, match="cuda:0 is a fake device"):
            pretended.open(info, OpenOptions(strict=True))

    @pytest.mark.parametrize("value", ["cpu", "cuba", "none,cuda", "cuda:0", "auto", "cuda;opencl"])
    def test_names_that_are_none(self, machine: Any, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
        machine()
        monkeypatch.setenv("BITNET_GPU_FAKE", value)
        with pytest.raises(InvalidInputError, match="BITNET_GPU_FAKE names"):
            select_device()


@pytest.mark.parametrize("value", ["cuba", "cuda,cpu:avx2", "gpu", "auto", "cuda opencl"])
def test_priorities_that_name_no_backend(machine: Any, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    machine()
    monkeypatch.setenv("BITNET_BACKEND_PRIORITY", value)
    with pytest.raises(InvalidInputError, match=r"BITNET_BACKEND_PRIORITY names .*; the backends are cuda, opencl, "):
        select_device()


def test_the_levels_of_the_cpu_are_those_of_its_backend() -> None:
    """Names that may be asked for on any machine: all that this one has are among them."""
    from bitnet.core.devices.registry import installed

    devices = installed()["cpu"].report().probe.devices
    assert devices
    assert {info.index for info in devices} <= set(select.CPU_LEVELS)
    assert [info.index for info in devices] == [
        level for level in select.CPU_LEVELS if level in {d.index for d in devices}
    ]


LINE = "from bitnet.core import select_device; s = select_device({!r}); s.open(); print(s.summary, s.fake)"


class TestProcesses:
    """Each variable, from the environment to what a program sees."""

    def test_bitnet_device(self, python: Any) -> None:
        line = LINE.format(None)
        assert (
            python(line, BITNET_DEVICE="cpu:numpy").out
            == "requested=cpu:numpy detected=[cpu] selected=cpu:numpy False\n"
        )
        explicit = python(
            "from bitnet.core import select_device; print(select_device('cpu').requested)", BITNET_DEVICE="metal"
        )
        assert explicit.out == "cpu\n"
        ran = python(line, BITNET_DEVICE="nonsense", check=False)
        assert "InvalidInputError: there is no device 'nonsense'." in ran.err

    def test_gpu_fake_priority_and_log(self, python: Any) -> None:
        env = {"BITNET_GPU_FAKE": "cuda,opencl", "BITNET_LOG": "info"}
        ran = python(LINE.format(None), **env)
        assert ran.err == "requested=auto detected=[cuda, opencl, cpu] selected=cuda:0\n"
        assert ran.out == ran.err.replace("\n", " True\n")
        ran = python(LINE.format(None), BITNET_BACKEND_PRIORITY="opencl", **env)
        assert ran.err == "requested=auto detected=[opencl, cuda, cpu] selected=opencl:0\n"
        assert python(LINE.format(None), BITNET_GPU_FAKE="cuda,opencl", BITNET_LOG="warning").err == ""

    def test_strict_mode(self, python: Any) -> None:
        loose = python(LINE.format("cuda:5"), BITNET_GPU_FAKE="cuda")
        assert "selected=cpu:" in loose.out
        assert "cuda:5 was asked for, but there are only cuda:0. Falling back to CPU" in loose.err
        strict = python(LINE.format("metal"), BITNET_STRICT_MODE="true", check=False)
        assert "DeviceUnavailableError: metal was asked for" in strict.err
        assert python(LINE.format("cpu"), BITNET_STRICT_MODE="1").out.endswith("False\n")
        assert "BITNET_STRICT_MODE is 'maybe'" in python(LINE.format(None), BITNET_STRICT_MODE="maybe", check=False).err

    def test_no_gpu_is_told_on_stderr_without_any_setting_up(self, python: Any) -> None:
        ran = python(
            "from bitnet.core import select_device\nfor _ in range(3): select_device().open()", BITNET_GPU_FAKE="none"
        )
        level = python("from bitnet.core import select_device; print(select_device('cpu').info.index)").out.strip()
        assert ran.err == f"No GPU detected; falling back to CPU ({level}). Set BITNET_LOG=debug for details.\n"
