"""What `bitnet serve --ray` costs in memory and start-up beside `bitnet serve`: processes, memory, processor time.

    uv run --group ray tools/measure_ray_processes.py
    uv run --group ray tools/measure_ray_processes.py --replicas 1 --rounds 5

Each is started, asked once, and looked at. Memory is each process's own, with pages that several share divided among
them (PSS), and all that it has mapped (RSS). Processor time is that of all processes until the server answers, those
that have ended among them; unlike the time on a clock, it hardly depends on what else the machine has to do.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import urllib.request
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from measure_ray import server
from running import positive, run_tool

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Process:
    """A process as the kernel shows it: its name, its memory in bytes, its processor time in seconds."""

    name: str
    pss: int
    rss: int
    seconds: float

    @classmethod
    def read(cls, pid: int) -> Process:
        folder = Path("/proc", str(pid))
        words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        memory = dict(re.findall(r"^(\w+): +(\d+) kB$", (folder / "smaps_rollup").read_text(), re.MULTILINE))
        ticks = (folder / "stat").read_text().rpartition(")")[2].split()[11:15]  # own and waited-for children's
        seconds = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
        return cls(named(words), int(memory["Pss"]) << 10, int(memory["Rss"]) << 10, seconds)


def named(words: list[str]) -> str:
    """A short name of a process, from its command line."""
    if found := re.match(r"ray::([\w:]+)", words[0]):
        return found[1]
    for part in ("gcs_server", "raylet", "dashboard/agent", "dashboard/dashboard", "log_monitor", "monitor", "serve"):
        if any(part in word for word in words):
            return "the command" if part == "serve" else part
    return Path(words[0]).name


def processes() -> list[Process]:
    """Those of the one session that a child of this process leads."""
    command = ["ps", "-e", "-o", "pid=,sid=,ppid="]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    rows = [tuple(map(int, line.split())) for line in listed]
    (leader,) = (pid for pid, session, parent in rows if pid == session and parent == os.getpid())
    return [Process.read(pid) for pid, session, _ in rows if session == leader]


def ask(url: str) -> None:
    body = json.dumps({"prompt": "Once upon a time", "max_tokens": 20}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    urllib.request.urlopen(request, timeout=300).close()


def measured(arguments: list[str], ready: str) -> list[Process]:
    with server(arguments, ready) as url:
        ask(url)
        return processes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=positive, default=2)
    parser.add_argument("--rounds", type=positive, default=3)
    given = parser.parse_args()
    common = ["--device", "cpu", "-t", "1", "-c", "1024", "-np", "16"]
    ways = {
        "bitnet serve": (common, "Serving"),
        "bitnet serve --ray": ([*common, "--ray", "--replicas", str(given.replicas)], "Logs: "),
    }
    found: dict[str, list[list[Process]]] = defaultdict(list)
    for _ in range(given.rounds):
        for way in random.sample(sorted(ways), len(ways)):
            found[way].append(measured(*ways[way]))
    for way, rounds in found.items():
        totals = [(sum(p.pss for p in one) / MIB, sum(p.seconds for p in one), len(one)) for one in rounds]
        print(f"{way}: PSS in MiB, processor time in s, processes: {[tuple(round(v, 1) for v in t) for t in totals]}")
        by_name: dict[str, list[Process]] = defaultdict(list)
        for one in rounds:
            for process in one:
                by_name[process.name].append(process)
        for name, same in sorted(by_name.items(), key=lambda item: -sum(p.pss for p in item[1])):
            values = [float(np.median([value(p) for p in same])) for value in (_pss, _rss, _seconds)]
            print(f"  {len(same) / given.rounds:g} x {name}: {values[0]:.0f} {values[1]:.0f} MiB, {values[2]:.1f} s")
    print(f"load average: {os.getloadavg()}")


def _pss(process: Process) -> float:
    return process.pss / MIB


def _rss(process: Process) -> float:
    return process.rss / MIB


def _seconds(process: Process) -> float:
    return process.seconds


if __name__ == "__main__":
    run_tool(main)
