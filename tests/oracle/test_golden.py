"""Logits and greedy tokens of small BitNet models against Hugging Face transformers', on every device there is.

The files in ``golden/`` are made by ``tools/make_golden.py``; ``test_live.py`` compares with transformers itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bitnet.core.devices import registry
from bitnet.core.hal import Device, DeviceType, ProbeStatus
from bitnet.core.reference import ReferenceDevice
from bitnet.core.testing import cases
from golden_models import CONTINUED, MODELS, PROMPTS, GoldenModel, checksum

DEVICES = [
    pytest.param(info, id=info.name)
    for report in registry.list_devices()
    if report.probe.status is ProbeStatus.OK and report.installed
    for info in report.probe.devices
    # A GPU's language run on the CPU takes minutes: only in a full run.
    if info.backend == "cpu" or info.type is not DeviceType.CPU or cases.size("quick") == "full"
]


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    opened = registry.open_device(request.param)
    yield opened
    opened.close()


@pytest.fixture(params=MODELS, ids=lambda model: model.name)
def model(request: pytest.FixtureRequest) -> GoldenModel:
    chosen: GoldenModel = request.param
    return chosen


def golden_texts(model: GoldenModel, text_type: Any) -> list[Any]:
    with np.load(model.path) as golden:
        assert golden["weights"] == checksum(model.weights()), "the file was made from other weights"
        fields = ("text", "rows", "logits", "determined")
        return [text_type(n, *(golden[f"{n}.{field}"] for field in fields)) for n in PROMPTS]


@pytest.fixture
def texts(model: GoldenModel, text_type: Any) -> list[Any]:
    return golden_texts(model, text_type)


def test_files_hold_what_is_claimed(model: GoldenModel, texts: list[Any]) -> None:
    """The greedy tokens that follow each prompt, and determined rows: for a single layer at all lengths."""
    for text in texts:
        assert len(text.tokens) == text.prompt + CONTINUED
        for row, logits in zip(text.rows, text.logits, strict=True):
            if text.prompt - 1 <= row < len(text.tokens) - 1:
                assert logits.argmax() == text.tokens[row + 1]
        luck = text.prompt > 7 or model.recurrent is not None
        assert text.determined[text.rows == text.prompt - 1] or (model.layers > 1 and luck)
        assert text.prompt > 1 or text.determined.all() or model.recurrent is not None
    assert sum(text.determined.sum() for text in texts) >= (15 if model.recurrent is None else 1)


@pytest.mark.parametrize("way", ["alone", "mixed"])
def test_logits(
    device: Device, model: GoldenModel, texts: list[Any], player: Any, check_golden_rows: Any, way: str
) -> None:
    """Whole prompts and single tokens; chunks of several prompts beside decode."""
    playing = player(device, model, texts)
    try:
        check_golden_rows(texts, getattr(playing, way)())
    finally:
        playing.executable.close()


def test_greedy_tokens(device: Device, model: GoldenModel, texts: list[Any], player: Any) -> None:
    """The device's own continuation is transformers', wherever that is determined."""
    playing = player(device, model, texts)
    try:
        for i, text in enumerate(texts):
            if text.determined[text.rows >= text.prompt - 1].all():
                assert playing.greedy(i) == text.tokens[text.prompt :].tolist()
    finally:
        playing.executable.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"rms_eps": 1.5e-5},
        {"rope_theta": 505_000.0},
        {"rope_style": "interleaved"},
        {"activation": "silu"},
        {"sub_norms": False},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_another_model_would_be_noticed(
    wrong: dict[str, Any], player: Any, parts_of: Any, text_type: Any, check_golden_rows: Any
) -> None:
    """A slip of one number anywhere in the model breaks a bound."""
    model = MODELS[5]
    texts = golden_texts(model, text_type)
    config, weights = parts_of(model)
    playing = player(ReferenceDevice(), (replace(config, **wrong), weights), texts)
    try:
        with pytest.raises(AssertionError):
            check_golden_rows(texts, playing.alone())
    finally:
        playing.executable.close()
