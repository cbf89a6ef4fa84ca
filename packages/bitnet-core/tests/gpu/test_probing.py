"""Messages of GPU backends' probes that find only devices that are not GPUs."""

from __future__ import annotations

import pytest

from bitnet.core.gpu import probing
from bitnet.core.hal import DeviceInfo, DeviceType, ProbeStatus

NODE = "/dev/dri/renderD128"


@pytest.mark.parametrize("denied", [True, False])
@pytest.mark.parametrize("gpu", [DeviceType.DISCRETE, DeviceType.INTEGRATED, None])
def test_a_gpu_that_this_user_may_not_open_is_told(
    monkeypatch: pytest.MonkeyPatch, denied: bool, gpu: DeviceType | None
) -> None:
    asked: list[list[str]] = []

    def denied_nodes(patterns: list[str]) -> list[str]:
        asked.append(patterns)
        return [NODE] if denied else []

    monkeypatch.setattr(probing, "denied_nodes", denied_nodes)
    kinds = [DeviceType.CPU, DeviceType.VIRTUAL, *([gpu] if gpu else [])]
    devices = [DeviceInfo("acme", str(i), "", "", "", kind) for i, kind in enumerate(kinds)]
    result = probing.devices_found(devices, ["dri/renderD*"], versions={"acme": "1"}, tried={"libacme": ""})
    assert (result.status, result.devices) == (ProbeStatus.OK, devices)
    assert (result.versions, result.tried) == ({"acme": "1"}, {"libacme": ""})
    assert asked == ([] if gpu else [["dri/renderD*"]])
    hinted = denied and not gpu
    assert (NODE in result.reason, "usermod" in result.hint) == (hinted, hinted)
