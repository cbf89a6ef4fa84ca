"""The demo model's answers against those of Hugging Face transformers with the same weights, on every CPU level.

``golden/demo.npz`` is made by ``tools/make_demo_golden.py``, anew for each demo model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bitnet.core import load_model
from bitnet.core.cpu.backend import BACKEND
from bitnet.core.devices import registry
from bitnet.core.hal import DeviceInfo
from bitnet.core.model.default import default_model_path
from bitnet.core.model.file import open_model
from golden_models import FOLDER, Array

DECIDED = 0.1
"""Least lead of a token's logit, of the greatest in its row, at which another device must choose the same. Logits
differ by 2 % at most here, with the f16 cache; those of sums and differences lead by 50 %."""


def decided(answer: Array, lead: Array) -> list[int]:
    """An answer up to the first token that another device may choose otherwise."""
    close = np.flatnonzero(lead < DECIDED)
    tokens: list[int] = answer[: close[0] if len(close) else len(answer)].tolist()
    return tokens


@pytest.fixture(scope="module")
def golden() -> list[tuple[list[int], list[int], bool]]:
    """Prompts, as much of their answers as is decided, and whether that is all."""
    with np.load(FOLDER / "demo.npz") as file:
        if str(file["model"]) != open_model(default_model_path()).sha256():
            pytest.fail("the demo model is another one now; run tools/make_demo_golden.py")
        count = sum(name.endswith(".prompt") for name in file.files)
        found = []
        for i in range(count):
            answer = decided(file[f"{i}.answer"], file[f"{i}.lead"])
            found.append((file[f"{i}.prompt"].tolist(), answer, len(answer) == len(file[f"{i}.answer"])))
        return found


BEGINNING = 6
"""Tokens of each answer on numpy, which takes half a minute for all of them."""
WHOLE_ON_NUMPY = pytest.mark.nightly(unless_changed=["packages/bitnet-core/src/bitnet/core/reference"])


def cases() -> list[Any]:
    """The devices, and how many tokens of each answer: all, and on numpy the first ones too."""
    found = []
    for info in BACKEND.probe().devices:
        numpy_s = info.index == "numpy"
        found += [pytest.param(info, BEGINNING, id=f"{info.name}-{BEGINNING}")] if numpy_s else []
        found.append(pytest.param(info, None, id=info.name, marks=WHOLE_ON_NUMPY if numpy_s else ()))
    return found


@pytest.mark.parametrize(("info", "most"), cases())
def test_answers(info: DeviceInfo, most: int | None, golden: list[tuple[list[int], list[int], bool]]) -> None:
    device = registry.open_device(info)
    try:
        with load_model(device=device) as model:
            longest = most or max(len(answer) for _, answer, _ in golden)
            answers = model.generate_batch([p for p, _, _ in golden], max_tokens=longest, temperature=0)
    finally:
        device.close()
    for (_, expected, _), completion in zip(golden, answers, strict=True):
        assert list(completion.tokens[: len(expected)]) == expected[:longest]
    assert sum(whole for _, _, whole in golden) >= 15
