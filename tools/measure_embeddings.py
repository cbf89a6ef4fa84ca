"""The rates of an embedder and of `/v1/embeddings`, beside that at which the model reads prompts of the same lengths.

    uv run --group dev tools/measure_embeddings.py
    uv run --group dev tools/measure_embeddings.py -m model.gguf --texts 2000 --words 60 --rounds 4

A round takes new texts and measures each way once, in random order: "prompts" are steps of the generating program, full
of whole prompts with the texts' tokens and chosen tokens at their ends, with nothing between two steps but the upload;
"embed" is `Embedder.embed`, from texts to vectors; "server" is `bitnet serve`, asked by the openai client with
``--clients`` requests at a time.
Every rate is a round's; the ratios are those of the same round.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import numpy as np
import openai

from bitnet.core import Embedder, Model, load_embedder, load_model
from bitnet.core.embedder import plan
from bitnet.core.errors import BitNetError
from bitnet.core.hal import SequenceStep, Step, StepLayout, run
from bitnet.core.model.program import BLOCK_SIZE
from bitnet.server.launch.served import served
from running import positive, run_tool

WORDS = [
    *("the", "of", "and", "rain", "weather", "model", "number", "river", "cat", "small"),
    *("reads", "writes", "what", "is", "seventeen", "over", "mountain", "green", "light", "never"),
]
MAX_SEQS = 64


def draw(count: int, words: int) -> list[str]:
    """Texts of half to one and a half times as many words."""
    return [
        " ".join(random.choices(WORDS, k=random.randint(words - words // 2, words + words // 2))) for _ in range(count)
    ]


def steps(layout: StepLayout, tokens: Sequence[Sequence[int]]) -> list[Step]:
    """Steps full of whole prompts, each with a row at its end."""
    made, limits = [], layout.limits
    for parts in plan([len(one) for one in tokens], limits.max_tokens, limits.max_seqs):
        sequences, block = [], 0
        for text, start, stop in parts:
            blocks = -(-stop // BLOCK_SIZE)
            ends = stop == len(tokens[text])
            rows = range(stop - start - ends, stop - start)
            sequences.append(
                SequenceStep(tokens[text][start:stop], stop, blocks=range(block, block + blocks), rows=rows)
            )
            block += blocks
        made.append(Step(layout, sequences))
    return made


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def ask(client: openai.OpenAI, texts: Sequence[str], batch: int, clients: int) -> np.ndarray:
    """The vectors of texts, ``batch`` in a request."""

    def one(start: int) -> list[list[float]]:
        made = client.embeddings.create(model="model", input=list(texts[start : start + batch]))
        return [each.embedding for each in made.data]

    with ThreadPoolExecutor(clients) as pool:
        return np.array(list(chain.from_iterable(pool.map(one, range(0, len(texts), batch)))), np.float32)


def measure(
    model: Model, embedder: Embedder, client: openai.OpenAI, texts: Sequence[str], given: argparse.Namespace
) -> tuple[int, dict[str, float]]:
    """All tokens of the texts, and the seconds of each way.

    Raises:
        BitNetError: The server's vectors are not the embedder's.
    """
    executable, layout = model._replicas[0].executable, StepLayout(model._worker.engine.limits)
    tokens = [embedder.tokens(text) for text in texts]
    made: dict[str, np.ndarray] = {}
    ways: dict[str, Callable[[], object]] = {
        "prompts": lambda: [run(executable, step) for step in ready],
        "embed": lambda: made.update(embed=embedder.embed(texts)),
        "server": lambda: made.update(server=ask(client, texts, given.batch, given.clients)),
    }
    ready = steps(layout, tokens)
    seconds = {name: timed(ways[name]) for name in random.sample(list(ways), len(ways))}
    if np.abs(made["embed"] - made["server"]).max() > 1e-5:
        raise BitNetError("the server's vectors are not the embedder's.")
    return sum(map(len, tokens)), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, help="a model file instead of the demo model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--texts", type=positive, default=1000, help="of a round")
    parser.add_argument("--words", type=positive, default=20, help="of a text, on average")
    parser.add_argument("--rounds", type=positive, default=10)
    parser.add_argument("--batch", type=positive, default=256, help="texts of a request")
    parser.add_argument("--clients", type=positive, default=2, help="requests at a time")
    given = parser.parse_args()
    options = ["--device", given.device, *([] if given.model is None else ["-m", str(given.model)])]
    with (
        load_model(given.model, device=given.device, max_seqs=MAX_SEQS) as model,
        load_embedder(given.model, device=given.device) as embedder,
        served(options, lambda line: print(line, file=sys.stderr)) as endpoint,
        openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key=endpoint.key, max_retries=0, timeout=600) as client,
    ):
        measure(model, embedder, client, draw(64, given.words), given)  # loads the server's second copy of the weights
        found = [measure(model, embedder, client, draw(given.texts, given.words), given) for _ in range(given.rounds)]
    total = sum(tokens for tokens, _ in found)
    texts = given.rounds * given.texts
    print(f"{texts} texts, {total / texts:.1f} tokens each on average; tokens/s:")
    for name in ("prompts", "embed", "server"):
        rates = [tokens / seconds[name] for tokens, seconds in found]
        ratios = [seconds["prompts"] / seconds[name] for _, seconds in found]
        all_seconds = sum(seconds[name] for _, seconds in found)
        print(
            f"  {name:8}{total / all_seconds:8.0f} (rounds {min(rates):.0f} to {max(rates):.0f});"
            f" of the prompts' rate: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}"
        )


if __name__ == "__main__":
    run_tool(main)
