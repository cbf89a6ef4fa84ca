"""Time to load a model, and memory to load it and to generate.

    uv run python tools/make_random_model.py --preset 2b4t /tmp/2b4t.gguf
    uv run python tools/measure_load.py --device cpu /tmp/2b4t.gguf

Each round is a fresh process; the first one warms the page cache. Peak memory is Linux's ``VmHWM``, which counts pages
mapped from the file too. Only the used part of the KV cache is committed, in huge pages where the system has them.
Without ``--device`` the drivers of every installed backend are looked at, and some of them are large.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from running import positive, run_tool


def measure(path: Path, device: str | None, tokens: int) -> dict[str, float]:
    """Load and generate in this process."""
    begin = time.perf_counter()
    from bitnet.core import load_model

    imported = time.perf_counter()
    with load_model(path, device=device) as model:
        loaded = time.perf_counter()
        completion = model.generate("The sea is", max_tokens=tokens, ignore_eos=True)
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return {
            "import_s": imported - begin,
            "load_s": loaded - imported,
            "tokens": len(completion.tokens),
            "peak": int(status["VmHWM"].split()[0]) * 1024,
            "cache": model.cache_bytes,
            "file": path.stat().st_size,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--device")
    parser.add_argument("--tokens", type=positive, default=32, help="to generate before memory is read")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.model, arguments.device, arguments.tokens)))
        return
    for number in range(arguments.rounds):
        done = subprocess.run([sys.executable, *sys.argv, "--one"], stdout=subprocess.PIPE, check=False)
        if done.returncode:
            raise SystemExit(done.returncode)  # it has said why
        m = json.loads(done.stdout)
        print(
            f"{'cold?' if number == 0 else 'warm '} import {m['import_s']:.2f} s, load {m['load_s']:.2f} s; "
            f"{m['tokens']} tokens, peak {m['peak'] / 1e6:.0f} MB = {m['peak'] / m['file']:.2f} × the file's "
            f"{m['file'] / 1e6:.0f} MB and up to {m['cache'] / 1e6:.0f} MB of KV cache"
        )


if __name__ == "__main__":
    run_tool(main)
