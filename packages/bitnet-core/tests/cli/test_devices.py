"""``bitnet devices``: every backend is listed, and every device must prove that it computes correctly."""

from __future__ import annotations

import getpass
import itertools
import json
import platform
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bitnet.core.devices import registry
from bitnet.core.support.system import core_version

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
    listed = bitnet("devices", BITNET_GPU_FAKE="none")
    assert listed.err == ""  # that no GPU is used is seen in the list
    assert all(found["name"] in listed.out for found in cpu["devices"])
    assert listed.out.endswith("requested=auto detected=[cpu] selected={}\n".format(cpu["devices"][0]["name"]))


SOURCE = """
from bitnet.core.errors import DeviceError
from bitnet.core.hal import HAL_API, DeviceInfo, DeviceType, ProbeResult, ProbeStatus, TernaryData
from bitnet.core.reference import ReferenceDevice

BOARD = DeviceInfo(
    "acme", "0", "board-1", "Acme board", "Acme", DeviceType.DISCRETE, 2**33, "4.5", ("f16",),
    {{"note": "not run on hardware", "verified": "not verified on this hardware"}},
)
PROBE = ProbeResult(ProbeStatus.OK, [BOARD])
class Board(ReferenceDevice):
    pass
{source}
class Backend:
    name, hal_api = "acme", HAL_API
    def probe(self):
        return PROBE
    def open(self, info, options):
        return Board(info)
    def kernels(self):
        return []
BACKEND = Backend()
"""
"""A backend with a board, of which ``source`` makes another ``PROBE`` or ``Board``."""


@pytest.fixture
def with_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """``with_backend(source)``: install :data:`SOURCE`, and nothing besides the CPU."""
    count = itertools.count()
    site = tmp_path / "site"

    def install(source: str) -> None:
        module = f"acme_{next(count)}"
        for name in (*registry.GPU_ORDER, "acme"):  # the first of a name on the path counts
            entries = f"acme = {module}:BACKEND\n" if name == "acme" else ""
            folder = site / f"bitnet_{name}-1.5.dist-info"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: bitnet-{name}\nVersion: 1.5\n")
            (folder / "entry_points.txt").write_text(f"[bitnet.backends]\n{entries}")
        (site / f"{module}.py").write_text(SOURCE.format(source=textwrap.dedent(source)))
        registry.installed.cache_clear()

    monkeypatch.syspath_prepend(site)
    yield install
    registry.installed.cache_clear()


def test_a_device_that_computes_wrongly_or_fails_is_told(bitnet: Bitnet, with_backend: Any) -> None:
    with_backend("""
        class Board(ReferenceDevice):
            def compile(self, program, *, keep=False):
                executable = super().compile(program)
                read = executable.read
                def off_by_one(name, rows=None):
                    array = read(name, rows)
                    if array.ndim == 2:
                        array[-1, -1] += 1
                    return array
                executable.read = off_by_one
                return executable
    """)
    ran = bitnet("devices")
    assert ran.status == 5
    assert "acme         ok               bitnet-acme 1.5" in ran.out
    assert "FAIL" in ran.out
    assert "1 of 48 products are wrong" in ran.out
    assert "Acme board, discrete, 8.59 GB, driver 4.5, f16" in ran.out
    assert "not run on hardware" in ran.out
    assert "not verified on this hardware" in ran.out

    with_backend("")
    ran = bitnet("devices")
    assert "not run on hardware" in ran.out
    assert "not verified" not in ran.out  # since it has just computed
    assert "verified" not in json.loads(bitnet("devices", "--json").out)["backends"][0]["devices"][0]["details"]

    with_backend("""
        class Board(ReferenceDevice):
            def compile(self, program, *, keep=False):
                raise DeviceError("it does not\\nanswer.", device=self.info.name)
    """)
    ran = bitnet("devices", "--json")
    assert ran.status == 5
    acme = json.loads(ran.out)["backends"][0]
    assert acme["devices"][0]["proof"]["error"] == "acme:0: it does not answer."
    assert acme["devices"][0]["details"]["verified"] == "not verified on this hardware"


def test_an_absent_device_says_why_and_what_to_do(bitnet: Bitnet, with_backend: Any) -> None:
    with_backend("""
        PROBE = ProbeResult(
            ProbeStatus.DRIVER_TOO_OLD, (), "The driver is 3.1, too old.", "apt upgrade acme",
            {"libacme.so.2": "no such file", "libacme.so.1": ""}, {"driver": "3.1", "driver-needed": "4.0"},
        )
    """)
    ran = bitnet("devices")
    assert ran.status == 0
    assert ran.out.splitlines()[:5] == [
        "acme         driver-too-old   bitnet-acme 1.5 (driver 3.1, driver-needed 4.0)",
        "  The driver is 3.1, too old.",
        "  Hint: apt upgrade acme",
        "  tried libacme.so.2: no such file",
        "  tried libacme.so.1: opened",
    ]
    acme = json.loads(bitnet("devices", "--json").out)["backends"][0]
    assert acme == {
        "name": "acme", "distribution": "bitnet-acme", "version": "1.5", "status": "driver-too-old",
        "reason": "The driver is 3.1, too old.", "hint": "apt upgrade acme", "devices": [],
        "versions": {"driver": "3.1", "driver-needed": "4.0"},
        "tried": {"libacme.so.2": "no such file", "libacme.so.1": ""},
    }  # fmt: skip


def test_a_report_has_what_helps_and_nothing_private(bitnet: Bitnet, with_backend: Any) -> None:
    with_backend("""
        import getpass, pathlib, platform
        private = [platform.node(), getpass.getuser(), str(pathlib.Path.home() / "lib"), "/srv/my secret/x.so"]
        PROBE = ProbeResult(
            ProbeStatus.BROKEN, (), "GPU-01234567-89ab-cdef-0123-456789abcdef of " + " ".join(private),
            "https://example.com/help says more", {"/home/jane/drivers/libacme.so": "no such file"}, {"driver": "3.1"},
        )
    """)
    plain, report = bitnet("devices").out, bitnet("devices", "--report").out
    private = ("/home/jane", "/srv/my", str(Path.home()), "GPU-0123", "456789abcdef")
    assert [name for name in private if name not in plain] == []
    assert [name for name in private if name in report] == []
    assert not re.search(rf"\b({re.escape(getpass.getuser())}|{re.escape(platform.node())})\b", report)
    assert [name for name in ("libacme.so", "https://example.com/help", "(driver 3.1)") if name not in report] == []
    for label in ("system: ", "processor: ", "GPUs seen without a driver: ", "Python: ", "packages: "):
        assert f"\n{label}" in f"\n{report}"
    assert f"bitnet-core {core_version()}" in report
    assert bitnet("devices", "--json", "--report").status == 2


def test_the_proof_is_of_fresh_random_numbers(bitnet: Bitnet, with_backend: Any, tmp_path: Path) -> None:
    """A device cannot pass by remembering."""
    with_backend(f"""
        class Board(ReferenceDevice):
            def compile(self, program, *, keep=False):
                with open({str(tmp_path / "seen")!r}, "a") as file:
                    for weight in program.weights.values():
                        if isinstance(data := weight.load(), TernaryData):
                            file.write(data.codes.tobytes().hex() + "\\n")
                return super().compile(program)
    """)
    assert bitnet("devices").status == bitnet("devices").status == 0
    seen = (tmp_path / "seen").read_text().splitlines()
    assert len(seen) == len(set(seen)) == 2
