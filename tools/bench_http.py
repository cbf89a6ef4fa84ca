"""Measure the server's overhead: tokens per second through HTTP and of the engine alone, in one process.

    uv run tools/bench_http.py                                    # over a device that only lets time pass
    uv run tools/bench_http.py -m model.gguf --device cuda:0      # over a real one

The engine's requests are read by a thread each; those of the server by ``bitnet bench-serve``, which is a process of
its own. ``--answers`` names what is sent: ``plain`` completions; chats whose answers are half a ``thinking`` one; chats
with ``tools``, whose grammar waits for a call; or both, as an ``agent`` sends them. The engine's requests are plain
ones whose prompts are as long. As ``bench-serve`` does, the engine's side begins with a request alone, which the rate
leaves out; processor times have it on both sides.

Engine and HTTP take turns, and each number is the median of the rounds, those of the ratios, too. Other work on the
machine distorts the ratio of rates. That of processor times, engine over HTTP, says what the server adds, apart from
what its client takes. ``--profile`` prints where the server's event loop spends its time; ``--idle`` opens connections
that send nothing.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import pstats
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import uvicorn

from bench_host import Waiting, engine_over
from bitnet.core import Model, load_model
from bitnet.core.engine.worker import Worker
from bitnet.core.support.garbage import set_aside
from bitnet.core.support.turns import short_turns
from bitnet.core.text import sandbox
from bitnet.core.text.chat import ChatTemplate
from bitnet.server import Settings, create_app
from bitnet.server.models.threads import PROMPT_THREADS
from running import positive, run_tool

AGENT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if false %}<tool_call>{{ tools }}</think>{% endif %}<think>\n"
)
"""A chat template such as agents' models have: it opens a thought, and tools are called by a tag."""
TOOL = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
ANSWERS = ("plain", "thinking", "tools", "agent")
THINKING = ("thinking", "agent")
SAMPLING: dict[str, dict[str, float]] = {"greedy": {}, "top_p": {"temperature": 0.8, "top_p": 0.95}}


def waiting_model(seconds: float, streams: int) -> Model:
    """The demo model's tokenizer and template over a device that takes ``seconds`` for a pass."""
    model = load_model(device="cpu", max_seqs=1, threads=1)
    model._worker = Worker(engine_over(Waiting(seconds, 500), streams))
    return model


def random_tokens(count: int, length: int) -> list[list[int]]:
    """Tokens of ``count`` prompts, other ones each time, so that none is in the KV cache."""
    tokens: list[list[int]] = np.random.default_rng().integers(0, 250, (count, length)).tolist()
    return tokens


def random_texts(model: Model, count: int, length: int) -> list[str]:
    """What to say in ``count`` chats: random tokens, whose text mostly has more tokens than that."""
    return [model.tokenizer.decode(tokens) for tokens in random_tokens(count, length)]


def engine_alone(
    model: Model, streams: int, given: argparse.Namespace, sampling: dict[str, float], kind: str
) -> dict[str, float]:
    """Tokens a second, the median TTFT in ms and µs of processor time a token, each stream read by a thread of its own.

    Its prompts are as long as those that the server makes of one of :data:`ANSWERS`.
    """
    rng = np.random.default_rng()
    prompts = random_tokens(streams + 1, given.prompt)
    if kind != "plain":
        chats = ([{"role": "user", "content": text}] for text in random_texts(model, streams + 1, given.prompt))
        prompts = [[*model.chat_tokens(chat, thinks=kind in THINKING)] for chat in chats]
    alone, *prompts = prompts
    pauses = np.cumsum(rng.exponential(1 / given.rate, streams)) if given.rate else np.zeros(streams)

    def read(prompt: list[int], pause: float) -> tuple[int, float]:
        time.sleep(max(0.0, start + pause - time.perf_counter()))
        begun = time.perf_counter()
        (request,) = model.submit(prompt, max_tokens=given.tokens, ignore_eos=True, **sampling)  # type: ignore[arg-type]
        next(request)
        first = time.perf_counter() - begun
        return len(request.result().tokens), first

    with ThreadPoolExecutor(streams) as pool:
        start, spent = time.perf_counter(), time.process_time()
        of_alone, _ = read(alone, 0.0)
        start = time.perf_counter()
        results = list(pool.map(read, prompts, pauses))
        seconds, spent = time.perf_counter() - start, time.process_time() - spent
    tokens = sum(n for n, _ in results)
    ttft = statistics.median(first for _, first in results) * 1e3
    return {"rate": tokens / seconds, "ttft": ttft, "cpu": spent / (tokens + of_alone) * 1e6}


def through_http(
    model: Model,
    url: str,
    loop: Callable[[], float],
    streams: int,
    given: argparse.Namespace,
    sampling: dict[str, float],
    kind: str,
) -> dict[str, float]:
    """The same for one of :data:`ANSWERS` by ``bitnet bench-serve``, and the event loop's time a token."""
    command = [sys.executable, "-m", "bitnet.core", "bench-serve", "--json", "--ignore-eos", "--base-url", url]
    options = {
        "endpoint": given.endpoint,
        "num-prompts": streams,
        "input-len": given.prompt,
        "output-len": given.tokens,
        "seed": time.monotonic_ns() % 2**31,
        **({"request-rate": given.rate} if given.rate else {}),
        **{name.replace("_", "-"): value for name, value in sampling.items()},
    }
    if kind != "plain":
        thinks = {"thinking_token_budget": given.tokens // 2 if kind in THINKING else 0}
        calls = {"tools": [{"type": "function", "function": TOOL}]} if kind in ("tools", "agent") else {}
        options |= {"endpoint": "chat", "extra-body": json.dumps({**thinks, **calls})}
    with TemporaryDirectory() as folder:
        if options["endpoint"] == "chat":  # random prompts would be asked of the server, which costs it time
            path = Path(folder, "prompts.jsonl")
            texts = random_texts(model, streams, given.prompt)
            path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
            options["dataset-path"] = path
        spent, looped = time.process_time(), loop()
        done = subprocess.run(
            [*command, *(f"--{name}={value}" for name, value in options.items())], stdout=subprocess.PIPE, check=True
        )
        spent, looped = time.process_time() - spent, loop() - looped
    found = json.loads(done.stdout)
    assert found["failed"] == 0, found["errors"]
    assert found["total_output_tokens"] == streams * given.tokens
    tokens = (streams + 1) * given.tokens
    return {
        "rate": found["output_throughput"],
        "ttft": found["median_ttft_ms"],
        "cpu": spent / tokens * 1e6,
        "loop": looped / tokens * 1e6,
    }


@contextmanager
def serving(model: Model, places: int, profile: cProfile.Profile | None) -> Iterator[tuple[str, Callable[[], float]]]:
    """A thread serves the model, as ``bitnet serve`` would: its address, and the processor time of the thread."""
    app = create_app(model, Settings(max_seqs=places))
    config = uvicorn.Config(app, port=0, log_config=None, access_log=False, server_header=False, backlog=1024)
    server = uvicorn.Server(config)

    def run() -> None:
        if profile is not None:
            profile.enable()
        with short_turns():  # as a server of its own has them
            server.run()
        if profile is not None:
            profile.disable()

    sandbox.warm(PROMPT_THREADS)  # as a server does that loads its model itself, if there are processors
    set_aside()  # likewise: else searches for garbage go through all of it
    thread = threading.Thread(target=run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        assert thread.ident is not None
        clock = time.pthread_getcpuclockid(thread.ident)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", lambda: time.clock_gettime(clock)
    finally:
        server.should_exit = server.force_exit = True
        thread.join(30)
        app.state.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, help="a real model")
    parser.add_argument("--device", help="where it runs")
    parser.add_argument("--step-ms", type=float, default=2.3, help="a pass of the device that only lets time pass")
    parser.add_argument("--streams", type=positive, nargs="+", default=[1, 64])
    parser.add_argument("--sampling", choices=SAMPLING, nargs="+", default=list(SAMPLING))
    parser.add_argument("--prompt", type=positive, default=32)
    parser.add_argument("--tokens", type=positive, default=512)
    parser.add_argument("--rate", type=float, help="requests a second, at random times; all at once if left out")
    parser.add_argument("--endpoint", default="completions")
    parser.add_argument("--answers", choices=ANSWERS, nargs="+", default=["plain"])
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--idle", type=int, default=0, help="connections that send nothing meanwhile")
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    places = max(given.streams)
    real = given.model is not None or given.device is not None
    model = load_model(given.model, device=given.device, max_seqs=places, prompt_lookup=False) if real else None
    profile = cProfile.Profile() if given.profile else None
    with ExitStack() as stack:
        used = stack.enter_context(model if model is not None else waiting_model(given.step_ms / 1e3, places))
        if given.answers != ["plain"]:
            tokenizer = used.tokenizer
            template = ChatTemplate(AGENT, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
            used._file.__dict__["chat_template"] = template
        used.warm()
        url, loop = stack.enter_context(serving(used, places, profile))
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        for _ in range(given.idle):
            stack.enter_context(socket.create_connection(address))
        name = used.device.name if real else f"a device that takes {given.step_ms:g} ms"
        print(f"{name}; prompts of {given.prompt}, answers of {given.tokens} tokens, {given.idle} idle")
        for streams, drawn, kind in itertools.product(given.streams, given.sampling, given.answers):
            pairs = [
                (
                    engine_alone(used, streams, given, SAMPLING[drawn], kind),
                    through_http(used, url, loop, streams, given, SAMPLING[drawn], kind),
                )
                for _ in range(given.rounds)
            ]
            ratios = [http["rate"] / engine["rate"] for engine, http in pairs]
            shares = [engine["cpu"] / http["cpu"] for engine, http in pairs]
            engine, http = (
                {name: statistics.median(r[name] for r in side) for name in side[0]}
                for side in zip(*pairs, strict=True)
            )
            print(
                f"{streams:3} streams {drawn:6} {kind:8} engine {engine['rate']:9,.1f} tokens/s, HTTP "
                f"{http['rate']:9,.1f}: {statistics.median(ratios):.1%} ({min(ratios):.1%} to {max(ratios):.1%}); "
                f"TTFT {engine['ttft']:,.1f} and {http['ttft']:,.1f} ms; processor time a token {engine['cpu']:.1f} "
                f"and {http['cpu']:.1f} us: {statistics.median(shares):.1%} ({min(shares):.1%} to {max(shares):.1%}), "
                f"of which the event loop {http['loop']:.1f}",
                flush=True,
            )
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    run_tool(main)
