"""``load_model`` on several devices: the levels of this processor, each a device of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet.core import load_model, loading
from bitnet.core.cli.run import _document, summary
from bitnet.core.devices.select import select_devices
from bitnet.core.errors import DeviceLostError, DeviceUnavailableError, InvalidInputError
from bitnet.core.model import open_model
from bitnet.core.model.default import default_model_path

OPTIONS: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
PAIR = "cpu:scalar,cpu:numpy"


@pytest.fixture
def scalar(require_device: Callable[[str, str | None], None]) -> None:
    names = [info.name for info in _cpu_levels()]
    require_device("cpu:scalar", None if "cpu:scalar" in names else "the native library is not there")


def _cpu_levels() -> Any:
    from bitnet.core.cpu.backend import BACKEND

    return BACKEND.probe().devices


def prompts(count: int) -> list[list[int]]:
    seed = int(np.random.default_rng().integers(1 << 32))
    print("seed", seed)
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, rng.integers(2, 60)).tolist() for _ in range(count)]


@pytest.mark.usefixtures("scalar")
def test_each_answer_is_what_its_device_gives_alone() -> None:
    levels = [info.name for info in _cpu_levels() if info.index != "numpy"]
    texts, expected = prompts(12), {}
    for level in levels:
        with load_model(device=level, context=128, threads=1) as model:
            expected[level] = [done.tokens for done in model.generate_batch(texts, **OPTIONS)]
    with load_model(device=",".join(levels), context=128, threads=1, max_seqs=2) as model:
        assert [info.name for info in model.devices] == levels
        done = model.generate_batch(texts, **OPTIONS)
    answered = [name for c in done for name in c.devices]
    assert [c.tokens for c in done] == [expected[name][i] for i, name in enumerate(answered)]
    assert set(answered) == set(levels)


@pytest.mark.usefixtures("scalar")
def test_the_command_line_names_the_device_that_computed() -> None:
    with load_model(device=PAIR, context=128, threads=1, max_seqs=1) as model:
        done = model.generate_batch(prompts(2), **OPTIONS)
        assert {c.devices for c in done} == {(name,) for name in PAIR.split(",")}
        for completion in done:
            (name,) = completion.devices
            assert _document(model, completion)["device"] == name
            assert summary(model, completion).startswith(f"[{name}: ")


@pytest.mark.usefixtures("scalar")
def test_a_replica_that_fails_is_replaced_and_receipts_name_who_answered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened: list[Path] = []

    def counted(path: Path, **options: Any) -> Any:
        opened.append(path)
        return open_model(path, **options)

    monkeypatch.setattr(loading, "open_model", counted)
    texts = prompts(5)
    with load_model(device=PAIR, context=128, threads=1, max_seqs=2) as model:
        assert opened == [default_model_path()]  # one mapping, for both
        scalar, numpy = (replica.executable for replica in model._replicas)
        whole = model.generate_batch(texts, **OPTIONS)
        for completion in whole:
            (name,) = completion.devices
            receipt = model.receipt(completion)
            assert receipt["compute_path"] == name
            assert receipt["backend_summary"].endswith(f"selected={name}")
            assert receipt["kernels"] == list((scalar if name == "cpu:scalar" else numpy).kernels)
        collect, steps = scalar.collect, iter(range(99))

        def failing() -> Any:
            if next(steps) == 1:
                raise DeviceLostError("it stopped answering.", device="cpu:scalar")
            return collect()

        monkeypatch.setattr(scalar, "collect", failing)
        with caplog.at_level(logging.WARNING, "bitnet"):
            done = model.generate_batch([text[::-1] for text in texts], **OPTIONS)
        assert [len(c.tokens) for c in done] == [12] * 5
        assert model.load().lost == ("cpu:scalar",)
        assert "requests continue on cpu:numpy" in caplog.text
        (moved, *_) = (c for c in done if len(c.devices) == 2)
        with pytest.raises(
            InvalidInputError, match="computed by cpu:scalar, then cpu:numpy; a receipt can name only one"
        ):
            model.receipt(moved)


@pytest.mark.usefixtures("scalar")
def test_lists_that_are_none() -> None:
    for request, message in (
        ("cpu:scalar,cpu:scalar", "names cpu:scalar twice"),
        ("cpu:scalar,", "not a list of devices"),
        ("cpu:scalar,cuba", "there is no device 'cuba'"),
        ("cpu:*", "the same processor several times"),
        ("cuba:*", "there is no device 'cuba'"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            load_model(device=request)


@pytest.mark.usefixtures("scalar")
def test_what_is_missing_of_a_list_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("BITNET_GPU_FAKE", "cuda,cuda,vulkan")
    assert [s.info.name for s in select_devices("cuda:*")] == ["cuda:0", "cuda:1"]
    assert [s.info.name for s in select_devices("vulkan,cuda:1,cpu:scalar")] == ["vulkan:0", "cuda:1", "cpu:scalar"]
    assert [s.summary.partition(" ")[0] for s in select_devices("cuda:*,vulkan")] == [
        "requested=cuda:0",
        "requested=cuda:1",
        "requested=vulkan",
    ]
    with caplog.at_level(logging.WARNING, "bitnet"):
        assert [s.info.name for s in select_devices("cuda:1,cuda:7")] == ["cuda:1"]
    assert "cuda:7 was asked for, but there are only cuda:0, cuda:1" in caplog.text
    assert [s.info.backend for s in select_devices("opencl:0,opencl:1")] == ["cpu"]
    monkeypatch.delenv("BITNET_GPU_FAKE")
    with pytest.raises(DeviceUnavailableError, match="was asked for, but"):
        select_devices("cpu:scalar,opencl:99", strict=True)
