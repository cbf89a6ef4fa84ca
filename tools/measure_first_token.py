"""Time of `bitnet run` from its start to the first text on standard output, and to its end.

    uv run python tools/make_random_model.py --preset 2b4t /tmp/2b4t.gguf
    uv run python tools/measure_first_token.py --device cuda:0 /tmp/2b4t.gguf

Each round is a fresh process. Two before them, which do not count, bring the file into the page cache, compile the
kernels and write the bytecode of modules, as an installer does.

``--parts`` prints what the time is made of: medians of wall time and of processor time, of all threads, of each part
in a process that does one after the other; the command opens its device beside the metadata and the tokenizer. With
``--before SOURCE``, each round also has one of another checkout's ``packages/bitnet-core/src``, with its native
library.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from running import positive

MAIN = "import sys; from bitnet.core.cli import main; sys.exit(main())"


PROMPT = "The capital of France is"


def environment(source: Path | None) -> dict[str, str]:
    """The environment of a process that imports the core from ``source``; None: from where this one does."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept if source is None else kept | {"PYTHONPATH": str(source)}


def measure(model: Path, device: str, source: Path | None) -> dict[str, list[float]]:
    """Wall seconds to the first text; wall and processor seconds, of its helpers too, to the end of the process."""
    used = processor_seconds()
    arguments = ["run", "-m", str(model), "--device", device, "-n", "1", PROMPT]
    begin = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-c", MAIN, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment(source),
    ) as process:
        assert process.stdout is not None
        text = os.read(process.stdout.fileno(), 1 << 16)
        first = time.perf_counter() - begin
        process.communicate()
    if process.returncode or not text:
        raise SystemExit(f"bitnet run ended with {process.returncode}")
    return {"first text": [first], "end": [time.perf_counter() - begin, processor_seconds() - used]}


def processor_seconds() -> float:
    """Processor seconds of the processes that have ended; 0 on Windows, which does not count them."""
    used = os.times()
    return used.children_user + used.children_system


def measure_parts(model: Path, device: str, source: Path | None) -> dict[str, list[float]]:
    """Wall and processor seconds of each part."""
    command = [sys.executable, *sys.argv, "--one"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment(source))
    parts: dict[str, list[float]] = json.loads(done.stdout)
    return parts | {"all": [sum(values) for values in zip(*parts.values(), strict=True)]}


def parts_of(model: Path, device: str) -> dict[str, list[float]]:
    """The parts, in this process: wall and processor seconds."""
    last = [time.perf_counter(), 0.0]  # the processor's time begins with the process
    parts: dict[str, list[float]] = {}

    def part(name: str) -> None:
        now = [time.perf_counter(), time.process_time()]
        parts[name] = [new - old for new, old in zip(now, last, strict=True)]
        last[:] = now

    part("interpreter")  # and what this tool imports; without the wall time of its start
    import bitnet.core.cli  # noqa: F401
    from bitnet.core.devices.select import select_devices
    from bitnet.core.engine.worker import Worker
    from bitnet.core.gguf import GGUFFile
    from bitnet.core.loading import LoadOptions, _make
    from bitnet.core.model.file import ModelFile
    from bitnet.core.text import tokenizer

    tokenizer.encoders()
    part("imports")
    gguf = GGUFFile(model)
    part("metadata")
    file = ModelFile(gguf, "official")
    part("configuration")
    file.tokenizer  # noqa: B018
    part("tokenizer")
    (selection,) = select_devices(device, threads=None, strict=None)
    opened = selection.open(isolated=False)
    part("device")
    options = LoadOptions(
        device=opened, context=None, kv_dtype="f16", step_tokens=None, threads=None, strict=None, i2s_layout="official"
    )
    loaded = _make(file, [(None, opened)], options, Worker, None)
    part("weights")
    loaded.generate(PROMPT, max_tokens=1)
    part("prompt")
    os.write(1, json.dumps(parts).encode())
    os._exit(0)  # closing is not part of it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=positive, default=10)
    parser.add_argument("--parts", action="store_true", help="print what the time is made of")
    parser.add_argument("--before", type=Path, metavar="SOURCE", help="the packages/bitnet-core/src of another state")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        parts_of(arguments.model, arguments.device)
    measured = measure_parts if arguments.parts else measure
    states = {"": None} if arguments.before is None else {"before": arguments.before, "after": None}
    times: dict[str, list[dict[str, list[float]]]] = {state: [] for state in states}
    for _ in range(2 + arguments.rounds):
        for state, source in states.items():
            times[state].append(measured(arguments.model, arguments.device, source))
    for state, rounds in times.items():
        for name in rounds[0]:
            wall, *processor = (sorted(values) for values in zip(*(one[name] for one in rounds[2:]), strict=True))
            line = f"{state:6} {name:14} best {wall[0]:.3f} s   median {statistics.median(wall):.3f} s"
            print(line + "".join(f"   processor {t[0]:.3f} {statistics.median(t):.3f} s" for t in processor))


if __name__ == "__main__":
    main()
