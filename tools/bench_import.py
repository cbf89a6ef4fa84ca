"""Print how long `import bitnet.core` and `bitnet devices` take in a fresh process: best and median of several runs.

The aims, on a small server with two cores: import within 120 ms, `bitnet devices` with all backends installed and no
driver within 1 s. Nothing is asserted, since a busy machine proves nothing.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time

RUNS = 10
IMPORT = "import time; start = time.perf_counter(); import bitnet.core; print(time.perf_counter() - start)"


def import_time() -> float:
    """Seconds that the import takes inside a fresh process."""
    return float(subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, check=True).stdout)


def devices_time() -> float:
    """Seconds that the whole command takes, the interpreter's start included."""
    bitnet = shutil.which("bitnet", path=sysconfig.get_path("scripts"))
    if bitnet is None:
        raise SystemExit("no `bitnet` command beside this Python; run `uv run tools/bench_import.py`")
    start = time.perf_counter()
    subprocess.run([bitnet, "devices"], capture_output=True, check=True)
    return time.perf_counter() - start


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name, aim, measure in (("import bitnet.core", 120, import_time), ("bitnet devices", 1000, devices_time)):
        measure()  # fills the file caches and does not count
        times = [measure() * 1e3 for _ in range(RUNS)]
        print(f"{name:20} best {min(times):5.0f} ms   median {statistics.median(times):5.0f} ms   aim {aim} ms")


if __name__ == "__main__":
    main()
