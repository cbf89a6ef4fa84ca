"""Real replicas on Ray for a comparison with the model: their steps take the model's times, and compute nothing.

`compare_simulation.py` runs :func:`main` in place of ``bitnet``. All else is the server's own: ingress, router, queues,
scheduler and KV cache.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import ray

from bitnet.core.hal import Executable, Step
from bitnet.server.ray import application
from bitnet.server.ray.engine import Engine
from cluster_model.replica import Speed

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from bitnet.server.ray.engine_settings import EngineSettings

PLACES, CONTEXT = 16, 1024
SPEED = Speed(
    sequences=(1, PLACES),
    seconds=(0.1, 0.16),
    prompt_seconds=0.002,
    places=PLACES,
    chunk=512,
    blocks=PLACES * CONTEXT // 32,
)
"""Steps are so slow that the time of Ray, server and client, on a few cores, is little beside them."""
TOKEN = 70
"""What each answer consists of: a token with text."""
MAX_REPLICAS = 16
"""CPUs that Ray is to count on: a pause needs none."""


class Paced:
    """An executable whose steps take a set time and give :data:`TOKEN`."""

    def __init__(self, executable: Executable) -> None:
        self._executable = executable
        self._begun: tuple[Step, int] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executable, name)

    def start(self, step: Step, count: int = 1) -> None:
        self._begun = step, count

    def collect(self) -> npt.NDArray[np.int32]:
        assert self._begun is not None
        step, count = self._begun
        begin = step.layout.offsets["seq_begin"]
        fed = np.diff(step.data[begin : begin + step.seqs + 1])
        time.sleep(count * SPEED.step(step.seqs, int(fed[fed > 1].sum())))
        return np.full((count, step.rows), TOKEN, np.int32)


class PacedEngine(Engine):
    """A replica whose steps take a set time."""

    async def __init__(self, settings: EngineSettings, index: DeploymentHandle[Any]) -> None:  # type: ignore[misc]
        await super().__init__(settings, index)
        engine: Any = self._model._worker.engine
        engine.preparer.lookup = False  # equal tokens would be drafted
        engine._executable = Paced(engine._executable)


def main() -> None:
    """``bitnet``, with replicas of :class:`PacedEngine`."""
    from bitnet.core.cli import main as bitnet

    vars(application)["Engine"] = PacedEngine
    vars(ray)["init"] = partial(ray.init, num_cpus=MAX_REPLICAS)
    bitnet()
