#!/usr/bin/env python3
"""llama-bench's tests over libllama, where there is no llama-bench: a peer for ``bench_peers.py``.

    uv run --with llama-cpp-python==0.3.36 python tools/bench_peers.py --peer tools/llama_bench.py \\
        --peer-model tq2_0.gguf -m tq2_0.gguf

It takes llama-bench's options ``-m -p -n -t -r -o json`` and prints what ``bench_peers.py`` reads: for a prompt or for
decoded tokens, the mean of the speeds of ``-r`` runs after one that is not counted. As in llama-bench, decoded tokens
come after none, and are not chosen from the logits.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from typing import Any

BATCH = 512
"""Maximum tokens of a call, as llama-bench's ``-ub``."""


def run(llama: Any, context: Any, prompt: int, gen: int, vocab: int) -> float:
    """Tokens a second of one run, in an empty cache. ``llama`` is llama-cpp-python's module."""
    llama.llama_memory_clear(llama.llama_get_memory(context), True)
    counts = [min(BATCH, prompt - at) for at in range(0, prompt, BATCH)] or [1] * gen
    begun = time.perf_counter()
    for at, count in enumerate(counts):
        tokens = (llama.llama_token * count)(*((7919 * (at + i) + 1) % vocab for i in range(count)))
        if llama.llama_decode(context, llama.llama_batch_get_one(tokens, count)):
            raise SystemExit("llama.cpp cannot compute the model.")
        llama.llama_synchronize(context)
    return sum(counts) / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", required=True, metavar="FILE", help="the model")
    for option, value in (("-p", 0), ("-n", 0), ("-t", 1), ("-r", 1)):
        parser.add_argument(option, type=int, default=value, metavar="N")
    parser.add_argument("-o", choices=["json"], default="json")
    given = parser.parse_args()
    import llama_cpp as llama  # type: ignore[import-not-found]

    silent = llama.llama_log_callback(lambda level, text, data: None)
    llama.llama_log_set(silent, ctypes.c_void_p(0))
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(given.m.encode(), llama.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp cannot load {given.m}.")
    parameters = llama.llama_context_default_params()
    parameters.n_ctx, parameters.n_batch, parameters.n_ubatch = max(given.p, given.n, BATCH), BATCH, BATCH
    parameters.n_threads = parameters.n_threads_batch = given.t
    context = llama.llama_init_from_model(model, parameters)
    vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    run(llama, context, given.p, given.n, vocab)
    speeds = [run(llama, context, given.p, given.n, vocab) for _ in range(given.r)]
    mean = sum(speeds) / len(speeds)
    print(json.dumps([{"n_prompt": given.p, "n_gen": given.n, "n_threads": given.t, "avg_ts": mean}]))


if __name__ == "__main__":
    main()
