"""sentence-transformers, whose vectors a server computes; uv installs it, with several gigabytes of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.nightly(unless_changed=("packages/bitnet-server/src/bitnet/server/api/embeddings.py",))


def test_vectors_similarities_and_searches(
    demo_model: Any, running: Any, python_client: Callable[[str, str], Any]
) -> None:
    with running(demo_model, names=("m",)) as server:
        out = python_client("sentence_transformers_flows.py", server.url)
    texts = out["texts"]
    vectors = demo_model.embed(texts)
    np.testing.assert_array_equal(np.array(out["vectors"], np.float32), vectors)
    queries = demo_model.embed(["query: " + text for text in texts])
    np.testing.assert_array_equal(np.array(out["query"], np.float32), queries[0])
    scores = vectors.astype(np.float64) @ vectors.T.astype(np.float64)
    np.testing.assert_allclose(out["similarity"], scores, rtol=0, atol=1e-6)
    assert out["found"] == np.argsort(-scores, axis=1).tolist()
    assert out["accuracy"] == np.mean(np.argmax(queries @ vectors.T, axis=1) == np.arange(len(texts)))
