"""A process that was forked has the memory of its parent and none of its threads: nothing there may wait for one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")

FORK = """
import os, sys
def in_fork(call):
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        try:
            print(call())
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
        sys.exit()
    print(os.waitpid(child, 0)[1])
"""

MODEL = """
from bitnet.core import load_model
with load_model(device="cpu", context=64, threads=2) as model:
    answer = lambda: model.generate("Hi", max_tokens=2).tokens
    in_fork(answer)
    before = answer()
    in_fork(answer)
    print(answer() == before)
"""

ARRAYS = """
import numpy as np
from bitnet.core.arrays import TernaryMatrix, ternary_matmul
rng = np.random.default_rng()
x, w = rng.integers(-127, 128, (3, 64), np.int8), rng.integers(-1, 2, (16, 64), np.int8)
wanted = x.astype(int) @ w.T.astype(int)
with TernaryMatrix(w, device="cpu") as matrix:
    in_fork(lambda: (matrix(x) == wanted).all())
    once = lambda: (ternary_matmul(x, w, device="cpu") == wanted).all()
    print(once())
    in_fork(once)
    print((matrix(x) == wanted).all())
"""


def run(script: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK + script],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"BITNET_THREADS": "2"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_model_of_the_parent_says_so() -> None:
    refused = "InvalidInputError: the model was loaded before this process was forked. Load it after that."
    assert run(MODEL) == [refused, "0", refused, "0", "True"]


def test_a_matrix_of_the_parent_and_a_product_compute() -> None:
    assert run(ARRAYS) == ["True", "0", "True", "True", "0", "True"]
