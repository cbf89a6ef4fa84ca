"""Run every kernel under tools that find faults behind correct results: stray accesses, races, unwritten memory.

    uv run python tools/sanitize.py cuda             # compute-sanitizer: memcheck, racecheck, synccheck, initcheck
    uv run python tools/sanitize.py opencl           # oclgrind: accesses, races
    uv run python tools/sanitize.py vulkan           # Khronos' validation layer with its checks inside of shaders

Programs are the conformance suite at its small size and models that the devices may fuse as they like; see PROGRAMS.
None of them writes a row that the step does not use, as a write would hide a read. The exit status is 1 if a tool has
found something; its output is in ``--logs``. docs/measurements/ keeps the results, with their dates.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bitnet.core.hal import GREEDY, Device, Limits, OpenOptions, SamplingParams, SequenceStep, Step, StepLayout, run
from bitnet.core.testing.model import BLOCK, TinyModel
from bitnet.core.testing.poison import UNWRITTEN
from running import positive, run_tool

REPOSITORY = Path(__file__).parents[1]
MODELS: dict[str, dict[str, int]] = {
    "narrow": {"layers": 2, "vocab": 301},
    "512-wide": {"layers": 2, "heads": 8, "kv_heads": 4, "head_dim": 64, "ffn": 1376, "vocab": 2048},
    "2B4T-wide": {"layers": 1, "heads": 20, "kv_heads": 5, "head_dim": 128, "ffn": 6912, "vocab": 1500},
}
"""Shapes that differ in the kernels they get: by plain code, by tensor cores, and as a real model's layer."""

SAMPLING = {
    "greedy": GREEDY,
    "drawn": SamplingParams(0.8, seed=5),
    "top-p": SamplingParams(0.9, top_k=40, top_p=0.9, seed=6),
}
NO_INT64 = "0x7e67e607"
"""The layer's notice that it cannot check buffer device addresses where shaders lack int64; no kernel uses any."""
LIMITS = Limits(max_tokens=320, max_seqs=64, max_rows=64, max_blocks=24)
PROMPTS = ((3,), (40, 1, 9), (300,), (17, 100, 64, 5))
"""Tokens of each sequence of a prefill step."""
BATCHES = (1, 2, 3, 5, 8, 13, 33, 64)
"""Sequences of a decode step: 3, 5, 13 and 33 are fewer than the rows of the recording that serves them."""


def run_model(device: Device, name: str) -> None:
    """Prefills, one in two chunks, and decode steps of every batch, alone and several at once."""
    rng = np.random.default_rng(7)
    model, layout = TinyModel(rng, positions=LIMITS.max_blocks * BLOCK, **MODELS[name]), StepLayout(LIMITS)  # type: ignore[arg-type]
    executable = device.compile(model.program(LIMITS, LIMITS.max_seqs * LIMITS.max_blocks))

    def part(s: int, count: int, length: int, rows: Sequence[int], sampling: SamplingParams) -> SequenceStep:
        blocks = range(s * LIMITS.max_blocks, (s + 1) * LIMITS.max_blocks)
        return SequenceStep(rng.integers(0, model.vocab, count, np.int32), length, blocks, rows, sampling)

    def feed(parts: Sequence[SequenceStep], count: int = 1, *, logits: bool = False) -> None:
        run(executable, Step(layout, parts, block_size=BLOCK, logits=logits), count)

    for counts in PROMPTS:
        feed([part(s, n, n, [n - 1], GREEDY) for s, n in enumerate(counts)])
    feed([part(0, 20, 320, [], GREEDY), part(1, 2, 3, [0, 1], SAMPLING["top-p"])])
    for s in range(0, LIMITS.max_seqs, 16):
        feed([part(s + i, 20, 20, [], GREEDY) for i in range(16)])
    for batch in BATCHES:
        for sampling in SAMPLING.values():
            for count, logits in ((1, True), (1, False), (3, False)):
                feed([part(s, 1, 21, [0], sampling) for s in range(batch)], count, logits=logits)
    executable.close()


class Command(NamedTuple):
    """Arguments of a Python that runs kernels; ``{device}`` stands for the device's name."""

    name: str
    arguments: Sequence[str]


def suite(backend: str, name: str, tests: str) -> Command:
    """A part of the conformance suite."""
    file = f"packages/bitnet-{backend}/tests/test_conformance_{backend}.py"
    return Command(
        name, ["-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", file, "-k", f"TestConformance and ({tests})"]
    )


def commands(backend: str) -> list[Command]:
    """The programs to run on a backend's device; oclgrind takes a thousand times as long, and gets fewer."""
    here = str(Path(__file__).relative_to(REPOSITORY))
    models = {
        name: Command(f"model, {name}", [here, backend, "--model", name, "--device", "{device}"]) for name in MODELS
    }
    if backend == "opencl":
        few = "test_embed or test_norm_quant_rounds or test_glu_norm_quant_beyond or test_quantize_of_zeros"
        few += " or test_greedy or test_ternary_matmul_of_stacked or (test_huge_scores and f16)"
        return [suite(backend, "operations", few)]
    return [
        suite(backend, "products", "matmul or head or quantize"),
        suite(backend, "rows", "embed or norm or glu or greedy or draw or filters"),
        suite(backend, "attention", "attention or heads or mixed or scores or rope or cache"),
        suite(backend, "whole", "test_model or test_layer or test_count or test_a_step"),
        *models.values(),
    ]


@dataclass(frozen=True)
class Tool:
    """A way to run a program under watch.

    Attributes:
        command: What stands before Python; ``{log}`` is the log's file.
        environment: Environment of the process.
        found: How many findings a log and the process's output tell of.
    """

    name: str
    command: Sequence[str]
    environment: dict[str, str]
    found: Callable[[str], int]


def errors_in_summary(text: str) -> int:
    """The number of errors and hazards in the summaries of compute-sanitizer."""
    return sum(int(n) for n in re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)s?\b(?! were)", text))


def tools(backend: str, folder: Path) -> list[Tool]:
    if backend == "cuda":
        return [
            Tool(
                name,
                ["compute-sanitizer", "--tool", name, "--print-limit", "40", "--log-file", "{log}"],
                {},
                errors_in_summary,
            )
            for name in ("memcheck", "racecheck", "synccheck", "initcheck")
        ]
    if backend == "opencl":
        vendors = folder / "vendors"
        vendors.mkdir(exist_ok=True)
        (vendors / "oclgrind.icd").write_text("/usr/lib/oclgrind/liboclgrind-rt-icd.so\n")
        checks: dict[str, dict[str, str]] = {"accesses": {}, "races": {"OCLGRIND_DATA_RACES": "1"}}
        own = {"OCL_ICD_VENDORS": str(vendors), "OCLGRIND_LOG": "{log}", "OCLGRIND_CHECK_API": "1"}
        return [
            Tool(
                f"oclgrind, {name}",
                ["taskset", "-c", "0"],
                own | check,
                lambda text: len(re.findall(r"(?m)^\w.*address", text)),
            )
            for name, check in checks.items()
        ]
    settings = folder / "vk_layer_settings.txt"
    settings.write_text(
        "khronos_validation.debug_action = VK_DBG_LAYER_ACTION_LOG_MSG\n"
        "khronos_validation.report_flags = error,warn\n"
        "khronos_validation.log_filename = stdout\n"
    )
    layer = {"VK_INSTANCE_LAYERS": "VK_LAYER_KHRONOS_validation", "VK_LAYER_SETTINGS_PATH": str(folder)}
    layer["VK_LAYER_MESSAGE_ID_FILTER"] = NO_INT64
    layer["VK_LAYER_ENABLES"] = "VK_VALIDATION_FEATURE_ENABLE_GPU_ASSISTED_EXT"
    return [
        Tool("GPU-assisted validation", [], layer, lambda text: len(re.findall(r"Validation (?:Error|Warning)", text)))
    ]


def watch(tool: Tool, what: Command, device: str, folder: Path) -> str:
    """Print and return what the tool has found: ``clean``, a number of findings, or that the program has failed."""
    log = folder / f"{tool.name}-{what.name}.log".replace(" ", "-").replace(",", "")
    command = [word.format(log=log) for word in tool.command]
    arguments = [word.format(device=device) for word in what.arguments]
    required = {"BITNET_REQUIRE_DEVICES": device, "BITNET_CONFORMANCE": "small", UNWRITTEN: "1"}
    own = {name: value.format(log=log) for name, value in tool.environment.items()}
    began = time.monotonic()
    done = subprocess.run(
        [*command, sys.executable, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, **required, **own},
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    log.with_suffix(".out").write_text(said)
    found = tool.found(log.read_text(errors="replace") if log.exists() else said)
    result = f"{found} findings" if found else f"FAILED with {done.returncode}" if done.returncode else "clean"
    print(f"| {tool.name} | {what.name} | {result}, {time.monotonic() - began:.0f} s |", flush=True)
    return result


def main() -> int:
    """Exit status: 0 where every tool is content with every program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=("cuda", "opencl", "vulkan"))
    parser.add_argument("--device", help="default: the backend's first")
    parser.add_argument("--model", choices=MODELS, help="only run this model, under no tool")
    parser.add_argument("--only", default="", metavar="TEXT", help="programs and tools whose names have this in them")
    parser.add_argument("--jobs", type=positive, default=1, metavar="N", help="processes at a time")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="default: a temporary one")
    given = parser.parse_args()
    device = given.device or f"{given.backend}:0"
    if device.partition(":")[0] != given.backend:
        parser.error(f"--device {device} is none of {given.backend}")
    if given.model:
        backend = importlib.import_module(f"bitnet.{given.backend}.backend").BACKEND
        found = [info for info in backend.probe().devices if info.name == device]
        if not found:
            parser.error(f"there is no device {device}")
        opened = backend.open(found[0], OpenOptions())
        run_model(opened, given.model)
        opened.close()
        return 0
    folder = (given.logs or Path(tempfile.mkdtemp(prefix="bitnet-sanitize-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [(t, p) for p in commands(given.backend) for t in tools(given.backend, folder)]
    pairs = [(t, p) for t, p in pairs if given.only in f"{t.name}: {p.name}"]
    if not pairs:
        parser.error(f"no program or tool has {given.only!r} in its name")
    print(f"Logs: {folder}\n\n| tool | program | result |\n| --- | --- | --- |", flush=True)
    with ThreadPoolExecutor(given.jobs) as pool:
        results = list(pool.map(lambda pair: watch(pair[0], pair[1], device, folder), pairs))
    return 0 if all(result == "clean" for result in results) else 1


if __name__ == "__main__":
    run_tool(main)
