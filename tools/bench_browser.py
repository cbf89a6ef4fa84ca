"""The demo model's speed on the best CPU device and on numpy, in turns, in Pyodide on Node.

    node tests/browser/run.mjs PYODIDE tools/bench_browser.py packages/bitnet-core/src JINJA

PYODIDE is a folder with Pyodide's files and numpy's wheel; JINJA has jinja2 and markupsafe. Prints tokens a second of
each turn: of a decode of 32 tokens, and of a prompt of some 190.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from bitnet.core import load_model_async
from bitnet.core.api import Model
from bitnet.core.cpu.backend import BACKEND

TURNS, TOKENS = 3, 33
THINGS = ", ".join(["a dog", "a cat", "a tree", "the sea", "a house"] * 12)


async def timed(model: Model, text: str, count: int) -> tuple[float, float]:
    """Tokens a second of a prompt and of the decode after it; the latter is 0 for one token."""
    messages = [{"role": "user", "content": text}]
    done = await model.chat_stream(messages, max_tokens=count, temperature=0.8, seed=7, ignore_eos=True)
    times = done.timings
    prompt = (times.prompt_tokens - times.cached_tokens) / (times.token_times[0] - times.started)
    return prompt, (count - 1) / (times.token_times[-1] - times.token_times[0]) if count > 1 else 0.0


async def main(devices: Sequence[str]) -> None:
    models = [await load_model_async(device=name, context=512, max_seqs=2) for name in devices]
    for model in models:
        await timed(model, "Tell me a story.", 8)
    print(f"{'turn':<5} {'device':<12} {'decode/s':>9} {'prompt/s':>9}")
    for turn in range(TURNS):
        for model in models if turn % 2 == 0 else models[::-1]:
            _, decode = await timed(model, f"Tell me story {turn} about a dog.", TOKENS)
            prompt, _ = await timed(model, f"{turn} Tell me a story about {THINGS}.", 1)
            print(f"{turn:<5} {model.device.name:<12} {decode:>9.2f} {prompt:>9.1f}", flush=True)
    for model in models:
        model.close()


if __name__ == "__main__":
    if sys.platform != "emscripten":
        raw = argparse.RawDescriptionHelpFormatter
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
        parser.parse_args()
        parser.error("runs in Pyodide alone; --help says how")
    found = [info.name for info in BACKEND.probe().devices]
    # Pyodide's loop runs already, and goes on with the task after this line.
    tasks = [asyncio.ensure_future(main([found[0], found[-1]]))]
