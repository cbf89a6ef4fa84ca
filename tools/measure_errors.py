"""Distance of each CPU level from float64, on which the bounds of the conformance suite rest.

uv run python tools/measure_errors.py              # dense_matmul, and logits of small models; minutes
uv run pytest tests/oracle/test_golden.py -s       # logits against transformers', printed for each model
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from bitnet.core.cpu.backend import BACKEND
from bitnet.core.devices import registry
from bitnet.core.hal import DenseMatmul, Device, Limits
from bitnet.core.testing.linear import uneven
from bitnet.core.testing.model import TinyModel
from bitnet.core.testing.rig import Rig, dense, tensor, tokens
from bitnet.core.testing.whole_model import errors_of_logits, models
from running import positive, run_tool

SHAPES = ((16, 5000, 4), (16, 5000, 64), (33, 2000, 100), (8, 5000, 640), (64, 700, 2560), (4, 1000, 8192))
"""Rows of x, rows of the weights, K."""


def dense_errors(devices: list[Device], rng: np.random.Generator) -> None:
    """The greatest error of an element, of the sum of its products' magnitudes."""
    for dtype in (np.float16, np.float32):
        for rows, n, k in SHAPES:
            x, w = uneven(rng, rows, k), rng.standard_normal((n, k)).astype(dtype)
            exact, magnitude = x.astype(np.float64) @ w.astype(np.float64).T, abs(x.astype(np.float64)) @ abs(w).T
            out: dict[str, Any] = {}
            specs, limits = [tensor("x", "f32", "R", k), tensor("out", "f32", "R", n)], Limits(rows, max_rows=rows)
            for device in devices:
                with Rig(device, [DenseMatmul("x", "w", "out")], specs, {"w": dense(w)}, limits=limits) as rig:
                    out[device.info.name] = rig.run(tokens(rows, range(rows)), {"x": x}, ["out"])["out"]
            in_turn = np.zeros_like(exact, np.float32)
            for column in range(k):
                in_turn += x[:, column, None] * w[:, column].astype(np.float32)
            out["one after another"] = in_turn
            errors = ", ".join(f"{name} {np.max(abs(values - exact) / magnitude):.1e}" for name, values in out.items())
            print(f"dense_matmul {np.dtype(dtype).name} K={k}: {errors}", flush=True)


def model_errors(devices: list[Device], seeds: range) -> None:
    """The errors of rows of logits, of the greatest of their row, during a chunked prefill and decode."""
    for kind in models(np.random.default_rng(0)):
        for layers, kv_dtype in ((2, "f16"), (2, "f32"), (1, "f32")):
            for device in devices:
                texts = []
                for seed in seeds:
                    rng = np.random.default_rng(seed)
                    model = TinyModel(rng, **models(rng)[kind] | {"layers": layers})
                    texts.append(errors_of_logits(device, model, kv_dtype))  # type: ignore[arg-type]
                print(
                    f"logits {kind}, {layers} layers, {kv_dtype} cache, {device.info.name}: {np.size(texts)} rows, "
                    f"at most {np.max(texts):.1e}; median of a text at most {np.median(texts, axis=1).max():.1e}",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=positive, default=25, help="models of each kind")
    arguments = parser.parse_args()
    opened = [registry.open_device(info) for info in BACKEND.probe().devices]
    dense_errors(opened, np.random.default_rng())
    model_errors(opened, range(arguments.seeds))


if __name__ == "__main__":
    run_tool(main)
