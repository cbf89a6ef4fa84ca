"""``python encoding_cost.py`` prints what the CPU spends on submitting a step of 30 layers, in microseconds.

Its launches, six a layer and six more, have eight buffers and two numbers each, and are not run. No two that follow one
another have the same pipeline.
"""

import os
import time

os.environ["METAL_TEST_NO_RUN"] = "1"

import metal_on_cpu  # noqa: F401
import numpy as np

from bitnet.core.gpu import KernelSpec, Launch
from bitnet.metal.backend import _look
from bitnet.metal.device import MetalDriver

LAUNCHES, TIMES = 30 * 6 + 6, 30

result, objc, devices = _look()
assert objc is not None
driver = MetalDriver(objc, devices[0], result.devices[0])
buffers = [driver.alloc(1024) for _ in range(8)]
kernels = [KernelSpec("row_sums", "row_sums", (("WG", 64), ("COLS", columns))) for columns in (64, 128)]
args = (*buffers, np.int32(1), np.int32(2))
launches = [Launch(kernels[i % 2], (4, 1, 1), (64, 1, 1), args) for i in range(LAUNCHES)]
for way, graphs in (("encoded again", False), ("indirect commands", True)):
    driver.graphs = graphs
    recording = driver.record(launches)
    spent = []
    for _step in range(TIMES):
        start = time.perf_counter()
        driver.submit(recording)
        spent.append((time.perf_counter() - start) * 1e6)
        driver.upload(buffers[0], np.zeros(1, np.int32))  # which waits
    print(f"{way}: {LAUNCHES} launches, {min(spent):.0f} µs at least, {sorted(spent)[TIMES // 2]:.0f} in the median")
for buffer in buffers:
    driver.free(buffer)
driver.close()
