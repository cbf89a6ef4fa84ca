"""Run every kernel under tools that find faults behind correct results: stray accesses, races, unwritten memory.

    uv run python tools/sanitize.py cuda             # compute-sanitizer: memcheck, initcheck, synccheck, racecheck
    uv run python tools/sanitize.py opencl           # oclgrind: accesses, races
    uv run python tools/sanitize.py vulkan           # Khronos' validation layer with its checks inside of shaders

Programs are all tests of the conformance suite at its small size, and models that the device may fuse as it likes.
Each tool runs all of them, in processes of a few programs, but for two that take hundreds of times as long. oclgrind
runs a selection in which every kernel runs in each of its forms (kernel_forms.py); racecheck watches one kernel a
process, in the program that runs the fewest others, and all of that program's kernels where it fails to. No program
writes a row that the step does not use, as a write would hide a read. The exit status is 1 if a tool has found
something, or has not run to its end; its output is in ``--logs``. docs/measurements/ keeps the results, with dates.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import kernel_forms
from bitnet.core.hal import OpenOptions
from bitnet.core.testing.poison import UNWRITTEN
from running import positive, run_tool
from watched_model import MODELS, run_model

REPOSITORY = Path(__file__).parents[1]
HERE = str(Path(__file__).relative_to(REPOSITORY))
MODEL = "model, "
"""What a program begins with that is a model's name, and no test's."""
BARRIERS = "64"
"""Barriers of a block that compute-sanitizer has room for: by itself it counts too few, and each takes much memory."""
STOPPED = "was stopped"
NO_INT64 = "0x7e67e607"
"""The layer's notice that it cannot check buffer device addresses where shaders lack int64; no kernel uses any."""


@dataclass(frozen=True)
class Tool:
    """A way to run programs under watch.

    Attributes:
        command: What stands before Python; ``{log}`` is the log's file.
        found: The findings that a log and the process's output tell of, and how often each.
        each: Tests of a process.
        selected: It is slow, and runs only a selection.
        alone: It is slower still, and watches a kernel a process by these arguments, in which ``{kernel}`` stands for
            the kernel; programs run as for_racecheck.py has them.
        environment: Environment of the process.
    """

    name: str
    command: Sequence[str]
    found: Callable[[str], Counter[str]]
    each: int
    selected: bool = False
    alone: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """A process: a tool, the programs that it runs, and the only kernel that is watched, if it is not all."""

    tool: Tool
    number: int
    programs: Sequence[str]
    kernel: str = ""


@dataclass(frozen=True)
class Result:
    """What became of a part: its findings; and how it failed, if it did."""

    part: Part
    found: Counter[str]
    failed: str
    seconds: float


def errors_in_summary(text: str) -> int:
    """The number of errors and hazards in the summaries of compute-sanitizer."""
    return sum(int(n) for n in re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)s?\b(?! were)", text))


def of_compute_sanitizer(text: str) -> Counter[str]:
    """Findings by kind and kernel."""
    found: Counter[str] = Counter()
    kind = ""
    for line in text.splitlines():
        if error := re.match(
            r"=+ (Invalid \w+ \w+|Uninitialized \w+ \w+ \w+|\w*: Race|Barrier error|.*overflow)", line
        ):
            kind = error[1]
        if kind and (place := re.search(r"\bat (\w+)\(?[^+]*\+0x[0-9a-f]+", line)):
            found[f"{kind} in {place[1]}"] += 1
            kind = ""
    error_count = errors_in_summary(text)
    return found if found or not error_count else Counter({"unlisted": error_count})


def of_oclgrind(text: str) -> Counter[str]:
    """Findings by kind and kernel."""
    kinds = re.findall(r"(?m)^(\w.*) (?:at|of size).*address.*\n(?:.*\n)?\s*Kernel: (\w+)", text)
    return Counter(f"{kind} in {kernel}" for kind, kernel in kinds)


def of_validation(text: str) -> Counter[str]:
    """Findings by the layer's names of them."""
    return Counter(re.findall(r"Validation (?:Error|Warning): \[ ?([\w-]+)", text))


def tools(backend: str, sanitizer: str, folder: Path) -> list[Tool]:
    """A backend's tools, with the files that they need in ``folder``."""
    if backend == "cuda":
        command = (sanitizer, "--print-limit", "40", "--log-file", "{log}", "--num-cuda-barriers", BARRIERS, "--tool")
        whole = [
            Tool("memcheck", (*command, "memcheck", "--report-api-errors", "no"), of_compute_sanitizer, 40),
            *(Tool(name, (*command, name), of_compute_sanitizer, 40) for name in ("initcheck", "synccheck")),
        ]
        one = ("--kernel-name", "kernel_name={kernel}")
        races = Tool("racecheck", (*command, "racecheck"), of_compute_sanitizer, 1, alone=one)
        return [*whole, races]
    if backend == "opencl":
        vendors = folder / "vendors"
        vendors.mkdir(exist_ok=True)
        (vendors / "oclgrind.icd").write_text("/usr/lib/oclgrind/liboclgrind-rt-icd.so\n")
        own = {"OCL_ICD_VENDORS": str(vendors), "OCLGRIND_LOG": "{log}", "OCLGRIND_CHECK_API": "1"}
        checks: dict[str, dict[str, str]] = {"accesses": {}, "races": {"OCLGRIND_DATA_RACES": "1"}}
        alone = ("taskset", "-c", "0")
        return [
            Tool(f"oclgrind, {name}", alone, of_oclgrind, 1, selected=True, environment=own | check)
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
    return [Tool("GPU-assisted validation", (), of_validation, 20, environment=layer)]


PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "nightly or not nightly")
"""Those tests too that a push leaves out."""


def environment(device: str) -> dict[str, str]:
    """The environment of a process that runs programs."""
    own = {"BITNET_REQUIRE_DEVICES": device, "BITNET_CONFORMANCE": "small", UNWRITTEN: "1"}
    path = os.pathsep.join(filter(None, (str(REPOSITORY / "tools"), os.environ.get("PYTHONPATH"))))
    return {**os.environ, **own, "PYTHONPATH": path}


def run(arguments: Sequence[str], own: dict[str, str], out: Path, limit: float | None = None) -> int | None:
    """Run a command, its output going to a file; its exit status, or None if it was stopped at the limit."""
    with out.open("a") as file:
        process = subprocess.Popen(
            arguments, cwd=REPOSITORY, env=own, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(limit)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
    return None


def model_command(backend: str, device: str, name: str, *, for_racecheck: bool = False) -> list[str]:
    """Arguments of a Python that runs a model."""
    return [HERE, backend, "--device", device, "--model", name, *["--for-racecheck"] * for_racecheck]


def plan(backend: str, device: str, jobs: int, folder: Path) -> list[kernel_forms.Ran]:
    """Every program, run once under no tool, unless the folder has a plan already; says which fail."""
    file = folder / "forms.jsonl"
    if not file.exists():
        own, made = environment(device) | {kernel_forms.FILE: f"{file}.part"}, Path(f"{file}.part")
        made.unlink(missing_ok=True)
        parallel = ["-n", str(jobs), "--maxprocesses", str(jobs), "--dist", "load"]
        suite = f"packages/bitnet-{backend}/tests/test_conformance_{backend}.py"
        which = ("-k", f"TestConformance and {device}")
        out = folder / "plan-suite.out"
        if run([sys.executable, *PYTEST, "-p", "kernel_forms", *parallel, *which, suite], own, out):
            print(f"without a tool, tests fail: {out}", file=sys.stderr, flush=True)

        def model(name: str) -> None:
            out = folder / f"plan-{name}.out".replace(" ", "-")
            if run([sys.executable, *model_command(backend, device, name)], own, out):
                print(f"without a tool, the model {name} fails: {out}", file=sys.stderr, flush=True)

        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(model, MODELS))
        made.replace(file)
    return [kernel_forms.Ran(*line) for line in map(json.loads, file.read_text().splitlines())]


def parts_of(tool: Tool, ran: Sequence[kernel_forms.Ran], only: str) -> list[Part]:
    """The processes of a tool: a kernel each; or models by themselves, and tests several at a time, the longest first
    or as selected."""
    if tool.alone:
        found = kernel_forms.alone([r for r in ran if only in r.program])
        return [Part(tool, i, [program], kernel) for i, (kernel, program) in enumerate(found.items())]
    longest = [r.program for r in sorted(ran, key=lambda r: -r.seconds)]
    programs = kernel_forms.cover(ran) if tool.selected else longest
    programs = [name for name in programs if only in name]
    models = [name for name in programs if name.startswith(MODEL)]
    tests = [name for name in programs if not name.startswith(MODEL)]
    count = -(-len(tests) // tool.each)
    shards = [tests[i::count] for i in range(count)] + [[name] for name in models]
    return [Part(tool, i, shard) for i, shard in enumerate(shards)]


def watch(part: Part, backend: str, device: str, folder: Path, ends: float) -> Result:
    """Run a part; ``ends`` is the monotonic time at which it is stopped."""
    tool, (first, *_) = part.tool, part.programs
    log = folder / f"{tool.name}-{part.kernel or part.number}.log".replace(" ", "-").replace(",", "")
    words = [*tool.command, *(tool.alone if part.kernel else ())]
    command = [word.format(log=log, kernel=part.kernel) for word in words]
    own = environment(device) | {name: value.format(log=log) for name, value in tool.environment.items()}
    if first.startswith(MODEL):
        arguments = model_command(backend, device, first.removeprefix(MODEL), for_racecheck=bool(tool.alone))
    else:
        arguments = [*PYTEST, *["-p", "for_racecheck"] * bool(tool.alone), "-n0", "-v", *part.programs]
    began, out = time.monotonic(), log.with_suffix(".out")
    out.write_text("\n".join((*part.programs, "")))
    limit = None if ends == float("inf") else max(ends - began, 0.1)
    status = run([*command, sys.executable, *arguments], own, out, limit)
    failed = STOPPED if status is None else f"ended with {status}" if status else ""
    text = (log if log.exists() else out).read_text(errors="replace")
    result = Result(part, tool.found(text), failed, time.monotonic() - began)
    if result.found or failed:
        summary = ", ".join([f"{n} × {what}" for what, n in result.found.most_common(6)] + [failed] * bool(failed))
        print(f"{log.name}: {summary}", file=sys.stderr, flush=True)
    return result


def with_others(results: Sequence[Result]) -> list[Part]:
    """The programs in which a tool failed with one kernel alone, for a second try that watches all of their kernels."""
    failed = {r.part.programs[0]: r.part.tool for r in results if r.part.kernel and r.failed not in ("", STOPPED)}
    return [Part(tool, i, [program]) for i, (program, tool) in enumerate(failed.items())]


def table(results: Sequence[Result], ran: Sequence[kernel_forms.Ran]) -> None:
    """Print a line for each tool: programs that ran to their end, kernels that it watched in them, findings."""
    forms = {r.program: r.forms for r in ran}

    def watched(part: Part, program: str) -> list[str]:
        return [form for form in forms[program] if part.kernel in ("", form.split()[0])]

    print("| tool | programs | kernels, in forms | findings | processor time |\n| --- | --- | --- | --- | --- |")
    for tool in dict.fromkeys(result.part.tool.name for result in results):
        own = [r for r in results if r.part.tool.name == tool]
        ended = [name for r in own if not r.failed for name in r.part.programs]
        seen = {form for r in own if not r.failed for name in r.part.programs for form in watched(r.part, name)}
        kernels, all_kernels = (
            {form.split()[0] for form in some} for some in (seen, {f for fs in forms.values() for f in fs})
        )
        found: Counter[str] = sum((r.found for r in own), Counter())
        wanted = sum(len(r.part.programs) for r in own)
        findings = "; ".join(f"{n} × {what}" for what, n in found.most_common()) or "none"
        what = f"{len(ended)} of {wanted} | {len(kernels)} of {len(all_kernels)}, {len(seen)}"
        print(f"| {tool} | {what} | {findings} | {sum(r.seconds for r in own):.0f} s |")
        if missing := sorted(all_kernels - kernels):
            print(f"\n{tool} did not run to the end of: {', '.join(missing)}\n")


def main() -> int:
    """Exit status: 0 where every tool has run to its end and is content with every program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=("cuda", "opencl", "vulkan"))
    parser.add_argument("--device", help="default: the backend's first")
    parser.add_argument("--model", choices=MODELS, help="only run this model, under no tool")
    parser.add_argument("--only", default="", metavar="TEXT", help="tools whose names have this in them")
    parser.add_argument("--programs", default="", metavar="TEXT", help="programs whose names have this in them")
    parser.add_argument("--kernel", default="", metavar="TEXT", help="programs of kernels with this in their names")
    parser.add_argument("--jobs", type=positive, default=1, metavar="N", help="processes at a time")
    parser.add_argument("--for-racecheck", action="store_true", help="with --model: as for_racecheck.py has kernels")
    parser.add_argument("--limit", type=positive, metavar="SECONDS", help="stop what runs then, and say so")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="default: a temporary one")
    parser.add_argument("--sanitizer", default="compute-sanitizer", metavar="FILE", help="default: that on the PATH")
    given = parser.parse_args()
    device = given.device or f"{given.backend}:0"
    if device.partition(":")[0] != given.backend:
        parser.error(f"--device {device} is none of {given.backend}")
    if given.model:
        return watched(given.backend, device, given.model, for_racecheck=given.for_racecheck)
    began = time.monotonic()
    folder = (given.logs or Path(tempfile.mkdtemp(prefix="bitnet-sanitize-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [tool for tool in tools(given.backend, given.sanitizer, folder) if given.only in tool.name]
    if not wanted:
        parser.error(f"no tool has {given.only!r} in its name")
    ran = plan(given.backend, device, given.jobs, folder)
    if given.kernel:
        ran = [r._replace(forms=[f for f in r.forms if given.kernel in f.split()[0]]) for r in ran]
        ran = [r for r in ran if r.forms]
    parts = [part for tool in wanted for part in parts_of(tool, ran, given.programs)]
    # The first parts of a slow tool have most kernels, and begin first.
    parts.sort(key=lambda part: 1 if not part.tool.selected else 0 if part.number < given.jobs else 2)
    if not parts:
        parser.error(f"no program has {given.programs!r} in its name")
    print(f"Logs: {folder}; {len(ran)} programs; planned in {time.monotonic() - began:.0f} s\n", flush=True)
    ends = began + given.limit if given.limit else float("inf")
    with ThreadPoolExecutor(given.jobs) as pool:
        results = list(pool.map(lambda part: watch(part, given.backend, device, folder, ends), parts))
        if again := with_others(results):
            results = [r for r in results if not r.part.kernel or r.failed in ("", STOPPED)]
            results += pool.map(lambda part: watch(part, given.backend, device, folder, ends), again)
    table(results, ran)
    return 0 if not any(result.failed or result.found for result in results) else 1


def watched(backend: str, device: str, model: str, *, for_racecheck: bool) -> int:
    """Run a model, under the tool that this process runs under."""
    if for_racecheck:
        importlib.import_module("for_racecheck").install()
    opener = importlib.import_module(f"bitnet.{backend}.backend").BACKEND
    found = [info for info in opener.probe().devices if info.name == device]
    if not found:
        raise OSError(f"there is no device {device}")
    began = time.monotonic()
    if kernel_forms.FILE in os.environ:
        kernel_forms.SEEN.install()
    opened = opener.open(found[0], OpenOptions())
    run_model(opened, model)
    opened.close()
    if kernel_forms.FILE in os.environ:
        kernel_forms.SEEN.take(MODEL + model, began)
    return 0


if __name__ == "__main__":
    run_tool(main)
