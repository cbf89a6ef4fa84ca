"""What int8 activations cost a model: the same file on the reference device, with int8 codes and with float32.

    uv run python tools/make_random_model.py --preset bonsai-27b-small /tmp/small.gguf
    uv run python tools/measure_activations.py /tmp/small.gguf

The text is sampled from the model with float32 activations at temperature 1: it is text that the model predicts as well
as any. For random weights, errors are greater than for trained ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from bitnet.core import load_model
from bitnet.core.hal.program import NUMPY_DTYPES
from bitnet.core.reference import ReferenceDevice, device, ops
from running import positive, run_tool


def unrounded(y: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """In place of ``absmax_int8``: codes that are not rounded."""
    greatest = np.maximum(np.abs(y).max(axis=-1), 1e-5)
    return (y * (127 / greatest)[:, None]).astype(np.float32), (greatest / 127).astype(np.float32)


@contextmanager
def float_activations() -> Iterator[None]:
    """Let the reference device keep its codes as float32. Its cache must not be in int8."""
    types = {**NUMPY_DTYPES, "i8": np.dtype(np.float32)}
    with patch.object(device, "NUMPY_DTYPES", types), patch.object(ops, "absmax_int8", unrounded):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=positive, default=256, help="length of each text (default: 256)")
    parser.add_argument("--texts", type=positive, default=4)
    arguments = parser.parse_args()
    texts: list[list[int]] = []
    scores: dict[str, list[npt.NDArray[np.float64]]] = {"float32": [], "int8": []}
    for name, activations in (("float32", float_activations()), ("int8", nullcontext())):
        options: dict[str, Any] = {"context": 2 * arguments.tokens, "kv_dtype": "f32"}
        with activations, load_model(arguments.model, device=ReferenceDevice(), **options) as model:
            for seed in range(arguments.texts):
                if name == "float32":
                    sampled = model.generate(
                        [1 + seed], max_tokens=arguments.tokens, temperature=1.0, seed=seed, ignore_eos=True
                    )
                    texts.append([1 + seed, *sampled.tokens])
                scores[name].append(model.score(texts[seed]))
    exact, rounded = (np.concatenate(scores[name]) for name in ("float32", "int8"))
    apart, (least, found) = np.abs(exact - rounded), (np.exp(-each.mean()) for each in (exact, rounded))
    print(f"{len(exact)} tokens: perplexity {least:.4f} with float32, {found:.4f} with int8")
    print(f"log-probabilities are apart by {np.median(apart):.4f} (median), {np.quantile(apart, 0.99):.4f} (99 %)")


if __name__ == "__main__":
    run_tool(main)
