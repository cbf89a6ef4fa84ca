"""``bitnet devices``: every backend is told, and every device has to prove itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from bitnet.core import registry
from bitnet.core.errors import DeviceError
from bitnet.core.hal import HAL_API, Device, DeviceInfo, DeviceType, ProbeResult, ProbeStatus, Program, TernaryData
from bitnet.core.reference import ReferenceDevice

Bitnet = Callable[..., Any]


def test_the_cpu_proves_itself(bitnet: Bitnet) -> None:
    ran = bitnet("devices", "--json")
    assert ran.status == 0, ran.err
    document = json.loads(ran.out)
    cpu = document["backends"][-1]
    assert (cpu["name"], cpu["status"], cpu["distribution"]) == ("cpu", "ok", "bitnet-core")
    assert cpu["devices"][-1]["name"] == "cpu:numpy"
    for found in cpu["devices"]:
        assert found["proof"]["passed"], found
        assert found["proof"]["seconds"] > 0
    assert document["selected"].startswith("cpu:")
    text = bitnet("devices").out
    assert all(found["name"] in text for found in cpu["devices"])
    assert text.endswith(f"{document['summary']}\n")


class Backend:
    """Boards that are described by the class's attributes."""

    name, hal_api = "acme", HAL_API

    def __init__(self, probe: ProbeResult, device: type[ReferenceDevice] = ReferenceDevice) -> None:
        self._probe, self._device = probe, device

    def probe(self) -> ProbeResult:
        return self._probe

    def open(self, info: DeviceInfo) -> Device:
        return self._device(info)

    def kernels(self) -> list[str]:
        return []


BOARD = DeviceInfo(
    "acme", "0", "board-1", "Acme board", "Acme", DeviceType.DISCRETE, 2**33, "4.5", ("f16",),
    {"note": "not run on hardware"},
)  # fmt: skip


@pytest.fixture
def with_backend(monkeypatch: pytest.MonkeyPatch) -> Callable[[Backend], None]:
    def install(backend: Backend) -> None:
        cpu = registry.installed()["cpu"]
        plugins = {"acme": registry.Plugin("acme", "acme-bitnet", "1.5", lambda: backend), "cpu": cpu}
        monkeypatch.setattr(registry, "installed", lambda: plugins)

    return install


def test_a_device_that_computes_wrongly_or_fails_is_told(bitnet: Bitnet, with_backend: Any) -> None:
    class Wrong(ReferenceDevice):
        def compile(self, program: Program) -> Any:
            executable = super().compile(program)
            read = executable.read

            def off_by_one(name: str, rows: int | None = None) -> Any:
                array = read(name, rows)
                if array.ndim == 2:
                    array[-1, -1] += 1
                return array

            executable.read = off_by_one  # type: ignore[method-assign]
            return executable

    with_backend(Backend(ProbeResult(ProbeStatus.OK, [BOARD]), Wrong))
    ran = bitnet("devices")
    assert ran.status == 5
    assert "acme         ok               acme-bitnet 1.5" in ran.out
    assert "FAIL" in ran.out
    assert "1 of 48 products are wrong" in ran.out
    assert "Acme board, discrete, 8.59 GB, driver 4.5, f16" in ran.out
    assert "not run on hardware" in ran.out

    class Lost(ReferenceDevice):
        def compile(self, program: Program) -> Any:
            raise DeviceError("it does not\nanswer.", device=self.info.name)

    with_backend(Backend(ProbeResult(ProbeStatus.OK, [BOARD]), Lost))
    ran = bitnet("devices", "--json")
    assert ran.status == 5
    acme = json.loads(ran.out)["backends"][0]
    assert acme["devices"][0]["proof"]["error"] == "acme:0: it does not answer."
    assert acme["devices"][0]["details"] == {"note": "not run on hardware"}


def test_an_absent_device_says_why_and_what_to_do(bitnet: Bitnet, with_backend: Any) -> None:
    probe = ProbeResult(
        ProbeStatus.DRIVER_TOO_OLD, (), "The driver is 3.1, too old.", "apt upgrade acme",
        {"libacme.so.2": "no such file", "libacme.so.1": ""}, {"driver": "3.1", "driver-needed": "4.0"},
    )  # fmt: skip
    with_backend(Backend(probe))
    ran = bitnet("devices")
    assert ran.status == 0
    assert ran.out.splitlines()[:5] == [
        "acme         driver-too-old   acme-bitnet 1.5 (driver 3.1, driver-needed 4.0)",
        "  The driver is 3.1, too old.",
        "  Hint: apt upgrade acme",
        "  tried libacme.so.2: no such file",
        "  tried libacme.so.1: opened",
    ]
    acme = json.loads(bitnet("devices", "--json").out)["backends"][0]
    assert acme == {
        "name": "acme", "distribution": "acme-bitnet", "version": "1.5", "status": "driver-too-old",
        "reason": "The driver is 3.1, too old.", "hint": "apt upgrade acme", "devices": [],
        "versions": {"driver": "3.1", "driver-needed": "4.0"},
        "tried": {"libacme.so.2": "no such file", "libacme.so.1": ""},
    }  # fmt: skip


def test_the_proof_is_of_fresh_random_numbers(bitnet: Bitnet, with_backend: Any) -> None:
    """A device cannot pass by remembering."""
    seen: list[bytes] = []

    class Recording(ReferenceDevice):
        def compile(self, program: Program) -> Any:
            loaded = [w.load() for w in program.weights.values()]
            seen.extend(w.codes.tobytes() for w in loaded if isinstance(w, TernaryData))
            return super().compile(program)

    with_backend(Backend(ProbeResult(ProbeStatus.OK, [BOARD]), Recording))
    assert bitnet("devices").status == bitnet("devices").status == 0
    assert len(seen) == len(set(seen)) == 2
