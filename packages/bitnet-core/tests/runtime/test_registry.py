"""Installed backends, good and bad, found through real distributions in processes of their own."""

from __future__ import annotations

import importlib.metadata
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest

import bitnet.core
from bitnet.core.devices import plugin, registry
from bitnet.core.errors import DeviceError, DeviceUnavailableError
from bitnet.core.hal import HAL_API, ProbeResult, ProbeStatus
from bitnet.core.support import gpus

LIST = """
import json
from bitnet.core import list_devices
print(json.dumps({r.name: [r.distribution, r.version, r.probe.status.value, r.probe.reason, r.probe.hint,
                           repr(r.error), [d.name for d in r.probe.devices]] for r in list_devices()}))
"""


def listed(python: Any, *folders: Any, **env: str) -> tuple[dict[str, list[Any]], str]:
    ran = python(LIST, *folders, **env)
    return json.loads(ran.out), ran.err


def test_a_healthy_backend_is_found_selected_and_computes(python: Any, site: Any) -> None:
    site.install_backend("acme", "acme-bitnet", "2.5")
    reports, _ = listed(python, site)
    assert reports["acme"] == ["acme-bitnet", "2.5", "ok", "", "", "None", ["acme:0"]]
    assert list(reports)[-1] == "cpu"
    code = """
    import numpy as np
    from bitnet.core import TernaryMatrix, select_device
    selection = select_device()
    device = selection.open()
    x, w = np.arange(-8, 8, dtype=np.int8), np.eye(16, dtype=np.int8)
    print(selection.summary, device.info.name, (TernaryMatrix(w, device=device)(x) == x).all())
    """
    # (With its priority given, as this machine may have a GPU that would go first.)
    ran = python(code, site, BITNET_BACKEND_PRIORITY="acme", BITNET_LOG="info")
    assert re.fullmatch(r"requested=auto detected=\[acme, .*cpu\] selected=acme:0 acme:0 True\n", ran.out)
    assert ran.err.splitlines() == [ran.out.removesuffix(" acme:0 True\n")]


def test_a_backend_is_imported_only_when_it_matters(python: Any, site: Any) -> None:
    site.install_backend("acme", "acme-bitnet", source='print("imported")\n' + "raise SystemExit(7)")
    assert (
        "imported"
        not in python("import bitnet.core; from bitnet.core import select_device; select_device('cpu')", site).out
    )
    assert "imported" in python("from bitnet.core import select_device; select_device()", site).out


REINSTALL = "pip install --force-reinstall"
BAD_IMPORTS = [
    ("import no_such_binding", "ModuleNotFoundError: No module named 'no_such_binding'."),
    ("raise OSError('libbad.so: wrong ELF class')", "OSError: libbad.so: wrong ELF class."),
    ("raise SystemExit(3)", "SystemExit: 3."),
    ("class X(BaseException): pass\nraise X('odd')", "X: odd."),
    ("def f(): f()\nf()", "RecursionError: maximum recursion depth exceeded"),
    ("1 +", "SyntaxError: invalid syntax"),
    ("pass", "AttributeError: module"),
    ("BACKEND = 42", "TypeError: 42 is not a backend: it lacks name, hal_api, probe, open, kernels."),
]
OTHER_HAL = "implements version {} of the hardware contract (HAL), this bitnet-core version {}."
MADE_FOR_1 = "B.hal_api = 1; B.open = lambda self, info: None"
"""As backends were: without options to open a device with."""
BAD_BACKENDS = [
    ("B.name = 'worse'", "broken", "it calls itself 'worse'.", REINSTALL),
    ("del B.kernels", "broken", "it lacks kernels.", REINSTALL),
    (MADE_FOR_1, "unsupported", OTHER_HAL.format(1, HAL_API), "pip install --upgrade bad"),
    ("B.hal_api = 99", "unsupported", OTHER_HAL.format(99, HAL_API), "pip install --upgrade bitnet-core"),
    ("B.hal_api = 99; del B.kernels", "unsupported", OTHER_HAL.format(99, HAL_API), "--upgrade bitnet-core"),
    ("B.hal_api = 'one'", "unsupported", OTHER_HAL.format("one", HAL_API), "--upgrade bad"),
]
BAD_PROBES = [
    ("1 / 0", "broken", "ZeroDivisionError: division by zero."),
    ("exit(0)", "broken", "SystemExit: 0."),
    ("None", "broken", "TypeError: its probe returned NoneType, not ProbeResult."),
    ("ProbeResult('fine')", "broken", "the status 'fine', not ProbeStatus."),
    ("ProbeResult(ProbeStatus.OK, ['me'])", "broken", "its probe returned 'me', which is not a device of bad"),
    ("ProbeResult(ProbeStatus.OK, [board('0', 'cuda')])", "broken", "which is not a device of bad"),
    ("ProbeResult(ProbeStatus.OK, [board('0'), board('0')])", "broken", "the index '0'"),
    ("ProbeResult(ProbeStatus.OK, [board('a b')])", "broken", "the index 'a b'"),
    ("ProbeResult(ProbeStatus.OK)", "no-device", "It found no device."),
    ("ProbeResult(ProbeStatus.NO_PERMISSION, reason='not you')", "no-permission", "not you"),
]


def test_bad_backends_are_reported_and_the_others_work(python: Any, site: Any) -> None:
    """All of them at once, in one process, with a good one after them."""
    wanted = {}
    for i, (source, reason) in enumerate(BAD_IMPORTS):
        site.install_backend(f"bad-import{i}", f"bad-import{i}-dist", source=source)
        wanted[f"bad-import{i}"] = ("broken", reason, f"{REINSTALL} bad-import{i}-dist")
    for i, (tweak, status, reason, hint) in enumerate(BAD_BACKENDS):
        site.install_backend(f"bad{i}", f"bad{i}-dist", tweak=tweak)
        wanted[f"bad{i}"] = (status, reason, hint)
    for i, (result, status, reason) in enumerate(BAD_PROBES):
        site.install_backend(f"bad-probe{i}", f"bad-probe{i}-dist", tweak=f"B.probe = lambda self: {result}")
        hint = f"Report it to the makers of bad-probe{i}-dist" if status == "broken" else ""
        wanted[f"bad-probe{i}"] = (status, reason, hint)
    site.install_backend("zeta", "zeta-bitnet")
    reports, _ = listed(python, site)
    for name, (status, reason, hint) in wanted.items():
        distribution, version, found, why, fix, error, devices = reports[name]
        assert (distribution, version, found, devices) == (f"{name}-dist", "1.0", status, []), reports[name]
        assert reason in why
        assert hint in fix
        assert (error != "None") == (status == "broken")
    assert reports["zeta"][2] == "ok"
    assert reports["cpu"][2] == "ok"


FITTING = (
    (),
    ("bitnet-core",),
    ("numpy<1", "bitnet-core-extras<0.0.1", "bitnet-server<0.0.1"),
    ("bitnet-core[hub]>=0.0.1",),
    ("bitnet-core<0.0.1; extra == 'old'",),
    ("bitnet-core<0.0.1; python_version < '3'",),
    ("bitnet-core (is malformed",),
)
UNFIT = (
    ("bitnet-core>=0.0.1,<0.0.2",),
    ("numpy>=1", "Bitnet_Core[hub]>=0.0.1,<0.0.2 ; python_version > '3'"),
    ("bitnet.core>=0.0.1,<0.0.2; extra == ''", "bitnet-core"),
)


def test_a_backend_for_another_core_is_refused_before_its_code_runs(python: Any, site: Any) -> None:
    """By its requirements, which installers can be told to ignore: its import might fail, or do anything else."""
    for i, requires in enumerate(FITTING):
        site.install_backend(f"fits{i}", f"fits{i}-dist", requires=requires)
    for i, requires in enumerate(UNFIT):
        site.install_backend(f"old{i}", f"old{i}-dist", "0.0.1", source='print("ran")\n', requires=requires)
    site.install_backend("gone", "gone-dist", "3", source="from bitnet.core.hal import LAST_YEARS_NAME")
    site.install_backend("moved", "moved-dist", "4", source="import bitnet.core.last_years_module")
    reports, said = listed(python, site)
    assert "ran" not in said
    version = importlib.metadata.version("bitnet-core")
    for i in range(len(FITTING)):
        assert reports[f"fits{i}"][2] == "ok", reports[f"fits{i}"]
    for i in range(len(UNFIT)):
        reason = f"old{i}-dist 0.0.1 needs bitnet-core <0.0.2,>=0.0.1, but {version} is installed."
        assert reports[f"old{i}"][2:5] == ["unsupported", reason, f"pip install --upgrade bitnet-core old{i}-dist"]
    for name, version, missing in ("gone", "3", "LAST_YEARS_NAME"), ("moved", "4", "last_years_module"):
        status, reason, hint = reports[name][2:5]
        assert (status, hint) == ("unsupported", f"pip install --upgrade bitnet-core {name}-dist")
        assert reason.startswith(f"{name}-dist {version} was made for another bitnet-core: ")
        assert missing in reason


def test_the_error_is_kept_and_shown_when_asked_for(python: Any, site: Any) -> None:
    site.install_backend("bad", "bad-bitnet", source="def deep():\n    raise OSError('no libbad')\ndeep()")
    code = "from bitnet.core import select_device; print(select_device('bad').info.backend)"
    quiet = python(code, site)
    assert quiet.out == "cpu\n"
    assert "bad was asked for, but bad is broken: OSError: no libbad. Falling back to CPU" in quiet.err
    assert "Traceback" not in quiet.err
    loud = python(code, site, BITNET_LOG="debug")
    assert "in deep" in loud.err
    strict = python(code, site, BITNET_STRICT_MODE="1", check=False)
    assert "DeviceUnavailableError: bad was asked for, but bad is broken: OSError: no libbad." in strict.err


def test_of_two_with_one_name_the_same_wins_on_any_path(python: Any, site: Any, tmp_path: Any) -> None:
    """First by name, whatever the order on disk; and our own package of that name before any other."""
    other = type(site)(tmp_path / "other")
    other.folder.mkdir()
    site.install_backend("twin", "zz-bitnet", "3.0")
    other.install_backend("twin", "aa-bitnet", "1.5")
    for folders in ((site, other), (other, site)):
        reports, said = listed(python, *folders)
        assert reports["twin"][:3] == ["aa-bitnet", "1.5", "ok"]
        assert "aa-bitnet 1.5 and zz-bitnet 3.0 all offer the backend twin; that of aa-bitnet is used." in said
    other.install_backend("twin", "bitnet-twin", "0.1")
    reports, said = listed(python, site, other)
    assert reports["twin"][:3] == ["bitnet-twin", "0.1", "ok"]
    assert said.count("all offer") == 1


def test_one_distribution_found_twice_is_no_duplicate(python: Any, site: Any, tmp_path: Any) -> None:
    """As with an editable install over another: the first on the path counts."""
    other = type(site)(tmp_path / "other")
    other.folder.mkdir()
    site.install_backend("acme", "acme-bitnet", "2.0")
    other.install_backend("acme", "Acme_Bitnet", "1.0")
    reports, said = listed(python, site, other)
    assert reports["acme"][1] == "2.0"
    assert "offer" not in said


def test_nobody_displaces_the_cpu(python: Any, site: Any) -> None:
    for name in ("cpu", "gpu", "auto", "none", "Loud", "a b", "x:0"):
        site.install(
            f"thief-{abs(hash(name))}", modules={"thief.py": "raise SystemExit"}, entry_points={name: "thief:B"}
        )
    reports, said = listed(python, site)
    assert reports["cpu"][0] == "bitnet-core"
    assert reports["cpu"][2] == "ok"
    assert "'cpu' cannot be the name of a backend" in said
    assert said.count("cannot be the name of a backend") >= 6


@pytest.mark.parametrize(
    "text", ["[bitnet.backends]\nnonsense\n", "[bitnet.backends\nx = y:z\n", "\0bitnet.backends\xff"]
)
def test_a_malformed_distribution_hides_no_other(python: Any, site: Any, text: str) -> None:
    site.install("broken-dist", entry_points_txt=text)
    site.install("unrelated", entry_points_txt="[console_scripts]\nnonsense\n")
    site.install_backend("acme", "acme-bitnet")
    reports, _ = listed(python, site)
    assert reports["acme"][2] == "ok"


def test_a_name_that_resolves_to_nothing(python: Any, site: Any) -> None:
    site.install("odd", modules={"odd.py": ""}, entry_points={"odd": "odd:nothing.here"})
    reports, _ = listed(python, site)
    assert reports["odd"][2:4] == ["broken", "AttributeError: module 'odd' has no attribute 'nothing'."]


def test_a_probe_that_hangs_is_given_up(
    monkeypatch: pytest.MonkeyPatch, machine: Any, backend: Any, make_device: Any
) -> None:
    stuck = threading.Event()
    have = machine(backend("cuda"), backend("opencl", [make_device("opencl:0")]))
    monkeypatch.setattr(have["cuda"], "probe", stuck.wait)
    monkeypatch.setattr(plugin, "PROBE_SECONDS", 0.05)
    reports = {report.name: report for report in registry.list_devices()}
    stuck.set()
    assert reports["cuda"].probe.status is ProbeStatus.BROKEN
    assert "TimeoutError: no answer within 0.05 s." in reports["cuda"].probe.reason
    assert reports["opencl"].probe.status is ProbeStatus.OK


def test_a_backend_is_probed_once(machine: Any, backend: Any, make_device: Any) -> None:
    have = machine(backend("cuda", [make_device("cuda:0")]))
    for _ in range(3):
        registry.list_devices()
    assert have["cuda"].probes == 1


def test_a_gpu_without_its_wheel_is_hinted_at(monkeypatch: pytest.MonkeyPatch, machine: Any, backend: Any) -> None:
    machine(backend("opencl", result=ProbeResult(ProbeStatus.NO_DEVICE)))
    monkeypatch.setattr(gpus, "seen", lambda: (gpus.Gpu("NVIDIA", "H200"), gpus.Gpu("AMD")))
    hinted = {report.name: report.probe for report in registry.list_devices() if not report.installed}
    assert list(hinted) == ["cuda", "vulkan", "rocm"]
    assert {probe.status for probe in hinted.values()} == {ProbeStatus.LIBRARY_MISSING}
    assert hinted["cuda"].reason == "This machine has an NVIDIA GPU (H200), but bitnet-cuda is not installed."
    assert hinted["rocm"].reason == "This machine has an AMD GPU, but bitnet-rocm is not installed."
    assert hinted["rocm"].hint == "pip install bitnet-rocm"


def test_what_open_raises_is_typed(
    machine: Any, backend: Any, make_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = make_device("cuda:0")
    have = machine(backend("cuda", [info]))

    def crash(*_: Any) -> None:
        raise RuntimeError("driver says no")

    monkeypatch.setattr(have["cuda"], "open", crash)
    with pytest.raises(DeviceError, match="cuda:0: it cannot be opened: RuntimeError: driver says no"):
        registry.open_device(info)
    with pytest.raises(DeviceUnavailableError, match="vulkan is not installed"):
        registry.open_device(make_device("vulkan:0"))


def test_another_package_named_bitnet_is_told_about(python: Any, site: Any, tmp_path: Any) -> None:
    """Installed into the same folder, as pip does, it turns our namespace into its package."""
    shared = tmp_path / "shared"
    (shared / "bitnet").mkdir(parents=True)
    (shared / "bitnet" / "__init__.py").write_text("")
    (shared / "bitnet" / "core").symlink_to(Path(bitnet.core.__file__).parent)
    code = "from bitnet.core import select_device; select_device('cpu')"
    ran = python(code, shared)
    assert "Another package named bitnet hides parts of this one: pip uninstall bitnet" in ran.err
    assert "Another package" not in python(code).err
