"""Compare the tokens that a device samples from its own form of the LM head with those of the exact logits.

    uv run python tools/check_head.py -n 1000                                   # the demo model
    uv run python tools/make_random_model.py --preset 2b4t /tmp/2b4t.gguf
    uv run python tools/check_head.py -n 1000 -m /tmp/2b4t.gguf

Each context is fresh random tokens. It is continued by one greedy token twice: as usual, when a device may score most
of the vocabulary approximately, and with more log-probabilities requested than a device reports, when it computes every
logit from the model's own weights and the host takes the greatest. The exit status is 1 if a token differs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from bitnet.core import load_model
from bitnet.core.hal import MAX_LOGPROBS
from running import positive, run_tool


def main() -> int:
    """Exit status: 0 where all tokens are the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, metavar="FILE", help="default: the demo model")
    parser.add_argument("-n", type=positive, default=1000, metavar="N", help="contexts")
    parser.add_argument("--length", type=positive, default=6, metavar="N", help="tokens of a context at most")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int)
    given = parser.parse_args()
    rng = np.random.default_rng(given.seed)
    different = done = 0
    with load_model(given.model, device=given.device, context=64, max_seqs=16) as model:
        while done < given.n:
            parallel = min(given.n - done, int(rng.integers(1, 17)))  # steps of every size
            contexts = [
                rng.integers(0, model.config.vocab_size, rng.integers(1, given.length + 1)).tolist()
                for _ in range(parallel)
            ]
            usual, exact = (
                [c.tokens for c in model.generate_batch(contexts, max_tokens=1, ignore_eos=True, logprobs=logprobs)]
                for logprobs in (None, MAX_LOGPROBS + 1)
            )
            different += sum(a != b for a, b in zip(usual, exact, strict=True))
            done += parallel
        print(f"{model.config.name} on {model.device.name}: {done - different} of {done} greedy tokens are the same")
    return 1 if different else 0


if __name__ == "__main__":
    run_tool(main)
