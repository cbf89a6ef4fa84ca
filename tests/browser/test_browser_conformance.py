"""Parts of the conformance suite at its small size on a browser's WebGPU, run by Pyodide: each in a page of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.nightly  # SwiftShader compiles each kernel for seconds

PARTS = ["ProbeTests", "LinearTests", "NormTests", "RowwiseTests", "RecurrentTests", "TransformTests"]
PARTS += ["EmbedderTests", "Int8CacheTests", "HeadTests", "TableTests", "BlockTableTests", "ExpertTests"]
PARTS += ["SampleTests", "PenaltyTests", "LogprobTests", "StartTests"]
PARTS += ["AttentionTests", "WindowTests", "LifecycleTests"]
"""Parts that pass on SwiftShader in a minute to five each. Whole models compile all kernels once more for each shape,
so the tests below run some shapes of them. Look-ahead skips, as this device does not offer it."""


@pytest.mark.parametrize("part", PARTS)
def test_conformance(chromium: Callable[..., Any], conform: Callable[..., None], part: str) -> None:
    conform(chromium, part, "bitnet.webgpu.backend", before="await BACKEND.request()")


@pytest.mark.parametrize("shape", ["rows", "matrices", "groups", "narrow"])
def test_a_mixture_of_experts(chromium: Callable[..., Any], conform: Callable[..., None], shape: str) -> None:
    """A whole model, in up to two minutes: the kernels compile for a quarter of it, and steps take nearly the rest."""
    conform(chromium, "MixtureStepTests", "bitnet.webgpu.backend", before="await BACKEND.request()", only=shape)


@pytest.mark.parametrize("shape", ["odd", "plain", "transformed", "passes"])
def test_a_hybrid_model(chromium: Callable[..., Any], conform: Callable[..., None], shape: str) -> None:
    """A whole model with recurrent layers; ``passes`` is a run of several passes."""
    conform(chromium, "HybridStepTests", "bitnet.webgpu.backend", before="await BACKEND.request()", only=shape)


ENGINES = [("HybridTests", ""), ("DeterminismTests", "f16"), ("DeterminismTests", "i8")]
"""Parts of the suite in which an engine answers requests alone and among others, and an expression for their tests."""


@pytest.mark.parametrize(("part", "only"), ENGINES)
def test_determinism(chromium: Callable[..., Any], conform: Callable[..., None], part: str, only: str) -> None:
    """In up to six minutes on a busy machine, most of it steps."""
    conform(chromium, part, "bitnet.webgpu.backend", before="await BACKEND.request()", only=only)
